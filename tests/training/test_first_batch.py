# SPDX-License-Identifier: Apache-2.0
"""The first batch is kept and the policy's own method is back after one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from embodix.training.first_batch import FirstBatch


class Doubling(nn.Module):
    def forward(self, batch: dict[str, Any]) -> Any:
        return 2 * batch["x"]


def test_only_the_first_batch_is_kept() -> None:
    policy = Doubling()
    kept = FirstBatch(policy)
    outputs = [policy({"x": torch.tensor(float(value))}).item() for value in (1, 2, 3)]
    assert outputs == [2, 4, 6]
    assert kept.batch is not None
    assert kept.batch["x"] == 1
    assert "forward" not in policy.__dict__


def test_a_method_set_on_the_instance_comes_back() -> None:
    policy = Doubling()

    def tripling(batch: dict[str, Any]) -> Any:
        return 3 * batch["x"]

    policy.forward = tripling  # type: ignore[method-assign]
    FirstBatch(policy)
    assert [policy({"x": value}) for value in (1, 2)] == [3, 6]
    assert policy.__dict__["forward"] is tripling


def test_release_before_any_batch() -> None:
    policy = Doubling()
    kept = FirstBatch(policy)
    kept.release()
    kept.release()
    assert kept.batch is None
    assert "forward" not in policy.__dict__
