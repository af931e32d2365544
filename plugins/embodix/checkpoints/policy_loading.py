# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a policy that can act: patches, sizes, tokenizer and features as in the run that trained it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import EnvConfig
from lerobot.policies.factory import make_policy, make_pre_post_processors
from omegaconf import DictConfig

from embodix.checkpoints.env_features import require_fitting_features
from embodix.checkpoints.model_folder import ModelFolder
from embodix.config.train_schema import NamedChoice
from embodix.data.tokenizer import offline_tokenizer
from embodix.patching import patched
from embodix.policies.adapters import bare_policy
from embodix.policies.support import support_of
from embodix.training.features import UNCHANGED, install_features, select_features
from embodix.training.host_context import QUANTIZED_PATCH, policy_patches

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy


@dataclass(frozen=True)
class PolicyChoices:
    """What a command changes of a checkpoint.

    Attributes:
        features: Hydra overrides of feature groups, in place of the run's.
        policy: fields of the policy's config.
        rename_map: environment key -> policy key; None keeps the checkpoint's.
        tokenizer: folder of an offline tokenizer; None for the run's.
    """

    features: Sequence[str] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)
    rename_map: Mapping[str, str] | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy ready to act.

    Attributes:
        description: type, folder, parameters, features and patches, for the results.
        notes: what a reader must know, for example cameras that stay blank.
    """

    policy: PreTrainedPolicy
    preprocessor: Any
    postprocessor: Any
    description: dict[str, Any]
    notes: list[str]


@contextmanager
def loaded_policy(source: ModelFolder, env_cfg: EnvConfig, choices: PolicyChoices) -> Iterator[LoadedPolicy]:
    """Load a checkpoint; inside the block its patches and its tokenizer are in force.

    Raises:
        ValueError: features that don't fit the environment, a config that upstream rejects, or missing files.
        embodix.patching.PatchError: a patch does not fit the installed host.
    """
    policy_type = source.policy_type()
    cfg = source.compose_run(policy_type, list(choices.features))
    source = source.member(cfg)
    source.adapter_base()  # before upstream, which would ask the hub for it
    with ExitStack() as stack:
        patches = stack.enter_context(prepared_host(source, cfg, choices.tokenizer))
        policy_cfg = policy_config(source, choices.policy)
        pre, post = _processors(policy_cfg, source, choices.rename_map)
        notes = require_fitting_features(policy_cfg, env_cfg, _rename_map(pre))
        policy = bare_policy(make_policy(cfg=policy_cfg, env_cfg=env_cfg, rename_map=_rename_map(pre))).eval()
        features = stack.enter_context(_features(policy, cfg, source))
        fallback = features.get("quantization", {}).get("fallback")
        notes += [] if fallback is None else [f"{fallback}."]
        description = {
            "type": policy_type,
            "model": source.model,
            "num_parameters": sum(parameter.numel() for parameter in policy.parameters()),
            "device": str(policy_cfg.device),
            "features": features,
            "patches": sorted(patches),
        }
        yield LoadedPolicy(policy, pre, post, description, notes)


@contextmanager
def prepared_host(source: ModelFolder, cfg: DictConfig, tokenizer: str | None = None) -> Iterator[dict[str, Any]]:
    """What upstream needs to load this checkpoint: patches and the tokenizer, undone at the end; yields the patches.

    Args:
        source: of one policy, see ``ModelFolder.member``.
        cfg: the train config of its run.
        tokenizer: folder of an offline tokenizer; None for the run's.
    """
    policy_type = source.policy_type()
    patches = policy_patches(cfg)
    if source.quantizer() is not None:
        patches[QUANTIZED_PATCH] = {"policy_type": policy_type}
    with ExitStack() as stack:
        stack.enter_context(patched(patches))
        directory = tokenizer or cfg.tokenizer.directory
        support = support_of(policy_type)
        if directory is not None and support.uses_tokenizer_directory():
            folder = _existing(Path(directory), source)
            stack.enter_context(offline_tokenizer(folder, support.tokenizer_hub_id))
        yield patches


def policy_config(source: ModelFolder, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The checkpoint's config with the fields of this command, as upstream's command line changes them."""
    overrides = [f"--{name}={_argument(value)}" for name, value in changes.items() if value is not None]
    config = PreTrainedConfig.from_pretrained(source.model, cli_overrides=overrides)
    config.pretrained_path = Path(source.model)
    return config


def _argument(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _processors(config: PreTrainedConfig, source: ModelFolder, rename_map: Mapping[str, str] | None) -> tuple[Any, Any]:
    """Upstream's processors, on this machine's device, as `lerobot_eval.eval_main` makes them."""
    overrides: dict[str, Any] = {"device_processor": {"device": str(config.device)}}
    if rename_map is not None:
        overrides["rename_observations_processor"] = {"rename_map": dict(rename_map)}
    return make_pre_post_processors(config, pretrained_path=source.model, preprocessor_overrides=overrides)


def _rename_map(preprocessor: Any) -> dict[str, str]:
    """What the preprocessor renames before the policy sees it."""
    renamed: dict[str, str] = {}
    for step in preprocessor.steps:
        renamed |= getattr(step, "rename_map", {})
    return renamed


@contextmanager
def _features(policy: PreTrainedPolicy, cfg: DictConfig, source: ModelFolder) -> Iterator[dict[str, Any]]:
    """The computation and the weights' format of the run's features.

    The run's training precision is left out: its master weights are what the checkpoint holds. A quantized policy has
    given up the weights it was loaded with; those of a quantized checkpoint are taken as the file has them.
    """
    accelerator = Accelerator(cpu=torch.device(str(policy.config.device)).type == "cpu")
    selection = replace(select_features(cfg), precision=NamedChoice(UNCHANGED))
    chosen = selection.quantization.name
    stored = None if chosen == UNCHANGED else source.stored_weights(chosen)
    installed = install_features(policy, selection, accelerator, stored_weights=stored, keep_originals=False)
    try:
        yield {"attention": installed.attention_backend, **installed.describe()}
    finally:
        installed.uninstall()


def _existing(directory: Path, source: ModelFolder) -> Path:
    if not directory.is_dir():
        raise ValueError(
            f"The tokenizer that {source.model} was trained with is not at {directory}. Run from the folder that the "
            "run was started in, or give its place: tokenizer.directory=<recording>/tokenizer."
        )
    return directory
