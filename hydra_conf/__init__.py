# SPDX-License-Identifier: Apache-2.0
"""Hydra config groups of embodix."""
