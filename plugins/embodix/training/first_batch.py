# SPDX-License-Identifier: Apache-2.0
"""The first batch of a run as the policy sees it, where upstream's own batch is not the reference to compare with."""

from __future__ import annotations

import functools
from typing import Any


class FirstBatch:
    """Takes the place of ``policy.forward`` for one call.

    Attributes:
        batch: the batch of that call, None before it.
    """

    def __init__(self, policy: Any) -> None:
        self.batch: dict[str, Any] | None = None
        self._policy = policy
        self._replaced = policy.__dict__.get("forward")
        self._forward = policy.forward
        self._method = functools.partial(self._keep)  # not a bound method, which accelerate would bind to the policy
        policy.forward = self._method

    def _keep(self, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.batch is None:
            self.batch = dict(batch)
        self.release()
        return self._forward(batch, *args, **kwargs)

    def release(self) -> None:
        """Put the policy's own method back, unless another stands before it; a second call does nothing."""
        if self._policy.__dict__.get("forward") is not self._method:
            return
        if self._replaced is None:
            del self._policy.forward
        else:
            self._policy.forward = self._replaced
