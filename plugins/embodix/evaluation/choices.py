# SPDX-License-Identifier: Apache-2.0
"""What a command asks of an evaluation, checked and named before anything is loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix.checkpoints.policy_loading import PolicyChoices
from embodix.config.compose import merge_overrides

ACTORS = ("policy", "expert", "blind", "blank_image", "wrong_prompt")
OF_THE_POLICY = ("policy", "blank_image", "wrong_prompt")
FEATURE_GROUPS = ("plugin", "packing", "attention", "vision_tokens", "quantization", "language", "strict_plugins")
# Folders that every run has: they tell nothing apart.
GENERIC_FOLDERS = re.compile(r"pretrained_model|checkpoints|last|run|variants|embodiments|outputs|train|\d{6}")
CHECKPOINT_NAME = re.compile(r"[\w.+-]+")


def check_choices(cfg: DictConfig, checkpoints: Sequence[str]) -> None:
    """Refuse what can't be run.

    Raises:
        ValueError: an unknown actor or control, a policy without checkpoint, several checkpoints for a controller, too
            few episodes, or a wrong-prompt actor without words.
    """
    _require_known("actor", cfg.actor, ACTORS)
    for control in cfg.controls:
        _require_known("controls", control, ACTORS[1:])
    controls = list(cfg.controls)
    if len(set(controls)) < len(controls) or cfg.actor in controls:
        raise ValueError(f"controls are run beside the actor, each once; got actor={cfg.actor}, controls={controls}.")
    asks = [name for name in (cfg.actor, *controls) if needs_policy(name)]
    if asks and not checkpoints:
        raise ValueError(
            f"{' and '.join(asks)} needs a checkpoint: checkpoint=outputs/train/.../run. Without one there are "
            "actor=expert and actor=blind."
        )
    if not needs_policy(cfg.actor) and (len(checkpoints) > 1 or asks):
        raise ValueError(f"actor={cfg.actor} runs without a policy; got checkpoints {list(checkpoints)} and {asks}.")
    if cfg.eval.n_episodes < 1:
        raise ValueError(f"eval.n_episodes must be at least 1 episode a task; got {cfg.eval.n_episodes}.")
    if cfg.actor == "wrong_prompt" and cfg.wrong_prompt is None:
        raise ValueError("actor=wrong_prompt needs the words to say: wrong_prompt='...'.")


def needs_policy(actor: str) -> bool:
    """Whether an actor or control is a checkpoint's policy."""
    return actor in OF_THE_POLICY


def policy_choices(cfg: DictConfig, overrides: Sequence[str]) -> PolicyChoices:
    """What the command changes of the checkpoint: the feature groups that it names, and fields of the policy."""
    policy: Any = OmegaConf.to_container(cfg.policy, resolve=True)
    if cfg.rename_map is not None and not OmegaConf.is_dict(cfg.rename_map):
        raise ValueError(
            "rename_map goes from the environment's keys to the policy's: "
            f"rename_map={{<environment key>: <policy key>}}; got {cfg.rename_map!r}."
        )
    rename_map: Any = OmegaConf.to_container(cfg.rename_map) if cfg.rename_map is not None else None
    return PolicyChoices(
        features=[override for override in overrides if _names_a_feature(override)],
        policy=policy,
        rename_map=rename_map,
        tokenizer=cfg.tokenizer.directory,
    )


def _names_a_feature(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return key.partition(".")[0] in FEATURE_GROUPS


def _require_known(place: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{place} must be one of {', '.join(known)}; got {name!r}.{hint}")


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint, and what is changed of it alone.

    Attributes:
        path: folder, file or name on the hub.
        policy: fields of the policy's config.
        features: overrides of feature groups.
    """

    path: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[str] = ()

    @property
    def changes(self) -> list[str]:
        """As a command line says them."""
        return [*(f"policy.{name}={value}" for name, value in self.policy.items()), *self.features]

    def applied_to(self, choices: PolicyChoices) -> PolicyChoices:
        """The command's choices with those of this checkpoint over them."""
        return replace(
            choices,
            policy={**choices.policy, **self.policy},
            features=merge_overrides(list(choices.features), list(self.features)),
        )


def name_checkpoints(value: Any) -> dict[str, NamedCheckpoint]:
    """Name -> checkpoint of those that a command names: one, a list, or a mapping with the names for the report.

    In a mapping, a checkpoint is its path or ``{path: ..., policy.<field>: ..., <feature group>: ...}``, so that one
    checkpoint can stand beside itself with other settings.

    Returns:
        Empty for None.

    Raises:
        ValueError: not a path, list or mapping of paths, one twice, settings that are none of a checkpoint's, or a name
            that can't be a folder's.
    """
    if value is None:
        return {}
    if isinstance(value, str | Path):
        return {_name(str(value), 1): NamedCheckpoint(str(value))}
    if isinstance(value, Mapping):
        settings = {str(name): entry for name, entry in value.items() if isinstance(entry, Mapping)}
        own = {name: _with_settings(name, entry) for name, entry in settings.items()}
        plain = _name_paths({name: entry for name, entry in value.items() if str(name) not in own})
        _name_paths({name: checkpoint.path for name, checkpoint in own.items()})
        found = own | {name: NamedCheckpoint(path) for name, path in plain.items()}
        return {str(name): found[str(name)] for name in value}
    return {name: NamedCheckpoint(path) for name, path in _name_paths(value).items()}


def _with_settings(name: str, entry: Mapping[str, Any]) -> NamedCheckpoint:
    settings = {str(key): value for key, value in entry.items() if key != "path"}
    policy = {key.removeprefix("policy."): value for key, value in settings.items() if key.startswith("policy.")}
    features = {key: value for key, value in settings.items() if key.partition(".")[0] in FEATURE_GROUPS}
    unknown = [key for key in settings if not key.startswith("policy.") and key not in features]
    if not isinstance(entry.get("path"), str | Path) or unknown:
        raise ValueError(
            f"checkpoint={{{name}: {{path: ..., ...}}}} has the path of a checkpoint, fields of its policy "
            f"(policy.n_action_steps: 5) and feature groups ({', '.join(FEATURE_GROUPS)}); got {dict(entry)}."
        )
    return NamedCheckpoint(str(entry["path"]), policy, [f"{key}={value}" for key, value in features.items()])


def _name_paths(value: Any) -> dict[str, str]:
    """Name -> path, of a list of paths or a mapping of names."""
    if isinstance(value, Mapping):
        named = {str(name): path for name, path in value.items()}
    elif isinstance(value, Sequence):
        named = dict(zip(_different_names([str(path) for path in value]), value, strict=True))
    else:
        named = {"": value}
    for name, path in named.items():
        if not isinstance(path, str | Path) or not CHECKPOINT_NAME.fullmatch(name):
            raise ValueError(
                "checkpoint is a path, a list of paths, or names with paths ('checkpoint={upstream: a, embodix: b}'), "
                f"a name being letters, digits, dots, dashes and underscores; got {name!r}: {path!r}."
            )
    return {name: str(path) for name, path in named.items()}


def _different_names(paths: Sequence[str]) -> list[str]:
    """As many of the last telling folders of each path as make them different."""
    for num_parts in range(1, 1 + max((len(Path(path).parts) for path in paths), default=0)):
        names = [_name(path, num_parts) for path in paths]
        if len(set(names)) == len(paths):
            return names
    steps = [".".join(Path(path).parts[-3:]) for path in paths]  # checkpoints of one run
    names = [re.sub(r"[^\w.+-]", "_", step) for step in steps]
    if len(set(names)) < len(paths) or not paths:
        raise ValueError(f"checkpoint needs one or more different paths; got {list(paths)}.")
    return names


def _name(path: str, num_parts: int) -> str:
    parts = [part for part in Path(path).parts if part != "/"]
    telling = [part for part in parts if not GENERIC_FOLDERS.fullmatch(part)] or parts
    return re.sub(r"[^\w.+-]", "_", "_".join(telling[-num_parts:])) or "policy"
