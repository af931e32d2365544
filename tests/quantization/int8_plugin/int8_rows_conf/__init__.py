# SPDX-License-Identifier: Apache-2.0
"""Config groups of the plugin."""
