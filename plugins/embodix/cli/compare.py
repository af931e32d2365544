# SPDX-License-Identifier: Apache-2.0
"""``lerobot compare``: variants side by side on the same samples, evaluated on the same episodes, in one report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from embodix.cli.hydra_app import run_hydra_app, write_hydra_record
from embodix.cli.ranks import with_first_ranks_folder
from embodix.launched_rank import is_first_rank

if TYPE_CHECKING:
    from embodix.report.compare import SpeedBound
    from embodix.training.lockstep import Variant
    from embodix.training.session import TrainingSession


def compare_task(cfg: DictConfig) -> None:
    """Train the variants in turns, evaluate them on the same episodes, measure their memory and write the report."""
    from hydra.core.hydra_config import HydraConfig

    from embodix.training.run_folder import owned_folder

    output_dir = Path(HydraConfig.get().runtime.output_dir)
    with owned_folder(output_dir):
        if is_first_rank():
            _require_new(output_dir)
            write_hydra_record(cfg)
        _compare(cfg, list(HydraConfig.get().overrides.task), output_dir)


def _compare(cfg: DictConfig, overrides: list[str], output_dir: Path) -> None:
    from embodix.training.host_context import host_context
    from embodix.training.lockstep import compose_variants, train_side_by_side

    variants = compose_variants(cfg.compare, overrides, output_dir)
    evaluates = cfg.compare.evaluate and cfg.env is not None
    if evaluates:
        _require_checkpoints(cfg)
    with host_context(variants[0].cfg):
        sessions = train_side_by_side(variants)
        for session in sessions:
            session.close()
    if is_first_rank():
        _report(variants, sessions if evaluates else [], cfg, output_dir)


def _report(variants: list[Variant], evaluated: list[TrainingSession], cfg: DictConfig, output_dir: Path) -> None:
    """What one process does alone when all have trained."""
    from embodix.report.comparison_page import write_comparison
    from embodix.report.comparison_table import print_comparison
    from embodix.report.runs import EVALUATION_FOLDER

    if evaluated:
        _evaluate(evaluated, cfg, output_dir / EVALUATION_FOLDER)
    if cfg.compare.measure_memory:
        _measure_memory(variants, output_dir)
    report = write_comparison(output_dir, baseline=variants[0].name, bounds=_bounds(variants))
    print_comparison(report)
    print(f"Report: {output_dir / 'report.html'}")


def _measure_memory(variants: list[Variant], output_dir: Path) -> None:
    from embodix.training.lockstep import measure_memory
    from embodix.training.variant_ranks import on_several_machines

    if on_several_machines():
        print("Peak memory is not that of each variant by itself: the processes are on several machines.")
        return
    for name, memory in measure_memory(variants).items():
        _amend_manifest(output_dir / "variants" / name / "manifest.json", memory)


def _require_new(output_dir: Path) -> None:
    variants = output_dir / "variants"
    if variants.is_dir():
        raise FileExistsError(f"{output_dir} holds a comparison already ({variants}). Choose another hydra.run.dir.")


def _require_checkpoints(cfg: DictConfig) -> None:
    if not cfg.train.save_checkpoint:
        raise ValueError(
            "A comparison with env evaluates the checkpoints that it trained; got train.save_checkpoint=false. Leave "
            "that out, or the evaluation: compare.evaluate=false."
        )


def _evaluate(sessions: list[TrainingSession], cfg: DictConfig, output_dir: Path) -> None:
    """`lerobot eval` on what was trained: all variants and their controls on the same episodes."""
    from embodix.config.compose import compose
    from embodix.evaluation.controls import applicable_controls
    from embodix.evaluation.evaluate import run_evaluation
    from embodix.report.evaluation_page import print_evaluations
    from embodix.simulation.simulators import simulators_of

    overrides = [
        f"eval.n_episodes={cfg.eval.n_episodes}",
        f"eval.num_slots={cfg.eval.batch_size}",
        f"eval.first_seed={cfg.compare.first_eval_seed}",
        f"eval.videos={cfg.compare.videos}",
    ]
    eval_cfg = compose("eval", overrides)
    eval_cfg.checkpoint = {session.name: str(session.output_dir) for session in sessions}
    if cfg.compare.controls:
        tasks = simulators_of(sessions[0].host_cfg.env).tasks
        eval_cfg.controls = applicable_controls(tasks, cfg.dataset.get("root"))
    output_dir.mkdir(parents=True, exist_ok=True)
    print_evaluations(run_evaluation(eval_cfg, overrides, output_dir))


def _bounds(variants: list[Variant]) -> dict[str, SpeedBound]:
    """The bound of each variant by operations; none where they can't be counted, since what was trained is not lost."""
    from embodix.costs.plan import speed_bounds

    configs: dict[str, Any] = {v.name: OmegaConf.to_container(v.cfg, resolve=True) for v in variants}
    try:
        return speed_bounds(configs, variants[0].name)
    except ValueError as error:
        print(f"No bound on the speed ratio: {error}")
        return {}


def _amend_manifest(path: Path, memory: Any) -> None:
    from embodix.report.manifest import load_manifest

    manifest = load_manifest(path).replace(**memory)
    manifest.save(path)


def run(argv: list[str]) -> int:
    return run_hydra_app("compare", compare_task, with_first_ranks_folder("compare", argv))
