# SPDX-License-Identifier: Apache-2.0
"""What surrounds upstream's ``train()``: patches, the offline tokenizer and a command line it may re-read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lerobot.utils.constants import TRAINING_STATE_DIR
from omegaconf import DictConfig, OmegaConf

from embodix.data.joined_columns import JOIN, DatasetPlace, dataset_place, decode_join
from embodix.data.mixture_spec import decode_mixture, is_mixture
from embodix.data.tokenizer import offline_tokenizer
from embodix.parallel.sharded_state import holds_sharded_state
from embodix.patching import patch_module, patched
from embodix.policies.quantizers import quantizer_of
from embodix.policies.support import sizes_patch, support_of, with_guards
from embodix.training.adapters import adapter_patches
from embodix.training.background_saving import BackgroundSaver
from embodix.training.checkpoint import checkpoint_finished, write_session_state
from embodix.training.session import current_session
from embodix.training.sharded_resume import read_groups

QUANTIZED_PATCH = "lerobot_quantized_checkpoint"
METADATA_PATCH = "lerobot_dataset_metadata"


@contextmanager
def host_context(cfg: DictConfig, resume_config: Path | None = None) -> Iterator[None]:
    """Apply the config's patches, its architecture and its tokenizer; give upstream a clean command line.

    Upstream's ``TrainPipelineConfig.validate`` reads ``sys.argv`` again, so Hydra's overrides must not stand there;
    on resume it expects ``--config_path``.

    Raises:
        embodix.patching.PatchError: a patch does not fit the installed host.
        FileNotFoundError: the tokenizer folder is missing.
    """
    with ExitStack() as stack:
        stack.enter_context(patched(required_patches(cfg, resume_config)))
        support = support_of(cfg.policy.type)
        if cfg.tokenizer.directory is not None and support.uses_tokenizer_directory():
            stack.enter_context(offline_tokenizer(Path(cfg.tokenizer.directory), support.tokenizer_hub_id))
        arguments = ["lerobot-train"] + ([f"--config_path={resume_config}"] if resume_config else [])
        stack.enter_context(command_line(arguments))
        yield


def required_patches(cfg: DictConfig, resume_config: Path | None = None) -> dict[str, dict[str, Any]]:
    """The chosen patches with their options, and those that the policy's sizes, language, weights and adapters need.

    Args:
        resume_config: ``train_config.json`` of the checkpoint that is resumed.
    """
    patches = _chosen_patches(cfg)
    if "lerobot_atomic_checkpoint" in patches:
        patches["lerobot_atomic_checkpoint"]["on_saved"] = write_session_state
        patches["lerobot_atomic_checkpoint"]["on_finished"] = checkpoint_finished
        patches["lerobot_atomic_checkpoint"]["saver"] = current_saver
    patches["lerobot_dataset_factory"] = {"build": build_dataset}
    patches[METADATA_PATCH] = {"joins": joins_of(cfg.dataset)}
    patches["lerobot_worker_preprocessing"] = {"build": build_processors}
    started_from = cfg.policy.get("pretrained_path")
    if started_from is not None and quantizer_of(Path(started_from)) is not None:
        patches[QUANTIZED_PATCH] = {"policy_type": cfg.policy.type}
    if resume_config is not None and holds_sharded_state(resume_config.parents[1] / TRAINING_STATE_DIR):
        patches["lerobot_sharded_resume"] = {"read_groups": read_groups}
    return patches | adapter_patches(cfg.peft, resume_config) | _policy_options(cfg)


def joins_of(node: DictConfig) -> dict[DatasetPlace, dict[str, list[str]]]:
    """Repo id and root -> what its joined columns are made of, of the data set or of each member of a mixture.

    Raises:
        ValueError: one data set twice in a mixture, with different joins.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True)
    if not is_mixture(plain):
        join = decode_join(f"dataset.{JOIN}", plain.get(JOIN))
        return {dataset_place(str(plain["repo_id"]), plain.get("root")): join}
    joins: dict[DatasetPlace, dict[str, list[str]]] = {}
    for member in decode_mixture(plain).members:
        place = dataset_place(member.repo_id, member.root)
        if joins.setdefault(place, member.join) != member.join:
            raise ValueError(
                f"A data set is joined one way in a run; dataset.members.{member.name}.{JOIN} is {member.join}, and "
                f"another member joins {' at '.join(filter(None, place))} as {joins[place]}. Give both the same join, "
                "or one of them a copy with a repo_id or root of its own."
            )
    return joins


def policy_patches(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """Those of the required patches that a policy needs outside training, too: patches of upstream's policies."""
    chosen = {
        name: options
        for name, options in _chosen_patches(cfg).items()
        if patch_module(name).PATCH.target.startswith("lerobot.policies.")
    }
    return chosen | _policy_options(cfg)


def _chosen_patches(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    plain: Any = OmegaConf.to_container(cfg.patches, resolve=True)
    return {name: dict(options or {}) for name, options in with_guards(plain, cfg.policy.type).items()}


def _policy_options(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    patches: dict[str, dict[str, Any]] = {}
    if cfg.architecture is not None:
        architecture = OmegaConf.to_container(cfg.architecture, resolve=True)
        patches[sizes_patch(cfg.policy.type)] = {"architecture": architecture}
    return patches | support_of(cfg.policy.type).patches(cfg)


def current_saver() -> BackgroundSaver | None:
    """What writes the running session's checkpoints, where upstream does not."""
    return current_session().spread.saver


def build_dataset(host_cfg: Any, upstream: Any) -> Any:
    """The running session's data set."""
    session = current_session()
    dataset = session.data.build_dataset(host_cfg, upstream)
    session.dataset_built()
    return dataset


def build_processors(*arguments: Any) -> Any:
    """The running session's processors."""
    return current_session().data.build_processors(*arguments)


@contextmanager
def command_line(arguments: list[str]) -> Iterator[None]:
    """Put ``arguments`` in the place of ``sys.argv`` for the duration of a block."""
    original = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = original
