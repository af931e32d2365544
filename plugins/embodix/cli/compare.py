# SPDX-License-Identifier: Apache-2.0
"""``lerobot compare``: variants side by side on the same samples, evaluated on the same episodes, in one report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from embodix.cli.hydra_app import run_hydra_app

if TYPE_CHECKING:
    from embodix.report.compare import SpeedBound
    from embodix.training.session import TrainingSession
    from embodix.training.side_by_side import Variant


def compare_task(cfg: DictConfig) -> None:
    """Train the variants in turns, evaluate them, measure their memory and write the report."""
    from hydra.core.hydra_config import HydraConfig

    from embodix.report.table import print_comparison
    from embodix.report.write import write_comparison
    from embodix.training.host_context import host_context
    from embodix.training.side_by_side import compose_variants, measure_memory, train_side_by_side

    hydra_cfg = HydraConfig.get()
    output_dir = Path(hydra_cfg.runtime.output_dir)
    variants = compose_variants(cfg.compare, list(hydra_cfg.overrides.task), output_dir)
    with host_context(variants[0].cfg):
        sessions = train_side_by_side(variants)
        for session in sessions:
            if cfg.compare.evaluate and session.host_cfg.env is not None:
                _evaluate(session, cfg)
            session.close()
    if cfg.compare.measure_memory:
        for name, memory in measure_memory(variants).items():
            _amend_manifest(output_dir / "variants" / name / "manifest.json", memory)
    report = write_comparison(output_dir, baseline=variants[0].name, bounds=_bounds(variants, sessions))
    print_comparison(report)
    print(f"Report: {output_dir / 'report.html'}")


def _evaluate(session: Any, cfg: DictConfig) -> None:
    from embodix.evaluation.trained_run import EpisodePlan, evaluate_trained_run

    plan = EpisodePlan(cfg.eval.n_episodes, min(cfg.eval.batch_size, cfg.eval.n_episodes), cfg.compare.first_eval_seed)
    dataset = session.host_cfg.dataset
    root = Path(dataset.root) if cfg.compare.controls and dataset.root else None
    member = session.data.choices.mixture.evaluate_as if session.data.choices.mixture else None
    results = evaluate_trained_run(session.output_dir, session.policy, session.host_cfg.env, plan, root, member)
    for evaluation in results.values():
        low, high = evaluation.interval
        print(
            f"{session.name}: {evaluation.name}: {evaluation.num_successes}/{len(evaluation.episodes)} on "
            f"{evaluation.task}, 95 % interval {low:.0%} to {high:.0%}"
        )


def _bounds(variants: list[Variant], sessions: list[TrainingSession]) -> dict[str, SpeedBound]:
    """The analytic bound of each variant, where the policy's cost is modelled."""
    from embodix.policies.groot_n15 import cost
    from embodix.policies.pi05.cost_plan import speed_bounds

    policy_type = variants[0].cfg.policy.type
    configs: dict[str, Any] = {v.name: OmegaConf.to_container(v.cfg, resolve=True) for v in variants}
    if policy_type == "groot":
        return cost.speed_bounds(configs, {s.name: s.records for s in sessions}, variants[0].name)
    if policy_type != "pi05" or any("members" in variant.cfg.dataset for variant in variants):
        return {}
    return speed_bounds(configs, variants[0].name)


def _amend_manifest(path: Path, memory: Any) -> None:
    from embodix.report.manifest import load_manifest

    manifest = load_manifest(path).replace(**memory)
    manifest.save(path)


def run(argv: list[str]) -> int:
    return run_hydra_app("compare", compare_task, argv)
