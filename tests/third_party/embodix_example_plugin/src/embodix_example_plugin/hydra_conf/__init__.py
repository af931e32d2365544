# SPDX-License-Identifier: Apache-2.0
"""Hydra choices of this plugin."""
