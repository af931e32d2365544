# SPDX-License-Identifier: Apache-2.0
"""One reading of a data set, whatever will be trained on it: figures of its columns, and what is wrong with any policy.

It is kept by content (``embodix.data.content``), so that a data set is read once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import embodix
from embodix.checks.catalogue import found
from embodix.checks.column_figures import ColumnFigures, measure
from embodix.checks.column_reading import TableRows, UnequalRowsError, read_column, side_by_side
from embodix.checks.dataset_tables import READ_ERRORS, DatasetTables, first_line, read_tables
from embodix.checks.findings import Finding, finding_fields, finding_of
from embodix.checks.image_rules import chosen_runs, image_findings
from embodix.checks.row_rules import read_rows
from embodix.checks.video_rules import video_findings
from embodix.data.content import dataset_content
from embodix.data.joined_columns import Join, complete_join, joined_features, joined_stats
from embodix.report.manifest import write_text_atomically

FORMAT = 3  # of what is kept; another one is read anew
# What may be mended beside the data, and so is not kept.
OF_THIS_MACHINE = ("video_unreadable", "image_unreadable", "file_unreadable", "file_missing")
CORRECT = "Record again, or correct the feature in meta/info.json."
IMAGES = ("sample", "all", "none")
CACHE = "EMBODIX_CACHE"


@dataclass
class DatasetReading:
    """What one reading gives.

    Attributes:
        tables: the metadata.
        figures: by key.
        rows: numbers of the used rows; only their bounds are kept.
        findings: what is wrong for any policy.
        images: what of the images was looked at, in words.
        seconds: process CPU time; 0 where it was known.
    """

    tables: DatasetTables
    figures: dict[str, ColumnFigures] = field(default_factory=dict)
    rows: TableRows = field(default_factory=TableRows)
    findings: list[Finding] = field(default_factory=list)
    images: str = ""
    seconds: float = 0.0


def read_dataset(
    root: Path, episodes: Sequence[int] | None = None, images: str = "sample", join: Join | None = None
) -> DatasetReading:
    """Read a data set, or take what an earlier reading has kept.

    Args:
        root: its folder.
        episodes: numbers of those that are used, None for all.
        images: ``sample``, ``all`` or ``none``.
        join: keys that are made of several columns.

    Raises:
        ValueError: another word for images, or a join of columns that are not there.
    """
    if images not in IMAGES:
        raise ValueError(f"check.images is one of {', '.join(IMAGES)}; got {images!r}.")
    tables = read_tables(root, episodes)
    if not tables.readable:
        return DatasetReading(tables, findings=tables.findings)
    complete = complete_join(join or {}, tables.features)
    kept = _cache_file(tables, images, complete)
    tables.info = {**tables.info, "features": joined_features(complete, tables.features)}
    tables.stats = joined_stats(complete, tables.stats)
    known = None if kept is None else _load(tables, kept)
    if known is not None:
        return known
    started = time.process_time()
    reading = _read(tables, images, complete)
    reading.seconds = time.process_time() - started
    if kept is not None and not any(finding.kind in OF_THIS_MACHINE for finding in reading.findings):
        _keep(reading, kept)
    return reading


def _read(tables: DatasetTables, images: str, join: Join) -> DatasetReading:
    reading = DatasetReading(tables, findings=list(tables.findings))
    reading.rows, problems = read_rows(tables)
    reading.findings += problems
    if not reading.rows.files or not len(reading.rows.episode_N):
        return reading
    for key in tables.numeric_keys:
        try:
            parts = [read_column(reading.rows.files, part, reading.rows.used) for part in join.get(key, [key])]
        except (*READ_ERRORS, ValueError, KeyError) as error:
            kind = "shape_differs" if isinstance(error, UnequalRowsError) else "column_missing"
            reading.findings.append(found(kind, key, f"can't be read: {first_line(error)}", CORRECT))
            continue
        reading.figures[key] = measure(side_by_side(parts), reading.rows, tables.stats.get(key, {}))
    if images != "none" and tables.cameras:
        every = images == "all"
        wrong = list(video_findings(tables, reading.rows, every))
        reading.findings += wrong or list(image_findings(tables, reading.rows, every))
        looked = len(chosen_runs(reading.rows, every))
        frames = "all frames" if every else "first, middle and last frame"
        reading.images = f"{frames} of {looked} of {len(reading.rows.starts_R)} episodes"
    return reading


def _cache_file(tables: DatasetTables, *further: Any) -> Path | None:
    """Where a reading of this content is kept; None for data that can't be hashed, since they can't be read."""
    chosen = None if tables.selected is None else list(tables.selected)
    try:
        content = dataset_content(tables.root)
    except ValueError:
        return None
    key = hashlib.sha256(json.dumps([FORMAT, embodix.__version__, content, chosen, *further]).encode()).hexdigest()
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodix"
    return Path(os.environ.get(CACHE) or default) / "checks" / f"{key}.json"


def _keep(reading: DatasetReading, file: Path) -> None:
    """Best effort: a folder that can't be written costs another reading next time, and says so."""
    rows = reading.rows
    content = {
        "figures": {key: figures.as_fields() for key, figures in reading.figures.items()},
        "findings": [finding_fields(finding) for finding in reading.findings],
        "images": reading.images,
        "episodes": rows.episode_N[rows.starts_R].tolist(),
        "lengths": (rows.ends_R - rows.starts_R).tolist(),
    }
    try:
        write_text_atomically(file, json.dumps(content))
    except OSError as error:
        logging.warning("The check of %s can't be kept in %s: %s", reading.tables.root, file.parent, first_line(error))


def _load(tables: DatasetTables, file: Path) -> DatasetReading | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return None  # cut off by a machine that went down: read anew, and kept again
    lengths = np.asarray(content["lengths"], dtype=np.int64)
    ends = np.cumsum(lengths)
    rows = TableRows(
        episode_N=np.repeat(np.asarray(content["episodes"], dtype=np.int64), lengths),
        starts_R=ends - lengths,
        ends_R=ends,
    )
    return DatasetReading(
        tables,
        figures={key: ColumnFigures.of_fields(fields) for key, fields in content["figures"].items()},
        rows=rows,
        findings=[finding_of(fields) for fields in content["findings"]],
        images=content["images"],
    )
