# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests and benchmarks of reinforcement learning."""
