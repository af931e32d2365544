# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a policy that can act: patches, sizes, tokenizer and features as in the run that trained it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from draccus.utils import DraccusException
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import EnvConfig
from lerobot.policies.factory import make_policy
from omegaconf import DictConfig

from embodix.checkpoints.env_features import require_fitting_features, require_provided
from embodix.checkpoints.model_folder import ModelFolder
from embodix.checkpoints.processor_files import load_processors
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
        require_provided(env_cfg, choices.rename_map or {})
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
    """The checkpoint's config with the fields of this command, as upstream's command line changes them.

    Raises:
        ValueError: a config or a field that upstream refuses, or no action to execute.
    """
    changed = {name: value for name, value in changes.items() if value is not None}
    _require_fields(source.policy_type(), changed)
    overrides = [f"--{name}={_argument(value)}" for name, value in changed.items()]
    try:
        with redirect_stderr(StringIO()) as printed:  # where the argument parser says what it leaves the process for
            config = PreTrainedConfig.from_pretrained(source.model, cli_overrides=overrides)
    except (DraccusException, SystemExit) as error:
        reason = printed.getvalue().strip().rpartition("error: ")[2] if isinstance(error, SystemExit) else str(error)
        cause = f" {error.__cause__}" if error.__cause__ is not None else ""
        raise ValueError(
            f"Upstream refuses the config of {source.model}, with {changed or 'nothing'} changed by the command: "
            f"{reason}{cause}"
        ) from error
    wanted = changed.get("device")
    if wanted is not None and torch.device(str(wanted)) != torch.device(str(config.device)):
        raise ValueError(
            f"policy.device={wanted} was asked for, and upstream falls back to {config.device}: there is no such "
            "device here. Leave policy.device out, or choose one that `embodix doctor` shows."
        )
    if getattr(config, "n_action_steps", 1) < 1:
        raise ValueError(f"policy.n_action_steps must be at least 1; got {config.n_action_steps}.")
    config.pretrained_path = Path(source.model)
    return config


def _require_fields(policy_type: str, changed: Mapping[str, Any]) -> None:
    """Upstream's argument parser takes the beginning of a field's name for the field."""
    if policy_type not in PreTrainedConfig.get_known_choices():
        raise ValueError(
            f"LeRobot has no policy.type={policy_type}, which the checkpoint is of: is the plugin that brings it "
            f"missing? Known: {', '.join(sorted(PreTrainedConfig.get_known_choices()))}."
        )
    known = [known_field.name for known_field in fields(PreTrainedConfig.get_choice_class(policy_type))]
    for name in changed:
        if name.partition(".")[0] not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"policy.{name} is no field of the config of policy.type={policy_type}; {hint}")


def _argument(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _processors(config: PreTrainedConfig, source: ModelFolder, rename_map: Mapping[str, str] | None) -> tuple[Any, Any]:
    """Upstream's processors, on this machine's device, as `lerobot_eval.eval_main` makes them."""
    overrides: dict[str, Any] = {"device_processor": {"device": str(config.device)}}
    if rename_map is not None:
        overrides["rename_observations_processor"] = {"rename_map": dict(rename_map)}
    return load_processors(config, source.model, overrides)


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
