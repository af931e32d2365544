# SPDX-License-Identifier: Apache-2.0
"""Parallel strategies side by side: what each of two gloo ranks holds and exchanges, and whether they train the same.

`lerobot compare` of upstream's DDP, packed DDP and packed FSDP2, a step of each in turn in the same two processes of
one machine, π0.5 in its small size on a recording that is made for it. Bytes are counted; wall time on the cores of one
machine tells nothing of a cluster and is not reported.

    python benchmarks/parallel_strategies.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.report.ranks import COUNTED
from embodix.training.variant_ranks import rank_launcher

NUM_RANKS, NUM_STEPS = 2, 6
VARIANTS = {
    "upstream_ddp": "['+plugin=none','parallel=ddp']",
    "ddp": "['+plugin=embodix','parallel=ddp']",
    "fsdp2": "['+plugin=embodix','parallel=fsdp2']",
}


def record(folder: Path) -> Path:
    """A small recording: two tasks of two episodes each."""
    from embodix_metaworld.demonstrations import RecordSettings
    from embodix_metaworld.recorder import record_metaworld

    settings = RecordSettings(
        root=str(folder / "dataset"),
        tasks=("reach-v3", "button-press-topdown-v3"),
        episodes_per_task=2,
        image_size=28,
        num_workers=1,
        progress=False,
    )
    return record_metaworld(settings).root


def compare(dataset: Path, folder: Path) -> dict[str, Any]:
    """``report.json`` of the comparison.

    Raises:
        subprocess.CalledProcessError: it failed; its output was printed.
    """
    chosen = [f"+compare.variants.{name}={overrides}" for name, overrides in VARIANTS.items()]
    chosen += [f"compare.only=[{','.join(VARIANTS)}]", "compare.measure_memory=false"]
    sizes = ["policy=pi05_small", "policy.image_resolution=[28,28]", "policy.tokenizer_max_length=64"]
    run = [f"dataset.root={dataset}", f"train.steps={NUM_STEPS}", "train.batch_size=4", "train.num_workers=0"]
    run += ["train.save_checkpoint=false", "train.eval_freq=0", f"hydra.run.dir={folder}"]
    command = [*rank_launcher(NUM_RANKS), "-m", "embodix", "compare", *sizes, *run, *chosen]
    subprocess.run(command, check=True)
    return dict(json.loads((folder / "report.json").read_text()))


def row(variant: dict[str, Any], pair: dict[str, Any] | None) -> dict[str, Any]:
    ranks = variant["ranks"]
    return {
        "variant": variant["name"],
        "strategy": ranks["strategy"],
        "layout": ranks["layout"],
        "parameters cut, bytes": ranks["cut_bytes"],
        "parameters whole, bytes": ranks["whole_bytes"],
        "optimizer state, bytes": ranks["optimizer_bytes"],
        **{f"{kind}, bytes a step": bytes_of(ranks, kind) for kind in ("all-reduce", "all-gather", "reduce-scatter")},
        "same function": "reference" if pair is None else pair["same_function"],
        "largest loss difference": None if pair is None else pair["largest_loss_difference"],
    }


def bytes_of(ranks: dict[str, Any], kind: str) -> int:
    return sum(exchange["num_bytes"] for exchange in ranks["exchanges"] if exchange["kind"] == kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    with tempfile.TemporaryDirectory() as folder:
        report = compare(record(Path(folder)), Path(folder) / "compare")
    pairs = {pair["name"]: pair for pair in report["pairs"]}
    result = {
        "title": "Parallel strategies on two processes of one machine",
        "what_was_run": report["what_was_run"],
        "how_it_was_counted": f"{COUNTED} Wall time on the cores of one machine tells nothing of a cluster.",
        "strategies": [row(variant, pairs.get(variant["name"])) for variant in report["variants"]],
    }
    for path in write_benchmark(options.output / "parallel_strategies", result, options.allow_dirty):
        print(path)


if __name__ == "__main__":
    main()
