# SPDX-License-Identifier: Apache-2.0
"""Whether cameras show something that changes: a sample of frames, or all of them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from embodix.checks.catalogue import found
from embodix.checks.column_reading import TableRows
from embodix.checks.dataset_tables import READ_ERRORS, REPAIR, DatasetTables, first_line
from embodix.checks.findings import Finding, Location, Severity, relative_to
from embodix.checks.video_rules import decode_frames
from embodix.data.preprocessing import CAMERA_PAD_KEY

NUM_EPISODES, NUM_FRAMES = 8, 3  # of a sample
BLACK_LEVEL = 8  # of 255: no pixel is brighter
LOOK = "Look at the recording, and leave these episodes out by dataset.episodes=[...], or the camera by the camera map."


@dataclass
class Seen:
    """What was seen of one camera.

    Attributes:
        episodes: with at least one decoded frame.
        sizes: height and width of the frames.
        black: those whose frames are all black.
        frozen: those whose frames are all equal although the rows are apart.
    """

    episodes: list[int] = field(default_factory=list)
    sizes: set[tuple[int, int]] = field(default_factory=set)
    black: list[int] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)

    def add(self, episode: int, frames: Sequence[np.ndarray]) -> None:
        self.episodes.append(episode)
        self.sizes |= {(frame.shape[0], frame.shape[1]) for frame in frames}
        if all(int(frame.max(initial=0)) < BLACK_LEVEL for frame in frames):
            self.black.append(episode)
        elif len(frames) > 1 and all(np.array_equal(frames[0], frame) for frame in frames[1:]):
            self.frozen.append(episode)


def image_findings(tables: DatasetTables, rows: TableRows, every: bool) -> Iterator[Finding]:
    """Of all cameras.

    Args:
        rows: which rows there are.
        every: look at each episode and frame, not at a sample.
    """
    runs = chosen_runs(rows, every)
    for camera, storage in tables.cameras.items():
        seen = Seen()
        for run in runs:
            frames = _frames_of(tables, rows, camera, storage, run, every)
            if isinstance(frames, Finding):
                yield frames
                break
            seen.add(int(rows.episode_N[rows.starts_R[run]]), frames)
        yield from _size_findings(tables, camera, seen)
        if _shows_colours(tables, camera):
            yield from _seen_findings(camera, seen)


def chosen_runs(rows: TableRows, every: bool) -> list[int]:
    """Episodes that are looked at: all, or a few from first to last."""
    if every or len(rows.starts_R) <= NUM_EPISODES:
        return list(range(len(rows.starts_R)))
    return sorted({int(place) for place in np.linspace(0, len(rows.starts_R) - 1, NUM_EPISODES)})


def _frames_of(
    tables: DatasetTables, rows: TableRows, camera: str, storage: str, run: int, every: bool
) -> list[np.ndarray] | Finding:
    """Frames ``[H, W, 3]`` of an episode: all, or its first, middle and last."""
    first, last = int(rows.starts_R[run]), int(rows.ends_R[run]) - 1
    picked = range(first, last + 1) if every else sorted({first, (first + last) // 2, last})
    number = int(rows.episode_N[first])
    row = tables.episodes["episode_index"].index(number) if number in tables.episodes["episode_index"] else None
    if row is None:
        return found("image_unreadable", camera, "the episode is in no table", REPAIR, Location(episode=number))
    if storage == "video":
        return decode_frames(tables, row, camera, [float(rows.frame_N[frame]) / tables.fps for frame in picked])
    return _stored_images(
        tables, tables.data_file_of(row), camera, number, [int(rows.frame_N[frame]) for frame in picked]
    )


def _stored_images(
    tables: DatasetTables, file: Path, camera: str, episode: int, frames: Sequence[int]
) -> list[np.ndarray] | Finding:
    """Images inside the table, of one episode."""
    from PIL import Image

    try:
        wanted = ("==", episode), ("in", list(frames))
        filters = [(name, *test) for name, test in zip(("episode_index", "frame_index"), wanted, strict=True)]
        stored = pq.read_table(file, columns=[camera], filters=filters).column(camera).to_pylist()
    except (*READ_ERRORS, ValueError, KeyError) as error:
        place = Location(episode=episode, file=relative_to(tables.root, file))
        return found("image_unreadable", camera, f"can't be read: {first_line(error)}", REPAIR, place)
    decoded = []
    for frame, image in zip(frames, stored, strict=False):
        place = Location(episode=episode, frame=frame, file=relative_to(tables.root, file))
        try:
            decoded.append(np.asarray(Image.open(_source(tables, image)).convert("RGB")))
        except (OSError, ValueError, TypeError, SyntaxError) as error:
            return found("image_unreadable", camera, f"can't be decoded: {first_line(error)}", REPAIR, place)
    if not decoded:
        return found("image_unreadable", camera, "has no images", REPAIR, Location(episode=episode))
    return decoded


def _source(tables: DatasetTables, image: Any) -> Any:
    """What Pillow opens: the bytes in the table, or the file that they name."""
    if not isinstance(image, dict):
        raise ValueError(f"is {type(image).__name__}, no image")
    return io.BytesIO(image["bytes"]) if image.get("bytes") else tables.root / str(image.get("path"))


def _size_findings(tables: DatasetTables, camera: str, seen: Seen) -> Iterator[Finding]:
    """Of sizes that differ among the frames, which no batch can hold, or from the metadata, which policies that resize
    do not mind."""
    shape = tables.features[camera]["shape"]
    declared = {size for size in shape if size > 4} or set(shape)
    if len(seen.sizes) > 1 or any(set(size) - declared for size in seen.sizes):
        sizes = " and ".join(f"{height}x{width}" for height, width in sorted(seen.sizes))
        got = f"is {sizes} pixels, meta/info.json says {'x'.join(map(str, shape))}"
        severity: Severity = "error" if len(seen.sizes) > 1 else "warning"
        yield found("image_shape", camera, got, "Correct the shape there, or record again.", severity=severity)


def _shows_colours(tables: DatasetTables, camera: str) -> bool:
    """Whether black and frozen mean something: not of depth, nor where embodix's own marks say which are blank."""
    return 3 in tables.features[camera]["shape"] and CAMERA_PAD_KEY not in tables.features


def _seen_findings(camera: str, seen: Seen) -> Iterator[Finding]:
    for kind, episodes, words in (("camera_black", seen.black, "black"), ("camera_frozen", seen.frozen, "frozen")):
        if not episodes:
            continue
        whole = len(episodes) == len(seen.episodes)
        yield found(
            kind,
            camera,
            f"is {words} in {len(episodes)} of the {len(seen.episodes)} episodes looked at: "
            f"{', '.join(map(str, episodes[:5]))}",
            LOOK,
            Location(episode=episodes[0]),
            severity="error" if whole else "warning",
        )
