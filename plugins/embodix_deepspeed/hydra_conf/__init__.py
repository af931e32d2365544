# SPDX-License-Identifier: Apache-2.0
"""Config groups; a package so that Hydra finds it in any install."""
