# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a run takes no mixed precision whose optimizer leaves out steps."""

from __future__ import annotations

from typing import Any, cast

import pytest

from embodix.training.accelerator import ObservedAccelerator, StepObserver

OBSERVER = cast(StepObserver, None)


@pytest.mark.parametrize(("launched", "given"), [("fp16", {}), ("FP16", {}), ("no", {"mixed_precision": "fp16"})])
def test_scaled_losses_are_refused(launched: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(ValueError, match=r"leaves out steps.*mixed_precision=fp16\. Take bf16 or no"):
        ObservedAccelerator(OBSERVER, force_cpu=True, **given)


def test_what_was_given_goes_before_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert ObservedAccelerator(OBSERVER, force_cpu=True, mixed_precision="no").scaler is None
