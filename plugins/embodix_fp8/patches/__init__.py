# SPDX-License-Identifier: Apache-2.0
"""Guarded patches of upstream, one file a patch."""
