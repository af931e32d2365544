# SPDX-License-Identifier: Apache-2.0
"""Measuring samples: who can, and which cameras count."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from embodix.data.sample_sizes import SizedDataset, measure_samples
from embodix.packing.sample_cost import SampleSizes
from embodix_pi05.prompts import state_column
from embodix_pi05.testing import small_pi05

ABSENT = [[False, True], [True, True], [False, False]]


class Recording:
    """What measuring reads of a ``LeRobotDataset``."""

    def __init__(self, marked: bool) -> None:
        columns = {"camera_is_pad": ABSENT} if marked else {}
        self.hf_dataset = Dataset.from_dict({"task_index": [0, 1, 0], **columns})
        self.meta = SimpleNamespace(features=dict.fromkeys(columns))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("marked", "columns", "absent"),
    [
        (False, None, [0, 0, 0]),
        (True, None, [1, 2, 0]),
        (True, ("slot_a", "slot_b"), [1, 2, 0]),
        (True, ("slot_a", None), [0, 1, 0]),
    ],
)
def test_absent_cameras_are_counted_unless_left_out(marked, columns, absent):
    part = SizedDataset(Recording(marked), dict, columns)
    assert part.num_absent().tolist() == absent


def test_a_renamed_state_is_found():
    renaming = SimpleNamespace(steps=[SimpleNamespace(), SimpleNamespace(rename_map={"joints": "observation.state"})])
    recordings = {name: SimpleNamespace(meta=SimpleNamespace(features={name: None})) for name in ("joints", "arm")}
    assert state_column(SizedDataset(recordings["joints"], renaming)) == "joints"
    with pytest.raises(ValueError, match=r"prompt holds observation.state; the data set has arm"):
        state_column(SizedDataset(recordings["arm"], renaming))


def test_a_wrapper_that_cannot_measure_is_named():
    with pytest.raises(ValueError, match=r"needs a policy wrapper with a method sample_sizes; object has none"):
        measure_samples(object(), small_pi05(), [], 1)


def test_measuring_leaves_the_random_state_alone():
    class Drawing:
        def sample_sizes(self, policy, datasets, flow_samples, progress):
            torch.rand(3)
            progress(3)
            return SampleSizes.equal(3)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    sizes = measure_samples(Drawing(), small_pi05(), [SizedDataset(Recording(False), dict)], 1, quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(sizes.tokens, [1, 1, 1])
