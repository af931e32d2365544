# SPDX-License-Identifier: Apache-2.0
"""Statistics that training normalises with: what is missing is named before the first batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.processor import NormalizerProcessorStep

from embodix.data.statistics import require_statistics

CAMERA = "observation.images.front"
FEATURES = {
    CAMERA: PolicyFeature(FeatureType.VISUAL, (3, 8, 8)),
    "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
    "action": PolicyFeature(FeatureType.ACTION, (3,)),
}
WHOLE = {
    "observation.state": {"mean": np.zeros(2), "std": np.ones(2)},
    "action": {"min": np.zeros(3), "max": np.ones(3)},
    CAMERA: {"mean": np.zeros((3, 1, 1)), "std": np.ones((3, 1, 1))},
}


def pipeline(stats, visual=NormalizationMode.MEAN_STD):
    modes = {FeatureType.STATE: NormalizationMode.MEAN_STD, FeatureType.ACTION: NormalizationMode.MIN_MAX}
    step = NormalizerProcessorStep(FEATURES, {**modes, FeatureType.VISUAL: visual}, stats)
    return SimpleNamespace(steps=[step])


def test_whole_statistics_do():
    require_statistics([pipeline(WHOLE)], "data", [CAMERA])


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("observation.state", "std", r"observation.state lacks std, .*\(MEAN_STD\)"),
        ("action", "max", r"action lacks max, .*\(MIN_MAX\)"),
        (CAMERA, "mean", rf"{CAMERA} lacks mean"),
    ],
)
def test_a_missing_statistic_is_named_with_what_adds_it(key, name, message):
    lacking = {**WHOLE, key: {other: value for other, value in WHOLE[key].items() if other != name}}
    with pytest.raises(ValueError, match=rf"The statistics of data .*{message}.* dataset.statistics=exact"):
        require_statistics([pipeline(lacking)], "data", [CAMERA])


def test_images_that_are_not_normalised_or_not_there_need_none():
    lacking = {key: value for key, value in WHOLE.items() if key != CAMERA}
    require_statistics([pipeline(lacking, NormalizationMode.IDENTITY)], "data", [CAMERA])
    require_statistics([pipeline(lacking)], "data")  # a camera of the policy that the data has not
    with pytest.raises(ValueError, match=rf"{CAMERA} lacks mean and std"):
        require_statistics([pipeline(lacking)], "data", [CAMERA])


def test_a_step_that_scales_by_minimum_and_maximum():
    stats = {"action": {"min": 0, "max": 1}}
    packing = SimpleNamespace(normalize_min_max=True, max_state_dim=8, stats=stats)
    with pytest.raises(ValueError, match=r"observation.state lacks min and max"):
        require_statistics([SimpleNamespace(steps=[packing])], "data")
    unpacking = SimpleNamespace(normalize_min_max=True, stats=stats)
    require_statistics([SimpleNamespace(steps=[unpacking])], "data")


def test_values_of_another_robot_or_none_at_all():
    other = {**WHOLE, "action": {"min": np.zeros(7), "max": np.full(3, np.nan)}}
    with pytest.raises(ValueError, match=r"min of action has 7 values for 3 dimensions; max of action is not finite"):
        require_statistics([pipeline(other)], "data")
