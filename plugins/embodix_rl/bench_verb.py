# SPDX-License-Identifier: Apache-2.0
"""``lerobot bench rl``: schedules of reinforcement learning on the same work, one after another, in one report."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from embodix.cli.hydra_app import INTERRUPTED, run_hydra_app
from embodix.config.compose import begun_overrides

if TYPE_CHECKING:
    from embodix_rl.bench.processes import Outcome
    from embodix_rl.bench.variants import BenchVariant
    from embodix_rl.report.rl_bench import BenchReport, VariantEntry

BENCHES = {"rl": "what the schedules of `lerobot rl` make of the same work"}


def rl_task(cfg: DictConfig, overrides: list[str], experiment: str | None, folder: Path) -> bool:
    """Run the variants, and report after each; whether all finished.

    Raises:
        ValueError: a variant that can't run, or RLinf or Ray missing.
    """
    from embodix_rl.bench.processes import finished_before, run_variants
    from embodix_rl.bench.variants import compose_variants
    from embodix_rl.report.rl_bench_page import print_bench, write_bench
    from embodix_rl.rlinf.hosts import require_hosts

    variants = compose_variants(cfg.bench, experiment, overrides, folder)
    if any(finished_before(variant) is None for variant in variants):
        require_hosts()
    print(f"Bench: {folder}", flush=True)
    entries: list[VariantEntry] = []
    for variant, outcome in run_variants(variants, cfg.bench.timeout_s, lambda line: print(line, flush=True)):
        entries.append(_entry(variant, outcome, cfg.bench))
        report = _read(cfg.bench, entries)
        write_bench(report, folder)
    print_bench(report)
    print(f"Report: {folder / 'report.html'}")
    return not report.failures


def _entry(variant: BenchVariant, outcome: Outcome, settings: DictConfig) -> VariantEntry:
    from embodix_rl.bench.prediction import predicted_frames_per_s
    from embodix_rl.report.rl_bench import VariantEntry

    return VariantEntry(
        variant.name,
        variant.folder,
        variant.overrides,
        baseline=variant.baseline,
        predicted_frames_per_s=predicted_frames_per_s(variant),
        paper_ratio=settings.paper.get(variant.name),
        failure=outcome.failure,
        last_lines=outcome.last_lines,
        reused=outcome.reused,
    )


def _read(settings: DictConfig, entries: Sequence[VariantEntry]) -> BenchReport:
    from embodix_rl.report.rl_bench import read_bench

    return read_bench(settings.title, entries, paper_source=settings.paper_source, timeline_s=settings.timeline_s)


def _resumed(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str], str | None, Path]:
    """The bench of the folder that `bench.resume` names, as it was begun.

    Raises:
        ValueError: no bench in the folder, or overrides beside ``bench.resume``.
    """
    from embodix.config.compose import compose

    folder = Path(cfg.bench.resume)
    begun = begun_overrides(folder, "bench_rl", "lerobot bench rl", "bench.resume", overrides)
    job = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
    experiment = job.hydra.runtime.choices.experiment
    return compose("bench_rl", begun), begun, experiment, folder


def run(argv: list[str]) -> int:
    """The first word names the bench."""
    if argv[:1] in (["-sc"], ["--shell_completion"]):
        os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" rl", "", 1)
        return run_rl(argv)
    if not argv or argv[0] not in BENCHES:
        print(f"usage: {sys.argv[0]} <bench> [overrides]\n")
        print("\n".join(f"  {name:10s}{summary}" for name, summary in BENCHES.items()))
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    sys.argv[0] += f" {argv[0]}"
    return run_rl(argv[1:])


def run_rl(argv: list[str]) -> int:
    """0 where every variant finished, else 1."""
    finished = []

    def task(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra_cfg = HydraConfig.get()
        overrides, experiment = list(hydra_cfg.overrides.task), hydra_cfg.runtime.choices.get("experiment")
        folder = Path(hydra_cfg.runtime.output_dir)
        if cfg.bench.resume is not None:
            cfg, overrides, experiment, folder = _resumed(cfg, overrides)
        finished.append(rl_task(cfg, overrides, experiment, folder))

    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        code = run_hydra_app("bench_rl", task, argv)
    except KeyboardInterrupt:
        print(
            "Interrupted. Finished variants are kept; `lerobot bench rl bench.resume=<folder above>` runs the rest.",
            file=sys.stderr,
        )
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return code or int(not all(finished))
