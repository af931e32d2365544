# SPDX-License-Identifier: Apache-2.0
"""Guarded runtime patches of upstream, one file a patch; see ``embodix.patching``."""
