# SPDX-License-Identifier: Apache-2.0
"""Typed config schemas; importable without torch or any host."""
