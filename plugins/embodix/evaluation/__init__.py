# SPDX-License-Identifier: Apache-2.0
"""Closed-loop evaluation of policies in simulators, and the controls to read the results against."""
