# SPDX-License-Identifier: Apache-2.0
"""What `lerobot check` costs: a data set of a million frames, read for the first time and from what was kept.

    python benchmarks/check_data.py [--frames 1000000] [--dimensions 14] [--allow-dirty]

State and action have as many dimensions each; no images, whose sample costs the same for any number of frames. The
reading runs in a process of its own, so that its memory is not that of the writing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

from embodix.report.benchmark import require_quotable, write_benchmark

RESULT = Path(__file__).parent / "results" / "check_data"
FRAMES_A_FILE = 250_000
FPS = 30
READ = """
import json, sys, time
import pandas
from pathlib import Path
from embodix.checks.dataset_reading import read_dataset
from embodix.training.memory import peak_resident_bytes
before, started = peak_resident_bytes(), time.process_time()
reading = read_dataset(Path(sys.argv[1]))
spent = time.process_time() - started
print(json.dumps({"cpu_s": spent, "peak_bytes": peak_resident_bytes(), "before_bytes": before,
                  "frames": len(reading.rows.episode_N), "findings": [f.sentence for f in reading.findings]}))
"""


def write_frames(root: Path, num_frames: int, dimensions: int, episode_length: int = 400) -> None:
    """A LeRobotDataset of sine waves without cameras, in upstream's layout."""
    num_episodes = num_frames // episode_length
    num_frames = num_episodes * episode_length
    rng = np.random.default_rng(0)
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    index = np.arange(num_frames)
    values = {
        key: np.sin(rng.random(dimensions) * 6 + index[:, None] * 2 * np.pi / episode_length).astype(np.float32)
        for key in ("observation.state", "action")
    }
    for number, start in enumerate(range(0, num_frames, FRAMES_A_FILE)):
        own = slice(start, min(start + FRAMES_A_FILE, num_frames))
        frame = index[own] % episode_length
        columns: dict[str, Any] = {key: _vectors(array[own]) for key, array in values.items()}
        columns |= {
            "timestamp": (frame / FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": index[own] // episode_length,
            "index": index[own],
            "task_index": np.zeros(len(frame), np.int64),
        }
        pq.write_table(pa.table(columns), root / f"data/chunk-000/file-{number:03d}.parquet")
    episode = np.arange(num_episodes)
    episodes = {
        "episode_index": episode,
        "length": np.full(num_episodes, episode_length),
        "dataset_from_index": episode * episode_length,
        "dataset_to_index": (episode + 1) * episode_length,
        "tasks": [["wave"]] * num_episodes,
        "data/chunk_index": np.zeros(num_episodes, np.int64),
        "data/file_index": episode * episode_length // FRAMES_A_FILE,
    }
    pq.write_table(pa.table(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    pandas.DataFrame({"task_index": [0]}, index=["wave"]).to_parquet(root / "meta/tasks.parquet")
    scalar = {"dtype": "int64", "shape": [1], "names": None}
    features = {key: {"dtype": "float32", "shape": [dimensions], "names": None} for key in values}
    features |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), scalar)
    features["timestamp"] = {**scalar, "dtype": "float32"}
    totals = {"total_episodes": num_episodes, "total_frames": num_frames, "total_tasks": 1}
    paths = {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None}
    info = {"codebase_version": "v3.0", "fps": FPS, "features": features, **totals, **paths}
    (root / "meta/info.json").write_text(json.dumps(info))


def _vectors(values_ND: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_ND.reshape(-1)), values_ND.shape[1])


def read(root: Path, cache: Path) -> dict[str, Any]:
    """CPU seconds and memory of one reading, in a process of its own with one thread."""
    environment = {**os.environ, "EMBODIX_CACHE": str(cache), "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(root)], env=environment, capture_output=True, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--dimensions", type=int, default=14)
    parser.add_argument("--allow-dirty", action="store_true")
    arguments = parser.parse_args()
    require_quotable(arguments.allow_dirty)
    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder) / "set", Path(folder) / "cache"
        write_frames(root, arguments.frames, arguments.dimensions)
        size = sum(file.stat().st_size for file in root.rglob("*.parquet"))
        first, again = read(root, cache), read(root, cache)
    rows = [
        {
            "reading": name,
            "cpu_s": figures["cpu_s"],
            "memory_beyond_imports_MB": (figures["peak_bytes"] - figures["before_bytes"]) / 1e6,
            "frames": figures["frames"],
            "findings": len(figures["findings"]),
        }
        for name, figures in (("first", first), ("kept", again))
    ]
    result = {
        "title": "What a check costs",
        "what": f"{arguments.frames} frames, state and action of {arguments.dimensions} dimensions each, "
        f"{size / 1e6:.0f} MB of Parquet, one thread; process CPU time without imports.",
        "readings": rows,
    }
    for row in rows:
        print(row)
    write_benchmark(RESULT, result, allow_dirty=arguments.allow_dirty)


if __name__ == "__main__":
    main()
