# SPDX-License-Identifier: Apache-2.0
"""Keep a bounded number of video decoders open, and none that another process opened."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_decoder_cache",
    target="lerobot.datasets.video_utils.VideoDecoderCache, _default_decoder_cache",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="Every worker keeps a decoder and a file handle of every video it has ever read, until memory or file "
    "handles run out; a worker forked after the parent has read a video fails with 'Could not push packet to decoder'.",
    upstream="https://github.com/huggingface/lerobot/pull/3614",
    why_safe="Upstream's own cache makes and closes every decoder; only the ones used longest ago are closed, and a "
    "file that is read again is opened again.",
    remove_when="upstream's cache has a bound and is emptied in forked workers",
)


def apply(max_decoders: int = 64) -> Callable[[], None]:
    """Put a bounded cache in the place of upstream's.

    Args:
        max_decoders: decoders a process keeps open.

    Raises:
        ValueError: fewer than one.
    """
    from lerobot.datasets import video_utils

    if max_decoders < 1:
        raise ValueError(f"A reader needs one open decoder at least; got max_decoders={max_decoders}.")

    class BoundedDecoderCache(video_utils.VideoDecoderCache):
        """Upstream's cache with the decoders used longest ago closed.

        Attributes:
            num_opens: decoders opened so far by this process.
        """

        def __init__(self) -> None:
            super().__init__()
            self._cache: OrderedDict[str, tuple[Any, Any]] = OrderedDict()
            self._owner = os.getpid()
            self.num_opens = 0

        def get_decoder(self, video_path: str) -> Any:
            self._forget_inherited()
            known = str(video_path) in self._cache
            decoder = super().get_decoder(video_path)
            with self._lock:
                self.num_opens += not known
                self._cache.move_to_end(str(video_path))
                while len(self._cache) > max_decoders:
                    _, file_handle = self._cache.popitem(last=False)[1]
                    file_handle.close()
            return decoder

        def _forget_inherited(self) -> None:
            """A fork shares the parent's file positions: decoders of another process are of no use here."""
            if self._owner != os.getpid():
                super().__init__()
                self._cache = OrderedDict()
                self._owner, self.num_opens = os.getpid(), 0

    undo_class = replace_attribute(video_utils, "VideoDecoderCache", BoundedDecoderCache)
    undo_cache = replace_attribute(video_utils, "_default_decoder_cache", BoundedDecoderCache())

    def undo() -> None:
        video_utils._default_decoder_cache.clear()
        undo_cache()
        undo_class()

    return undo
