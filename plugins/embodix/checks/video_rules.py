# SPDX-License-Identifier: Apache-2.0
"""Whether videos can be opened and have a frame at the time of every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from embodix.checks.catalogue import found
from embodix.checks.column_reading import TableRows
from embodix.checks.dataset_tables import REPAIR, DatasetTables, first_line
from embodix.checks.findings import Finding, Location, relative_to

EXACT_BYTES = 2**30  # of all videos together, up to which every packet is read; above, only the files' headers


def video_findings(tables: DatasetTables, rows: TableRows, every: bool) -> Iterator[Finding]:
    """Of every video file of every camera: by presentation times, or by the headers of very large data sets.

    Args:
        rows: which rows there are.
        every: read the packets whatever their size.
    """
    lengths = dict(zip(rows.episode_N[rows.starts_R].tolist(), (rows.ends_R - rows.starts_R).tolist(), strict=True))
    owners = _owners(tables)
    exact = every or sum(file.stat().st_size for _, file in owners if file.is_file()) <= EXACT_BYTES
    for (camera, file), episodes in owners.items():
        yield from _file_findings(tables, camera, file, episodes, lengths, exact)


def _owners(tables: DatasetTables) -> dict[tuple[str, Path], list[int]]:
    """Camera and file -> positions of the episodes in it."""
    owners: dict[tuple[str, Path], list[int]] = {}
    for camera, storage in tables.cameras.items():
        for row in tables.rows_of_episodes if storage == "video" else ():
            owners.setdefault((camera, tables.video_file_of(row, camera)), []).append(row)
    return owners


def _file_findings(
    tables: DatasetTables, camera: str, file: Path, episodes: Sequence[int], lengths: dict[int, int], exact: bool
) -> Iterator[Finding]:
    name = relative_to(tables.root, file)
    numbers = [int(tables.episodes["episode_index"][row]) for row in episodes]
    if not file.is_file():
        yield found("file_missing", camera, "does not exist", REPAIR, Location(episode=numbers[0], file=name))
        return
    times = _presentation_times(file) if exact else _header_times(file)
    if isinstance(times, str):
        yield found(
            "video_unreadable", camera, f"can't be opened: {times}", REPAIR, Location(episode=numbers[0], file=name)
        )
        return
    for row, number in zip(episodes, numbers, strict=True):
        start = float(tables.episodes[f"videos/{camera}/from_timestamp"][row])
        wanted = start + np.arange(lengths.get(number, 0)) / tables.fps
        missing = _without_frame(times, wanted, 0.5 / tables.fps)
        if len(missing) and not exact:  # a header tells an even rate, which the frames need not have
            yield from _file_findings(tables, camera, file, episodes, lengths, exact=True)
            return
        if len(missing):
            frame = int(missing[0])
            yield found(
                "video_short",
                camera,
                f"has no frame for {len(missing)} of {len(wanted)} rows, the first at "
                f"{wanted[frame]:.3f} s; it has {len(times)} frames",
                REPAIR,
                Location(episode=number, frame=frame, file=name),
            )
            return


def _without_frame(times: np.ndarray, wanted: np.ndarray, tolerance: float) -> np.ndarray:
    """Places in ``wanted`` farther than the tolerance from every time."""
    if not len(times):
        return np.arange(len(wanted))
    right = np.searchsorted(times, wanted).clip(0, len(times) - 1)
    left = (right - 1).clip(0)
    off = np.minimum(np.abs(times[right] - wanted), np.abs(times[left] - wanted))
    return np.flatnonzero(off > tolerance)


def _presentation_times(file: Path) -> np.ndarray | str:
    """Seconds of all frames, sorted, without decoding them; what is wrong in words where it can't be read."""
    import av

    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            stamps = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
            unit = float(stream.time_base or 1)
    except (av.FFmpegError, OSError, IndexError, ValueError) as error:
        return first_line(error)
    return np.sort(np.asarray(stamps, dtype=np.float64)) * unit


def _header_times(file: Path) -> np.ndarray | str:
    """Seconds of all frames as the file's header counts them, at an even rate."""
    import av

    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            num_frames, rate = stream.frames, float(stream.average_rate or 0)
    except (av.FFmpegError, OSError, IndexError, ValueError) as error:
        return first_line(error)
    return np.arange(num_frames) / rate if num_frames and rate else _presentation_times(file)


def decode_frames(tables: DatasetTables, row: int, camera: str, seconds: Sequence[float]) -> list[np.ndarray] | Finding:
    """Frames ``[H, W, 3]`` of an episode at some of its times.

    Args:
        row: position of the episode in the table.
        seconds: from the episode's beginning, ascending.
    """
    import av

    file = tables.video_file_of(row, camera)
    number = int(tables.episodes["episode_index"][row])
    start = float(tables.episodes[f"videos/{camera}/from_timestamp"][row])
    frames: list[np.ndarray] = []
    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            for moment in seconds:
                wanted = start + moment
                container.seek(int(wanted / float(stream.time_base or 1)), stream=stream)
                frame = next(
                    (f for f in container.decode(stream) if f.time is not None and f.time >= wanted - 0.5 / tables.fps),
                    None,
                )
                if frame is not None:
                    frames.append(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, OSError, IndexError, ValueError) as error:
        place = Location(episode=number, file=relative_to(tables.root, file))
        return found("video_unreadable", camera, f"can't be decoded: {first_line(error)}", REPAIR, place)
    if not frames:
        place = Location(episode=number, file=relative_to(tables.root, file))
        return found("video_unreadable", camera, "no frame of the episode can be decoded", REPAIR, place)
    return frames
