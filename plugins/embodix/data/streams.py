# SPDX-License-Identifier: Apache-2.0
"""What upstream's streamed data set may be trusted with: nothing left out, no frame of another time, no silent end.

Upstream takes any ``RuntimeError`` while it makes a frame for the end of the file, and so drops what follows a frame
that cannot be read. It reads a video at the frame's number in the whole data set, which is its place in a first video
file only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.constants import LOOKAHEAD_BACKTRACKTABLE, LOOKBACK_BACKTRACKTABLE

from embodix.data.joined_columns import Join

FrameMaker = Callable[[Any], Iterator[dict[str, Any]]]


class IncompleteStreamError(ValueError):
    """A streamed data set gives fewer samples than it says it has, or one that cannot be read."""


def require_streamable(host_cfg: TrainPipelineConfig, join: Join) -> None:
    """Check what the config alone tells of a streamed data set.

    Args:
        join: ``dataset.join``.

    Raises:
        ValueError: joined columns, chosen episodes, which upstream ignores, or no workers, with which it yields nothing
            for ever.
    """
    if join:
        raise ValueError(
            f"Columns are joined where a data set is read whole; a stream gives its rows as they are stored. Got "
            f"dataset.streaming=true and dataset.join of {', '.join(join)}. Set dataset.streaming=false."
        )
    if host_cfg.dataset.episodes is not None:
        raise ValueError(
            f"A streamed data set is trained on whole: upstream ignores dataset.episodes={host_cfg.dataset.episodes}. "
            "Set dataset.streaming=false, or leave dataset.episodes out."
        )
    if host_cfg.num_workers < 1:
        raise ValueError(
            f"A streamed data set is read by workers; with train.num_workers={host_cfg.num_workers} upstream reads "
            "nothing and waits for ever. Set train.num_workers=1 or more, or dataset.streaming=false."
        )


def guard_stream(dataset: Any) -> None:
    """Make a built stream end with an error at the first frame that cannot be read.

    Raises:
        ValueError: a state or action of one dimension, images, a video that upstream would read at another time, or
            action chunks beyond its window.
    """
    _require_vectors(dataset)
    _require_videos(dataset)
    _require_window(dataset)
    _require_video_places(dataset)
    dataset.make_frame = functools.partial(_make_frame, dataset, dataset.make_frame)


def require_whole_epoch(num_read: int, num_frames: int) -> None:
    """Check an epoch that has ended.

    Raises:
        IncompleteStreamError: fewer samples were read than the data set has frames.
    """
    if num_read < num_frames:
        raise IncompleteStreamError(
            f"An epoch of the streamed data set gave {num_read} of {num_frames} frames that meta/info.json names: its "
            "files hold fewer. Complete them (data/**/*.parquet), or record the data set again."
        )


def _make_frame(dataset: Any, upstream: FrameMaker, frames: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from upstream(frames)
    except Exception as error:
        if isinstance(error.__cause__, StopIteration):
            raise  # the file has ended
        raise IncompleteStreamError(f"{_place(dataset, frames)} cannot be read: {error}") from error


def _place(dataset: Any, frames: Any) -> str:
    """Which frame was being made, and the files it is made of."""
    history = frames.history()
    if not history:
        return f"The first frame of a file of {dataset.root}"
    episode, frame = int(history[-1]["episode_index"]), int(history[-1]["frame_index"])
    files = [dataset.meta.get_video_file_path(episode, key) for key in dataset.meta.video_keys]
    files = files or [dataset.meta.get_data_file_path(episode)]
    return f"Frame {frame} of episode {episode} ({', '.join(map(str, files))} of {dataset.root})"


def _require_vectors(dataset: Any) -> None:
    joined = dataset.meta.embodix_join
    if joined:
        raise ValueError(
            f"Upstream streams a column of one dimension as single numbers, which lose their axis in a batch "
            f"({', '.join(joined)} of {dataset.root}). Set dataset.streaming=false, which makes vectors of them."
        )


def _require_videos(dataset: Any) -> None:
    images = [key for key, feature in dataset.meta.features.items() if feature["dtype"] == "image"]
    if images:
        raise ValueError(
            f"Upstream makes no batch of streamed images ({', '.join(images)} of {dataset.root}), only of videos. Set "
            "dataset.streaming=false, or store the cameras as videos."
        )


def _require_window(dataset: Any) -> None:
    for key, deltas in (dataset.delta_indices or {}).items():
        if max(deltas) > LOOKAHEAD_BACKTRACKTABLE or -min(deltas) >= LOOKBACK_BACKTRACKTABLE:
            raise ValueError(
                f"Upstream's stream looks {LOOKBACK_BACKTRACKTABLE - 1} frames back and {LOOKAHEAD_BACKTRACKTABLE} "
                f"ahead, and pads what lies beyond; the policy asks for {min(deltas)} to {max(deltas)} of {key}. "
                "Set dataset.streaming=false, or a shorter policy.chunk_size."
            )


def _require_video_places(dataset: Any) -> None:
    for episode in dataset.meta.episodes or ():
        for key in dataset.meta.video_keys:
            place, read_at = episode[f"videos/{key}/from_timestamp"], episode["dataset_from_index"] / dataset.fps
            if abs(place - read_at) > dataset.tolerance_s:
                number = int(episode["episode_index"])
                raise ValueError(
                    f"Upstream reads a streamed video at the frame's number in the data set: episode {number} at "
                    f"{read_at:.3f} s, but {dataset.meta.get_video_file_path(number, key)} of {dataset.root} has it at "
                    f"{place:.3f} s. Set dataset.streaming=false."
                )
