# SPDX-License-Identifier: Apache-2.0
"""Configs: composing them as the verbs do, and the schemas of what they may hold; importable without torch."""
