# SPDX-License-Identifier: Apache-2.0
"""The `evaluation` group: whether and how checkpoints are evaluated while training goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from omegaconf import DictConfig, OmegaConf

from embodix.training.checkpoint_evaluation import EvaluationPlan

NAMES = ("upstream", "background", "waiting")


def plan_evaluation(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> EvaluationPlan | None:
    """How this run's checkpoints are evaluated; None leaves evaluation to upstream's loop.

    Upstream's own evaluation is turned off where a plan is made.

    Raises:
        ValueError: an unknown choice or option, no simulator, or evaluations that find no checkpoint.
    """
    name = cfg.evaluation.name
    if name not in NAMES:
        raise ValueError(f"evaluation must be one of {', '.join(NAMES)}; got {name!r}.")
    if name == "upstream":
        return None
    every = int(cfg.train.eval_freq)
    _require_checkpoints(cfg, host_cfg, every)
    host_cfg.eval_freq = 0
    options: Any = OmegaConf.to_container(cfg.evaluation.options, resolve=True)
    waits = name == "waiting" or _single_core()
    return EvaluationPlan(
        every=every,
        command=lambda checkpoint, folder: evaluation_command(checkpoint, folder, options),
        waits=waits,
        max_pending=options["max_pending"],
        keep=options["keep"],
        num_threads=options["num_threads"],
    )


def _require_checkpoints(cfg: DictConfig, host_cfg: TrainPipelineConfig, every: int) -> None:
    if host_cfg.env is None:
        raise ValueError(f"evaluation={cfg.evaluation.name} needs a simulator; choose one with env=... .")
    if every < 1:
        raise ValueError(f"evaluation={cfg.evaluation.name} runs every train.eval_freq steps; got {every}.")
    if not host_cfg.save_checkpoint or every % host_cfg.save_freq:
        raise ValueError(
            f"evaluation={cfg.evaluation.name} evaluates checkpoints, so train.eval_freq must be a multiple of "
            f"train.save_freq with train.save_checkpoint=true; got eval_freq={every}, save_freq={host_cfg.save_freq}, "
            f"save_checkpoint={host_cfg.save_checkpoint}. Set train.save_freq={every}."
        )
    if "lerobot_atomic_checkpoint" not in cfg.patches:
        raise ValueError(
            f"evaluation={cfg.evaluation.name} is told of finished checkpoints by the patch lerobot_atomic_checkpoint; "
            "choose patches=host_guards."
        )


def _single_core() -> bool:
    if len(os.sched_getaffinity(0)) > 1:
        return False
    logging.warning("There is one core only: training waits for each evaluation.")
    return True


def evaluation_command(checkpoint: Path, folder: Path, options: Mapping[str, Any]) -> list[str]:
    """`lerobot eval` on a checkpoint, in the simulator of its training run, with `results.json` in `folder`."""
    settings = {name: options[name] for name in ("n_episodes", "first_seed", "num_slots", "num_workers", "videos")}
    overrides = [f"eval.{name}={value}" for name, value in settings.items()]
    if options["device"] is not None:
        overrides.append(f"policy.device={options['device']}")
    # JSON's strings are strings in Hydra's override grammar too.
    places = [f"checkpoint={json.dumps(str(checkpoint))}", f"hydra.run.dir={json.dumps(str(folder))}"]
    return [sys.executable, "-m", "embodix", "eval", *places, *overrides]
