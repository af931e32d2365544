# SPDX-License-Identifier: Apache-2.0
"""Roll a freshly trained policy out and leave ``evaluation.json`` in its run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import CHECKPOINTS_DIR, LAST_CHECKPOINT_LINK, PRETRAINED_MODEL_DIR

from embodix.data.embodiments import load_embodiment
from embodix.evaluation.controls import blind_control
from embodix.evaluation.metaworld import EmbodixMetaworldConfig
from embodix.evaluation.rollout import Evaluation, blank_image_control, evaluate_policy

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class EpisodePlan:
    """Which episodes to run: the seeds ``start_seed`` .. ``start_seed + num_episodes - 1``, ``num_envs`` at a time."""

    num_episodes: int
    num_envs: int
    start_seed: int


def evaluate_trained_run(
    run_dir: Path,
    policy: Any,
    env: EmbodixMetaworldConfig,
    plan: EpisodePlan,
    dataset_root: Path | None,
    member: str | None = None,
) -> dict[str, Evaluation]:
    """Evaluate a policy still in memory with the processors of its last checkpoint.

    Args:
        run_dir: run folder with at least one checkpoint; ``evaluation.json`` is written there.
        dataset_root: the recording whose mean demonstration is the blind control; None leaves both controls out.
        member: the embodiment of a mixture whose processors are used; None for those of the checkpoint's top level.

    Returns:
        ``policy`` and, with controls, ``blind`` and ``blank_image``.

    Raises:
        ValueError: the environment is not one that embodix rolls out, or the run has no checkpoint.
    """
    if not isinstance(env, EmbodixMetaworldConfig):
        raise ValueError(f"Only env=metaworld is evaluated after a comparison; got {type(env).__name__}.")
    checkpoint = run_dir / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK / PRETRAINED_MODEL_DIR
    if not checkpoint.is_dir():
        raise ValueError(f"{run_dir} has no checkpoint to take the processors from; train with save_checkpoint=true.")
    if member is None:
        preprocessor, postprocessor = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    else:
        preprocessor, postprocessor = load_embodiment(checkpoint, member)
    episodes: Any = vars(plan)
    results = {"policy": evaluate_policy(policy, preprocessor, postprocessor, env, **episodes)}
    if dataset_root is not None:
        results["blind"] = blind_control(dataset_root, env, num_episodes=plan.num_episodes, start_seed=plan.start_seed)
        results["blank_image"] = blank_image_control(policy, preprocessor, postprocessor, env, **episodes)
    _write(run_dir / EVALUATION_FILE, results)
    return results


def _write(path: Path, results: dict[str, Evaluation]) -> None:
    record = results["policy"].to_json()
    record["episodes"] = _episodes(results["policy"])
    record["controls"] = {name: _episodes(result) for name, result in results.items() if name != "policy"}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _episodes(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [
        {"task": evaluation.task, "seed": e.seed, "success": e.success, "num_steps": e.num_steps}
        for e in evaluation.episodes
    ]
