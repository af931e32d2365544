# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: policies with log-probabilities, their objectives, and the scheduling of their parts."""
