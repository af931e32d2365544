# SPDX-License-Identifier: Apache-2.0
"""What must hold of a run's config before its data or its policy are loaded: numbers, options, the policy's own rules.

``lerobot train``, ``compare`` and ``plan`` ask the same questions, so that a plan is a plan of a run that can start.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from lerobot.configs.train import TrainPipelineConfig
from omegaconf import DictConfig, OmegaConf

from embodix.arguments import ArgumentError
from embodix.checks.dataset_check import statistics_choice
from embodix.data.recorded_dataset import TOKENIZER_FOLDER
from embodix.patching import patch_arguments
from embodix.policies.support import support_of
from embodix.training.checkpoint_evaluation import evaluation_options
from embodix.training.host_config import decode_host_config, require_landed_groups
from embodix.training.host_context import required_patches

MAX_SEED = 2**32 - 1  # numpy's
# Least values of upstream's fields. 0 turns logging and evaluation off; upstream divides by save_freq in every step.
TRAIN_LEAST = {
    "steps": 1,
    "batch_size": 1,
    "num_workers": 0,
    "save_freq": 1,
    "log_freq": 0,
    "eval_freq": 0,
    "tolerance_s": 0,
}
EVAL_LEAST = {"n_episodes": 1, "batch_size": 1}
# Those that LeRobot's policies have under the same name.
POLICY_LEAST = {
    "n_obs_steps": 1,
    "chunk_size": 1,
    "n_action_steps": 1,
    "horizon": 1,
    "num_inference_steps": 1,
    "max_state_dim": 1,
    "max_action_dim": 1,
    "tokenizer_max_length": 1,
    "empty_cameras": 0,
    "optimizer_lr": 0,
}
OPTIMIZER_LEAST = {"lr": 0, "weight_decay": 0, "grad_clip_norm": 0}
# Options of the groups whose options no implementation takes as arguments.
GROUP_OPTIONS: Mapping[str, Sequence[str]] = {
    "vision_tokens": (),
    "action_pad": (),
    "language": (),
    "reads": (),
    "preprocessing": (),
    "sampling": ("window",),
}
LANGUAGES = ("per_sample", "upstream")
CHECKPOINT_FORMATS = ("auto", "upstream", "sharded")


def sound_host_config(cfg: DictConfig) -> TrainPipelineConfig:
    """Upstream's config of a run that can start, as far as its config tells.

    Raises:
        ValueError: a group that did not land, a key or value that upstream rejects, or see `require_sound_config`.
    """
    require_landed_groups(cfg)
    host_cfg = decode_host_config(cfg)
    require_sound_config(cfg, host_cfg)
    return host_cfg


def require_sound_config(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> None:
    """Refuse what could only fail, or train something else, once data and policy are there.

    Args:
        cfg: the composed ``train`` config.
        host_cfg: upstream's, decoded from it.

    Raises:
        ValueError: every fault in a line, with the rule and what was got.
    """
    faults = [*_number_faults(cfg, host_cfg), *_group_faults(cfg), *_policy_faults(cfg, host_cfg)]
    faults += [*_tokenizer_faults(cfg), *_statistics_faults(cfg, host_cfg), *_checkpoint_faults(cfg)]
    if faults:
        raise ValueError("\n".join(faults))


def say_what_differs(host_cfg: TrainPipelineConfig) -> None:
    """Log what the policy makes of its fields otherwise than they say."""
    for note in notes_of(host_cfg):
        logging.warning(note)


def notes_of(host_cfg: TrainPipelineConfig) -> list[str]:
    """What the policy makes of its fields otherwise than they say, a sentence each."""
    assert host_cfg.policy is not None
    return list(support_of(host_cfg.policy.type).config_notes(host_cfg.policy))


def _number_faults(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> Iterator[str]:
    yield from _below("train", host_cfg, TRAIN_LEAST)
    yield from _below("policy", host_cfg.policy, POLICY_LEAST)
    yield from _below("optimizer", host_cfg.optimizer, OPTIMIZER_LEAST)
    yield from _below("step_clock", cfg.step_clock, {"count_flops_at": 1})
    if host_cfg.env is not None:
        yield from _below("eval", host_cfg.eval, EVAL_LEAST)
    if host_cfg.seed is not None and not 0 <= host_cfg.seed <= MAX_SEED:
        yield f"train.seed lies between 0 and {MAX_SEED}, or is null; got {host_cfg.seed}."


def _checkpoint_faults(cfg: DictConfig) -> Iterator[str]:
    settings = cfg.checkpoint
    if settings.format not in CHECKPOINT_FORMATS:
        yield f"checkpoint.format is one of {', '.join(CHECKPOINT_FORMATS)}; got {settings.format!r}."
    if settings.most_failures < 0:
        yield f"checkpoint.most_failures must be at least 0; got {settings.most_failures}."


def _below(node: str, settings: Any, least: Mapping[str, float]) -> Iterator[str]:
    for name, smallest in least.items():
        value = getattr(settings, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and not value >= smallest:
            yield f"{node}.{name} must be at least {smallest}; got {value}."


def _group_faults(cfg: DictConfig) -> Iterator[str]:
    for group, known in GROUP_OPTIONS.items():
        yield from _unknown_options(group, cfg[group], known)
    if cfg.attention.name in ("upstream", "auto"):
        yield from _unknown_options("attention", cfg.attention, ())
    if cfg.logging.name in ("none", "tensorboard"):
        yield from _unknown_options("logging", cfg.logging, ())
    yield from _evaluation_faults(cfg)
    yield from _patch_faults(cfg)
    if cfg.language.name not in LANGUAGES:
        yield f"language must be one of {', '.join(LANGUAGES)}; got {cfg.language.name!r}."


def _evaluation_faults(cfg: DictConfig) -> Iterator[str]:
    if cfg.evaluation.name == "upstream":
        yield from _unknown_options("evaluation", cfg.evaluation, ())
        return
    try:
        evaluation_options(cfg.evaluation)
    except ArgumentError as error:
        yield str(error)


def _patch_faults(cfg: DictConfig) -> Iterator[str]:
    for name, options in required_patches(cfg).items():
        try:
            patch_arguments(name, options)
        except ArgumentError as error:
            yield str(error)


def _unknown_options(group: str, choice: DictConfig, known: Sequence[str]) -> Iterator[str]:
    for option in choice.options:
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Options: {', '.join(known) or 'none'}."
            yield f"{group}={choice.name} has no option {option!r}.{hint}"


def _tokenizer_faults(cfg: DictConfig) -> Iterator[str]:
    """A policy of sizes of its own has a vocabulary of its own, which the tokenizer on the hub has not."""
    support = support_of(cfg.policy.type)
    hub_id = support.tokenizer_hub_id
    if cfg.architecture is None or cfg.tokenizer.directory is not None or hub_id is None:
        return
    if not support.uses_tokenizer_directory() or isinstance(try_to_load_from_cache(hub_id, "tokenizer.json"), str):
        return
    yield (
        f"The tokenizer {hub_id} would be fetched from the hub, and the sizes of `architecture` have a vocabulary of "
        f"their own. Add tokenizer.directory={_tokenizer_beside(cfg.dataset)}"
    )


def _statistics_faults(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> Iterator[str]:
    relative = getattr(host_cfg.policy, "use_relative_actions", False)
    if relative and statistics_choice(cfg.dataset) == "exact":
        yield (
            "dataset.statistics=exact are those of the data set's absolute actions, and "
            "policy.use_relative_actions=true normalises relative ones. Record theirs in the data set, with upstream's "
            "lerobot-edit-dataset --operation.type recompute_stats --operation.relative_action true, and set "
            "dataset.statistics=recorded."
        )


def _tokenizer_beside(dataset: DictConfig) -> str:
    """The folder that `lerobot data` has made beside one of the data sets, else how it is called."""
    members = dataset.get("members") or {"": dataset}
    folders = [Path(member.root) / TOKENIZER_FOLDER for member in members.values() if member.get("root")]
    return str(next((folder for folder in folders if folder.is_dir()), f"<data set>/{TOKENIZER_FOLDER}"))


def _policy_faults(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> Iterator[str]:
    assert host_cfg.policy is not None
    architecture: Any = None if cfg.architecture is None else OmegaConf.to_container(cfg.architecture, resolve=True)
    yield from support_of(host_cfg.policy.type).config_faults(host_cfg.policy, architecture)
