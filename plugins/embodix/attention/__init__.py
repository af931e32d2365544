# SPDX-License-Identifier: Apache-2.0
"""Variable-length attention behind one call: packed q, k, v and the segments they fall into."""

from embodix.attention.backend import AttentionBackend
from embodix.attention.segments import Segments

__all__ = ["AttentionBackend", "Segments"]
