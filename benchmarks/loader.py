# SPDX-License-Identifier: Apache-2.0
"""Samples a second of upstream's loader and of embodix's reads, on recorded images and videos, on a CPU.

The same samples in the same order through the same torch ``DataLoader``; only how the data set is read differs. CPU
time counts this process and its workers, from the first batch asked for to the last worker's end; repetitions
alternate. A ratio is embodix's samples a second over upstream's.

    python benchmarks/loader.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.datasets import video_utils
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import DataLoader

from embodix.data.column_reads import read_columns
from embodix.data.order import ShuffledOrder, WindowShuffledOrder, files_of_samples
from embodix.patching import patched
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.testing.datasets import write_dataset
from embodix_metaworld.demonstrations import RecordSettings
from embodix_metaworld.recorder import record_metaworld

FPS = 80
BATCH_SIZE = 8
TASKS = ("reach-v3", "button-press-topdown-v3", "coffee-button-v3", "window-open-v3")
WANTED = {("image", 50, 0): 20.0, ("video", 50, 0): 1.0, ("video", 1, 0): 1.0}
# Which function of a sample's reading takes which share; the rest is formatting of table rows.
PARTS = {
    "decode images": ("hf_transform_to_torch", "decode_example"),
    "action chunk": ("query_columns", "chunk_indices", "_query_hf_dataset", "_get_query_indices"),
    "decode videos": ("_query_videos",),
    "collate": ("default_collate",),
}


def record(folder: Path, storage: str, image_size: int) -> Path:
    """Two cameras, four tasks of two episodes."""
    settings = RecordSettings(
        root=str(folder / storage),
        tasks=TASKS,
        episodes_per_task=2,
        image_size=image_size,
        storage=storage,
        num_workers=1,
        progress=False,
    )
    return record_metaworld(settings).root


def load(root: Path, chunk: int, columns: bool) -> LeRobotDataset:
    deltas = {"action": [step / FPS for step in range(chunk)]} if chunk > 1 else None
    dataset = LeRobotDataset(f"embodix/{root.name}", root=root, delta_timestamps=deltas, video_backend="torchcodec")
    if columns:
        read_columns(dataset)
    return dataset


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def samples_per_second(dataset: LeRobotDataset, num_samples: int, num_workers: int) -> float:
    """By CPU time, collated in batches."""
    video_utils._default_decoder_cache.clear()  # a forked worker can't use the parent's decoders
    order = ShuffledOrder(len(dataset), seed=0)
    epochs = [order.epoch(epoch) for epoch in range(1 + num_samples // len(dataset))]
    samples = np.concatenate(epochs)[:num_samples].tolist()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=samples, num_workers=num_workers)
    start, seen = cpu_seconds(), 0
    for batch in loader:
        seen += len(batch["index"])
    del batch
    assert seen == len(samples)
    return seen / (cpu_seconds() - start)


def compare(
    root: Path, chunk: int, num_workers: int, num_samples: Mapping[str, int], repetitions: int
) -> dict[str, Any]:
    """Medians over alternating repetitions; the first of each is warm-up."""
    datasets = {"upstream": load(root, chunk, columns=False), "embodix": load(root, chunk, columns=True)}
    rates: dict[str, list[float]] = {name: [] for name in datasets}
    for repetition in range(repetitions + 1):
        for name in sorted(datasets, reverse=repetition % 2 == 0):  # A B B A
            rate = samples_per_second(datasets[name], num_samples[name], num_workers)
            if repetition:
                rates[name].append(rate)
    ratios = [fast / slow for fast, slow in zip(rates["embodix"], rates["upstream"], strict=True)]
    key = (root.name, chunk, num_workers)
    return {
        "stored as": root.name,
        "chunk": chunk,
        "workers": num_workers,
        "upstream samples/s": statistics.median(rates["upstream"]),
        "embodix samples/s": statistics.median(rates["embodix"]),
        "ratio": statistics.median(ratios),
        "wanted": WANTED.get(key),
    }


def where_time_goes(root: Path, chunk: int, num_samples: int) -> dict[str, Any]:
    """Shares of embodix's reading in one process, by profile."""
    dataset = load(root, chunk, columns=True)
    profile = cProfile.Profile()
    profile.runcall(samples_per_second, dataset, num_samples, 0)
    stats: Any = pstats.Stats(profile)
    cumulative: dict[str, float] = {}
    for (_, _, function), (_, _, _, total, _) in stats.stats.items():
        cumulative[function] = max(cumulative.get(function, 0.0), total)
    whole = cumulative["samples_per_second"]
    shares = {part: sum(cumulative.get(name, 0.0) for name in names) / whole for part, names in PARTS.items()}
    return {"stored as": root.name, "chunk": chunk, **shares, "rest": 1 - sum(shares.values())}


def opens_per_sample(root: Path, window: int) -> list[dict[str, Any]]:
    """Video files opened a sample by a reader that keeps ``window`` decoders, for both orders."""
    dataset = load(root, 1, columns=True)
    orders: dict[str, Any] = {
        "sampling=upstream": ShuffledOrder(len(dataset), seed=0),
        f"sampling=file_window, window {window}": WindowShuffledOrder(files_of_samples(dataset), window, seed=0),
    }
    rows = []
    for name, order in orders.items():
        with patched({"lerobot_decoder_cache": {"max_decoders": window}}):
            start = time.process_time()
            for index in order.epoch(0).tolist():
                dataset[index]
            cache: Any = video_utils._default_decoder_cache
            seconds = time.process_time() - start
            rows.append(
                {
                    "order": name,
                    "files": len(set(files_of_samples(dataset).tolist())),
                    "decoders kept": window,
                    "opens a sample": cache.num_opens / len(dataset),
                    "samples/s": len(dataset) / seconds,
                }
            )
    return rows


def measure(folder: Path, image_size: int, repetitions: int, say: Callable[[Any], None]) -> dict[str, Any]:
    roots = {storage: record(folder, storage, image_size) for storage in ("image", "video")}
    rows = []
    for storage, root in roots.items():
        for chunk in (1, 50):
            for num_workers in (0, 2):
                slow = storage == "image" and chunk > 1
                # Workers take a tenth of a second to start: enough samples for that to be small beside them.
                usual, few = (400, 64) if num_workers else (240, 24)
                num_samples = {"upstream": few if slow else usual, "embodix": usual}
                # Short measurements are disturbed most by what else runs: more of them.
                count = repetitions if num_workers or slow else 3 * repetitions
                rows.append(compare(root, chunk, num_workers, num_samples, count))
                say(rows[-1])
    tasks = tuple(f"reach for the object number {number}" for number in range(16))
    files = write_dataset(
        folder / "files",
        cameras=("front",),
        tasks=tasks,
        episode_length=20,
        image_size=64,
        video=True,
        episodes_per_file=1,
    )
    return {
        "samples_a_second": rows,
        "where_embodix_reads": [where_time_goes(root, 50, 160) for root in roots.values()],
        "file_opens": opens_per_sample(files, window=4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=4, help="of each row; three times as many of short ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    require_quotable(options.allow_dirty)
    with tempfile.TemporaryDirectory(prefix="embodix-loader-") as folder:
        measured = measure(Path(folder), options.image_size, options.repetitions, lambda row: print(row, flush=True))
    result = {
        "title": "Loading on a CPU: images and videos, single actions and chunks",
        "what": f"Samples a CPU second of one torch DataLoader (batches of {BATCH_SIZE}, this process and its workers "
        f"counted, {options.threads} thread), recorded MetaWorld frames of {options.image_size} pixels, two cameras, "
        "video decoded by torchcodec. embodix: reads=columns. Ratio: median of alternating repetitions.",
        **measured,
    }
    for path in write_benchmark(options.output / "loader", result, options.allow_dirty):
        print(path)


if __name__ == "__main__":
    main()
