# SPDX-License-Identifier: Apache-2.0
"""What upstream's training does with each planted damage of a data set, and what embodix does.

    python benchmarks/bad_data.py [--only <kind>] [--allow-dirty]

Each damage is planted in a copy of a sound data set and trained for two steps of a small π0.5, by upstream's own
``train()`` and through ``lerobot train``, each in a process of its own. Without a network, a look at the hub fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embodix.report.benchmark import require_quotable, write_benchmark

RESULT = Path(__file__).parent / "results" / "bad_data"
DEADLINE_S = 180
# What a config has to ask for where it is not the data alone that is wrong.
OVERRIDES = {
    "rename_unknown": ["+rename_map={observation.images.frnt: observation.images.front}"],
    "camera_unknown": [
        "+policy.input_features={observation.images.base: {type: VISUAL, shape: [3,28,28]}, "
        "observation.state: {type: STATE, shape: [4]}}"
    ],
    "too_wide": ["policy.max_action_dim=3"],
    "episode_short": ["policy.chunk_size=25", "policy.n_action_steps=25"],
    "instruction_long": ["policy.tokenizer_max_length=8"],
    "episode_unknown": ["dataset.episodes=[1,7]"],
}


def outcome(train: Callable[[Sequence[str]], list[float]], overrides: Sequence[str]) -> str:
    """Losses, or the exception, of one run in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            losses = train(overrides)
            there.send("exit 0, losses " + ", ".join(f"{loss:.3g}" for loss in losses))
        except BaseException as error:  # whatever it raises is the outcome
            lines = [line for line in str(error).splitlines() if line.strip()]
            words = next((line for line in lines[1:] if "[" in line), lines[0] if lines else "")
            there.send(f"{type(error).__name__}: {words.strip()[:150]}")
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    there.close()
    said = here.recv() if here.poll(DEADLINE_S) else f"nothing within {DEADLINE_S} s"
    process.kill()
    process.join()
    return str(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    parser.add_argument("--allow-dirty", action="store_true")
    arguments = parser.parse_args()
    require_quotable(arguments.allow_dirty)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EMBODIX_CACHE"] = f"{folder}/cache"
        rows = measure(Path(folder), arguments.only)
    result = {
        "title": "Damaged data sets: what upstream does, what embodix does",
        "what": "Two steps of a small π0.5 on a copy of a sound data set with one damage planted; upstream's own "
        "train() beside `lerobot train`. Long messages are cut.",
        "outcomes": rows,
    }
    if arguments.only is None:
        write_benchmark(RESULT, result, allow_dirty=arguments.allow_dirty)


def measure(folder: Path, only: str | None) -> list[dict[str, Any]]:
    """A row for each planted damage."""
    from embodix.data.tokenizer import build_tokenizer
    from embodix.testing.damaged_datasets import IN_VIDEO, PLANTED, Damage, write_sweeping
    from embodix.testing.host_runs import train_here, train_upstream
    from embodix_pi05.testing import VOCAB_SIZE, small_run

    sound = {"images": write_sweeping(folder / "images")}
    sound["video"] = write_sweeping(folder / "video", video=True, cameras=("front",), image_size=64)
    build_tokenizer(["push the button", "open the drawer", "close it"], folder / "tokenizer", VOCAB_SIZE)
    planted = [("images", kind, plant) for kind, plant, *_ in PLANTED] + [
        ("video", kind, plant) for kind, plant, _ in IN_VIDEO
    ]
    planted.append(("images", "episode_unknown", lambda damage: None))
    rows = []
    for storage, kind, plant in planted:
        if only not in (None, kind):
            continue
        row = {"kind": kind, "stored as": storage}
        for host in ("upstream", "embodix"):
            root = folder / "damaged"
            shutil.copytree(sound[storage], root)
            plant(Damage(root))
            overrides = small_run(
                root,
                "dataset=lerobot",
                "dataset.repo_id=embodix/damaged",
                f"tokenizer.directory={folder}/tokenizer",
                f"train.output_dir={folder}/run",
                "train.steps=2",
                "train.save_checkpoint=false",
                "train.batch_size=12",
                *OVERRIDES.get(kind, []),
            )
            own = (lambda o: [r.loss for r in train_here(list(o)).records]) if host == "embodix" else train_upstream
            row[host] = outcome(own, overrides)
            for left in (root, folder / "run"):
                shutil.rmtree(left, ignore_errors=True)
        print(row, flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
