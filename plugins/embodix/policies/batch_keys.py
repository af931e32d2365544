# SPDX-License-Identifier: Apache-2.0
"""Errors about keys of a batch that name what is there and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def require_key(batch: Mapping[str, Any], key: str, reason: str) -> Any:
    """``batch[key]``.

    Raises:
        ValueError: the key is absent; the message has the reason it is needed, the keys that are there, and the
            nearest of them.
    """
    if key in batch:
        return batch[key]
    near = nearest(key, batch)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(f"{reason} needs the batch key {key!r}; got {', '.join(sorted(batch))}.{hint}")
