# SPDX-License-Identifier: Apache-2.0
"""A run as it will be: everything that can be checked before RLinf and Ray are started."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.contracts import HostRunner
from embodix_rl import hydra_conf
from embodix_rl.rlinf.asynchronous.queue_checkpoint import require_resumable
from embodix_rl.rlinf.rlinf_config import host_config
from embodix_rl.rlinf.run_sizes import GRPO, Placement, RunSizes, place, require_legal_evaluation
from embodix_rl.schema import ClusterSettings, PlacementSettings

NEAR = 0.8  # of two names that are spellings of one


@dataclass(frozen=True)
class RunPlan:
    """What a run does.

    Attributes:
        sizes: of the run.
        placement: its processes.
        runner: what schedules them.
        cluster: where they live.
        host: RLinf's config, without what RLinf adds itself.
    """

    sizes: RunSizes
    placement: Placement
    runner: HostRunner
    cluster: ClusterSettings
    host: DictConfig


def plan_run(cfg: DictConfig, folder: Path) -> RunPlan:
    """Check a composed config and write RLinf's.

    Args:
        cfg: of ``hydra_conf/rl.yaml``.
        folder: of the run.

    Raises:
        ValueError: sizes, placement, environment, policy or runner that can't run so.
    """
    _require_legal_intervals(cfg)
    _require_legal_numbers(cfg)
    _require_known_algorithm(cfg)
    placement = place(PlacementSettings(**_plain(cfg.placement)))
    sizes = sizes_of(cfg, placement)
    runner: HostRunner = plugins.build("runners", cfg.runner.name, _plain(cfg.runner.options))
    runner.check(sizes)
    _require_whole_episodes(cfg)
    if cfg.rl.eval_every and not runner.evaluates:
        raise ValueError(
            f"runner={cfg.runner.name} does not evaluate while it trains; set rl.eval_every=null, or take runner=sync."
        )
    if cfg.rl.eval_every:
        require_legal_evaluation(cfg.evaluation.num_envs, cfg.evaluation.steps, sizes)
    host = host_config(cfg, placement, runner.host_settings(sizes), folder)
    queue_sizes = host.embodix.get("queue_sizes")
    if queue_sizes is not None and host.runner.resume_dir is not None:
        require_resumable(Path(host.runner.resume_dir), queue_sizes)
    return RunPlan(sizes, placement, runner, ClusterSettings(**_plain(cfg.cluster)), host)


def _require_known_algorithm(cfg: DictConfig) -> None:
    """RLinf reads more of its node than the options of the group have, and passes over a field that is misspelt."""
    known = known_fields("algorithm")
    for name in cfg.algorithm:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=NEAR)
        if name not in known and near:
            raise ValueError(f"algorithm.{name} is not known of RLinf; did you mean algorithm.{near[0]}?")


def known_fields(group: str) -> list[str]:
    """Fields that the options of a group of this package have."""
    options = (files(hydra_conf) / group).iterdir()
    nodes: list[Any] = [OmegaConf.create(option.read_text()) for option in options if option.name[-5:] == ".yaml"]
    return sorted({str(name) for node in nodes for name in node.get(group) or {}})


def _require_legal_intervals(cfg: DictConfig) -> None:
    for name in ("steps", "save_every", "eval_every"):
        value = cfg.rl[name]
        if value is not None and value < 1:
            raise ValueError(f"rl.{name} counts training steps, at least 1; got {value}.")
    save, evaluate = cfg.rl.save_every, cfg.rl.eval_every
    if save and evaluate and save % evaluate:
        below = save // evaluate * evaluate
        nearest = " or ".join(str(near) for near in (below, below + evaluate) if near)
        raise ValueError(
            f"RLinf evaluates whatever it saves: rl.save_every={save} must be a multiple of rl.eval_every={evaluate}; "
            f"nearest: {nearest}."
        )


def _require_legal_numbers(cfg: DictConfig) -> None:
    for name in ("lr", "value_lr"):
        if not cfg.optim[name] > 0:
            raise ValueError(f"optim.{name} is a positive learning rate; got {cfg.optim[name]}.")
    for group, name in (("rl", "seed"), ("evaluation", "first_seed")):
        if cfg[group][name] < 0:
            raise ValueError(f"{group}.{name} is a seed from 0 on; got {cfg[group][name]}.")


def _require_whole_episodes(cfg: DictConfig) -> None:
    rollout = cfg.rollout
    if cfg.algorithm.adv_type == GRPO and (rollout.auto_reset or rollout.ignore_terminations):
        raise ValueError(
            "algorithm=grpo compares the environments of a group over one episode each and masks what follows its end: "
            f"set rollout.auto_reset=false (got {rollout.auto_reset}) and rollout.ignore_terminations=false (got "
            f"{rollout.ignore_terminations})."
        )


def sizes_of(cfg: DictConfig, placement: Placement) -> RunSizes:
    """The sizes of a composed config."""
    rollout = cfg.rollout
    return RunSizes(
        num_envs=rollout.num_envs,
        num_stages=rollout.stages,
        group_size=rollout.group_size,
        steps_per_epoch=rollout.steps,
        rollout_epochs=rollout.epochs,
        chunk=rollout.chunk,
        env_workers=placement.workers["env"],
        rollout_workers=placement.workers["rollout"],
        actor_workers=placement.workers["actor"],
        micro_batch=cfg.optim.micro_batch,
        global_batch=cfg.optim.global_batch,
        advantage=str(cfg.algorithm.adv_type),
        update_epochs=cfg.algorithm.update_epoch,
        reward_type=str(cfg.algorithm.reward_type),
    )


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True)
