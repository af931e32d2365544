# SPDX-License-Identifier: Apache-2.0
"""Simulators: those of an environment's config, off-screen rendering, and a process of their own to crash in."""
