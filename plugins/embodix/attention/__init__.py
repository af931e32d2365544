# SPDX-License-Identifier: Apache-2.0
"""Variable-length attention behind one call: packed q, k, v and the segments they fall into."""

from embodix.attention.segments import Segments
from embodix.contracts import AttentionBackend

__all__ = ["AttentionBackend", "Segments"]
