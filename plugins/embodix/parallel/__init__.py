# SPDX-License-Identifier: Apache-2.0
"""Spreading a policy, its optimizer and its training step over processes."""
