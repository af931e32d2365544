# SPDX-License-Identifier: Apache-2.0
"""The check against upstream one sample at a time: rounding for the fast path, more where a mask is missing."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentSdpa
from embodix.contracts import ChecksReference
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_groot.testing import SMALL_ARCHITECTURE, random_batch, small_groot, strengthen
from embodix_groot.wrapper import GrootInstallation, GrootN15Wrapper

TEXTS, IMAGES = [2, 12, 5], [1, 3, 2]


class WithoutCausality(SegmentSdpa):
    """Lets the language model see later tokens."""

    def __call__(self, *tensors, causal=False, **options):
        return super().__call__(*tensors, causal=False, **options)


def installed(attention=None, **settings) -> tuple[GrootInstallation, dict]:
    policy = strengthen(small_groot({**SMALL_ARCHITECTURE, "dropout": 0.3}))
    chosen = FastPathSettings(PaddingFreePacker(), attention or SegmentSdpa(), **settings)
    return GrootN15Wrapper().install(policy, chosen), random_batch(policy, TEXTS, IMAGES)


@pytest.mark.parametrize("settings", [{}, {"flow_samples": 2}, {"action_pad": "mask"}])
def test_the_fast_path_is_the_reference_to_rounding(settings: dict) -> None:
    installation, batch = installed(**settings)
    assert isinstance(installation, ChecksReference)
    state = torch.get_rng_state()
    check = installation.check_reference(batch)
    assert check.fast_difference < 1e-6
    assert check.host_batch_difference > 1e-5
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_mask_shows() -> None:
    installation, batch = installed(WithoutCausality())
    assert installation.check_reference(batch).fast_difference > 1e-5


def test_without_padding_upstreams_batch_is_the_reference() -> None:
    installation, _ = installed()
    even = random_batch(installation.fast_path.policy, [6, 6], [2, 2])
    assert installation.check_reference(even).host_batch_difference < 1e-6
