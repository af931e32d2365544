# SPDX-License-Identifier: Apache-2.0
"""Helpers for testing plugins against upstream: error measures and small policies."""
