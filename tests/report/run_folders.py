# SPDX-License-Identifier: Apache-2.0
"""Run folders as training writes them, with chosen speeds, losses and outcomes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from embodix.report.manifest import collect_manifest
from embodix.report.steps import StepRecord, TokenRecord, append_step

CPU_MS = {"data_wait": 2.0, "preprocess": 6.0, "forward": 210.0, "backward": 420.0, "optimizer": 30.0}
TOKENS = {
    "upstream": TokenRecord(valid=2468, computed=4072, upstream=4072, images_computed=12, images_upstream=12),
    "embodix": TokenRecord(valid=2468, computed=2468, upstream=4072, images_computed=8, images_upstream=12),
}


def write_run(
    folder: Path,
    variant: str,
    *,
    speed: float = 1.0,
    num_steps: int = 60,
    loss_shift: float = 0.0,
    first_loss_shift: float = 0.0,
    successes: int | None = None,
    created_at: str = "2026-01-01T00:00:00+00:00",
    data_wait_ms: float | None = None,
    tokens: TokenRecord | None = None,
    **manifest,
) -> Path:
    """Write one run; ``speed`` divides forward and backward, ``loss_shift`` is a relative difference that grows."""
    noise, timing = random.Random(1), random.Random(variant)
    config = {
        "policy": {"type": "pi05", "dtype": "float32", "device": "cpu"},
        "dataset": {"repo_id": "embodix/metaworld"},
        "packing": {"name": "none" if variant == "upstream" else "padding_free"},
    }
    record = collect_manifest(
        variant,
        **{
            "seed": 7,
            "config": config,
            "packer": config["packing"]["name"],
            "attention": "upstream" if variant == "upstream" else "segment_auto",
            "flops_per_step": 4.1e10 / (1 if variant == "upstream" else 2.07),
            "peak_memory_bytes": int(1.9e9 / speed**0.5),
            "peak_memory_source": "resident set of the process",
            "num_parameters": 4_300_000,
            **manifest,
        },
    ).replace(created_at=created_at)
    record.save(folder / "manifest.json")
    for step in range(1, num_steps + 1):
        times = {phase: ms / 1000 for phase, ms in CPU_MS.items()}
        if data_wait_ms is not None:
            times["data_wait"] = data_wait_ms / 1000
        for phase in ("forward", "backward"):
            times[phase] /= speed
        cpu_s = {phase: value * timing.uniform(0.93, 1.1) for phase, value in times.items()}
        base = 0.05 + 1.9 * 0.93**step + noise.gauss(0, 0.02)
        append_step(
            folder / "steps.jsonl",
            StepRecord(
                step=step,
                loss=base * (1 + first_loss_shift + loss_shift * (step - 1)),
                grad_norm=1.0,
                lr=1e-4,
                num_samples=4,
                wall_s={phase: value * 1.3 for phase, value in cpu_s.items()},
                cpu_s=cpu_s,
                tokens=tokens or TOKENS.get(variant, TOKENS["embodix"]),
                action_valid=620,
                action_total=800,
            ),
        )
    if successes is not None:
        controls = {"blind": episodes(20), "blank_image": episodes(6)}
        record = {"episodes": episodes(successes), "controls": controls}
        results = folder.parent.parent / "evaluation" / folder.name / "results.json"
        results.parent.mkdir(parents=True)
        results.write_text(json.dumps(record))
    return folder


def episodes(successes: int) -> list[dict]:
    """30 episodes of one task, the first ones solved."""
    return [{"task": "button-press-topdown", "seed": seed, "success": seed < successes} for seed in range(30)]
