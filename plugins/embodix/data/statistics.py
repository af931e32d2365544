# SPDX-License-Identifier: Apache-2.0
"""Whether the statistics that processors normalise with are there: upstream leaves a feature without any as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_STATE

# LeRobot's NormalizationMode -> the two statistics that it reads (lerobot/processor/normalize_processor.py).
NEEDED: Mapping[str, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
READ = (OBS_STATE, OBS_ENV_STATE, ACTION)
REMEDY = (
    "dataset.statistics=exact computes those of states and actions from the data set's own values; of images, "
    "dataset.use_imagenet_stats=true takes ImageNet's."
)


def require_statistics(
    processors: Sequence[Any], source: str, cameras: Collection[str] = (), remedy: str = REMEDY
) -> None:
    """Refuse processors that would leave a feature unnormalised, or fail in the middle of a batch.

    Args:
        processors: upstream's pipelines.
        source: where the statistics come from, for the message.
        cameras: those that are there; a policy may declare others, which stay without statistics.
        remedy: what to do.

    Raises:
        ValueError: statistics that are missing, not finite, or of another size than their feature; names all of them.
    """
    steps = [step for processor in processors for step in getattr(processor, "steps", ())]
    found = dict.fromkeys(problem for step in steps for problem in _problems(step, cameras))
    if found:
        raise ValueError(f"The statistics of {source} do not do for this policy: {'; '.join(found)}. {remedy}")


def _problems(step: Any, cameras: Collection[str]) -> Iterator[str]:
    if hasattr(step, "norm_map"):
        yield from _of_normalizer(step, cameras)
    elif getattr(step, "normalize_min_max", False):
        stats = step.stats or {}
        for key in (OBS_STATE, ACTION) if hasattr(step, "max_state_dim") else (ACTION,):
            yield from _missing(key, ("min", "max"), stats.get(key, {}), "MIN_MAX")


def _of_normalizer(step: Any, cameras: Collection[str]) -> Iterator[str]:
    stats = step.stats or {}
    for key, feature in step.features.items():
        is_camera = feature.type is FeatureType.VISUAL
        if (is_camera and key not in stats and key not in cameras) or not (is_camera or key in READ):
            continue
        mode = step.norm_map.get(feature.type, NormalizationMode.IDENTITY).value
        names = NEEDED.get(mode, ())
        yield from _missing(key, names, stats.get(key, {}), mode)
        for name in names:
            if name in stats.get(key, {}):
                yield from _odd(f"{name} of {key}", torch.as_tensor(stats[key][name]), tuple(feature.shape))


def _missing(key: str, names: Sequence[str], stats: Mapping[str, Any], mode: str) -> Iterator[str]:
    missing = [name for name in names if name not in stats]
    if missing:
        yield f"{key} lacks {' and '.join(missing)}, which it is normalised with ({mode})"


def _odd(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if not bool(torch.isfinite(values.float()).all()):
        yield f"{name} is not finite"
    if len(shape) == 1 and values.numel() > max(1, shape[0]):  # a policy may declare more than a robot has
        yield f"{name} has {values.numel()} values for {shape[0]} dimensions"
