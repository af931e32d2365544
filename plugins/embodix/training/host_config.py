# SPDX-License-Identifier: Apache-2.0
"""From the composed Hydra config to upstream's ``TrainPipelineConfig``, through upstream's own decoder draccus."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus
import lerobot.policies.factory  # noqa: F401  registers upstream's policies as draccus choices
from hydra.core.override_parser.overrides_parser import OverridesParser
from lerobot.configs.train import TrainPipelineConfig
from lerobot.envs.configs import EnvConfig
from lerobot.utils.import_utils import register_third_party_plugins
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.config.compose import options_of
from embodix.data.mixture_spec import host_dataset_fields, is_own_field
from embodix.training.adapters import upstream_peft

AUTO = "auto"  # for train.batch_size
HOST_GROUPS = ("policy", "dataset", "env", "eval", "optimizer", "scheduler")
COUNTS_OF_ENV = ("episode_length", "fps", "image_size", "observation_height", "observation_width")
NAMED_GROUPS = (
    *("packing", "attention", "vision_tokens", "action_pad", "language", "reads", "preprocessing", "sampling"),
    *("quantization", "precision", "parallel", "evaluation", "check"),
)


def require_landed_groups(cfg: DictConfig) -> None:
    """Check that every chosen group landed as a mapping where it belongs.

    A group that is not on Hydra's search path otherwise turns into a plain string, and the run would silently train
    without it.

    Raises:
        ValueError: with the offending key and what to check.
    """
    for group in NAMED_GROUPS:
        node = cfg.get(group)
        if not isinstance(node, DictConfig) or not isinstance(node.get("name"), str):
            raise ValueError(
                f"Group {group!r} must land as a mapping with a name; got {node!r}. "
                f"Choose one of its options ({group}=<option>) and check that its YAML is on Hydra's search path."
            )


def decode_host_config(cfg: DictConfig) -> TrainPipelineConfig:
    """Decode upstream's config from the composed one.

    Raises:
        ValueError: a key upstream does not have (with the nearest match), a value of the wrong type, fields of a group
            of which no option is chosen, or no number of samples.
    """
    _require_number_of_samples(cfg.train)
    fields = host_fields(cfg)
    for group in ("optimizer", "scheduler", "env"):
        _require_chosen(group, fields.get(group))
    _register_choices(fields.get("env"))
    host_cfg: TrainPipelineConfig = _decode(fields, TrainPipelineConfig)
    return host_cfg


def _require_number_of_samples(train: DictConfig) -> None:
    if not isinstance(train.batch_size, int):
        raise ValueError(
            f"train.batch_size is a number of samples, or {AUTO}, for which `lerobot train` and `lerobot plan` find "
            f"one before they start; got {train.batch_size!r} where a number is needed. Set one."
        )
    if train.get("memory") is not None:
        raise ValueError(
            f"train.memory is what train.batch_size={AUTO} fits a step into; got train.memory={train.memory} with "
            f"train.batch_size={train.batch_size}. Leave one of them out."
        )


def _require_chosen(group: str, fields: Mapping[str, Any] | None) -> None:
    """Upstream takes fields without a type for those of its default class."""
    if fields is not None and not fields.get("type"):
        known = ", ".join(option for option in options_of(group) if option not in ("none", "preset"))
        raise ValueError(
            f"{', '.join(f'{group}.{name}' for name in fields)} belongs to no {group}: choose one with {group}=... "
            f"({known}), then set its fields without a plus."
        )


def decode_env(node: Mapping[str, Any]) -> EnvConfig:
    """Decode an environment's config alone.

    Raises:
        ValueError: no or an unknown ``type``, a key it does not have (with the nearest match), a value of the wrong
            type, or an episode or a picture without size.
    """
    _register_choices(node)
    env: EnvConfig = _decode(_with_joined_tasks(node), EnvConfig)
    for name in COUNTS_OF_ENV:
        value = getattr(env, name, None)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"env.{name} must be at least 1; got {value}.")
    return env


def _with_joined_tasks(env: Mapping[str, Any]) -> dict[str, Any]:
    """Several tasks as upstream's environments take them: one string with commas."""
    task = env.get("task")
    return {**env, "task": ",".join(map(str, task))} if isinstance(task, list) else dict(env)


def host_fields(cfg: DictConfig) -> dict[str, Any]:
    """The part of the config that is upstream's, as the plain mapping draccus decodes."""
    plain = _plain(cfg)
    fields = {name: value for name, value in plain["train"].items() if name != "memory"}
    for name in ("dataset", "env", "policy", "optimizer", "scheduler", "peft", "eval", "rename_map"):
        fields[name] = plain[name]
    fields["dataset"] = host_dataset_fields(plain["dataset"])
    fields["peft"] = upstream_peft(plain["peft"])
    if fields["env"] is not None:
        fields["env"] = _with_joined_tasks(fields["env"])
    fields["use_policy_training_preset"] = plain["optimizer"] is None and plain["scheduler"] is None
    if plain["logging"]["name"] == "wandb":
        fields["wandb"] = plain["logging"]["options"]
    return {key: value for key, value in fields.items() if value is not None}


def fill_missing_preset(host_cfg: TrainPipelineConfig) -> None:
    """Where only one of optimizer and scheduler was chosen, take the other from the policy's preset."""
    if host_cfg.use_policy_training_preset or host_cfg.policy is None:
        return
    if host_cfg.optimizer is None:
        host_cfg.optimizer = host_cfg.policy.get_optimizer_preset()
    if host_cfg.scheduler is None:
        host_cfg.scheduler = host_cfg.policy.get_scheduler_preset()


def host_config_of_checkpoint(config_path: Path, overrides: list[str]) -> TrainPipelineConfig:
    """Upstream's config as a checkpoint holds it, with the command line's own fields applied on top.

    Args:
        config_path: a checkpoint's ``train_config.json``.
        overrides: Hydra overrides of this command; those of upstream's fields (``train.steps=6``) count here.

    Raises:
        ValueError: a key upstream does not have (with the nearest match) or a value of the wrong type.
    """
    fields = OmegaConf.create(json.loads(config_path.read_text()))
    for override in OverridesParser.create().parse_overrides(overrides):
        key = _host_key(override.key_or_group)
        if key is not None:
            OmegaConf.update(fields, key, override.value(), force_add=True)
    _register_choices(fields.get("env"))
    host_cfg: TrainPipelineConfig = _decode(_plain(fields), TrainPipelineConfig)
    host_cfg.resume = True
    return host_cfg


def _host_key(key: str) -> str | None:
    """Where upstream's config holds a field of ours; None for what is not upstream's, or a whole group."""
    if key.startswith("train."):
        return key.removeprefix("train.")
    group, _, field = key.partition(".")
    if group == "dataset" and is_own_field(field.partition(".")[0]):
        return None
    return key if field and group in HOST_GROUPS else None


def _register_choices(env: Mapping[str, Any] | None) -> None:
    """Import what registers itself with draccus: upstream's plugins, and the registered environment that is named.

    The others stay unimported, so that one whose simulator is missing stops only the runs that ask for it.
    """
    register_third_party_plugins()
    if env is not None and env.get("type") in plugins.registry().names("environments"):
        plugins.resolve("environments", str(env["type"]))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _decode(fields: Mapping[str, Any], config_class: type) -> Any:
    try:
        return draccus.decode(config_class, dict(fields))
    except Exception as error:  # draccus raises several unrelated kinds for a bad value
        raise ValueError(f"Upstream's config rejects a value: {error}{_unsaid(error)}{_nearest(error)}") from error


def _unsaid(error: BaseException) -> str:
    """What a dataclass said of its fields together, which draccus leaves out of its own message."""
    said, cause = str(error), error.__cause__ or error.__context__
    while cause is not None:
        if str(cause) not in said and isinstance(cause, ValueError):
            return f" {cause}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _nearest(error: Exception) -> str:
    """Nearest field names for draccus's 'The fields `x` are not valid for Y'."""
    match = re.search(r"fields? `(?P<fields>[^`]+)` (?:is|are) not valid for (?P<owner>\w+)", str(error))
    if match is None:
        return _nearest_choice(error)
    owners = [cls for cls in _config_classes(TrainPipelineConfig) if cls.__name__ == match["owner"]]
    known = [f.name for cls in owners for f in dataclasses.fields(cls)]
    hints = [difflib.get_close_matches(name.strip(), known, n=1) for name in match["fields"].split(",")]
    names = [hint[0] for hint in hints if hint]
    return f" Did you mean {', '.join(names)}?" if names else f" Known fields: {', '.join(known)}."


def _nearest_choice(error: Exception) -> str:
    """Nearest and known names for draccus's "Couldn't find a choice class for 'x' in <class y>"."""
    match = re.search(r"choice class for '(?P<name>[^']+)' in <class '[\w.]*\.(?P<owner>\w+)'", str(error))
    registry = next((r for r in _registries() if match is not None and r.__name__ == match["owner"]), None)
    if match is None or registry is None:
        return ""
    known = sorted(registry.get_known_choices())
    nearest = difflib.get_close_matches(match["name"], known, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return f"{hint} Known: {', '.join(known)}."


def _registries() -> tuple[Any, ...]:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.configs import EnvConfig
    from lerobot.optim.optimizers import OptimizerConfig
    from lerobot.optim.schedulers import LRSchedulerConfig

    return PreTrainedConfig, EnvConfig, OptimizerConfig, LRSchedulerConfig


def _config_classes(root: type) -> list[type]:
    from lerobot.configs.default import DatasetConfig, EvalConfig, PeftConfig, WandBConfig

    choices = [choice for registry in _registries() for choice in registry.get_known_choices().values()]
    return [root, DatasetConfig, EvalConfig, PeftConfig, WandBConfig, *choices]
