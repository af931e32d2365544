# SPDX-License-Identifier: Apache-2.0
"""The command line of upstream's ``lerobot-train`` and ``lerobot-eval`` in the words of this one.

``TRAIN`` says of every flag of upstream's training how it is reached here; docs/upstream-flags.md shows it, and a test
walks upstream's dataclasses for flags that are missing. ``*`` stands for the rest of a flag.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embodix.cli.command_line import parsable
from embodix.config.compose import options_of
from embodix.policies.support import support_of

# Flag -> the override that does it, with {value}; one that begins with "-" says why there is none.
TRAIN: Mapping[str, str] = {
    "dataset.repo_id": "dataset.repo_id={value}",
    "dataset.root": "dataset.root={value}",
    "dataset.episodes": "dataset.episodes={value}",
    "dataset.image_transforms.enable": "dataset.image_transforms.enable={value}",
    "dataset.image_transforms.max_num_transforms": "dataset.image_transforms.max_num_transforms={value}",
    "dataset.image_transforms.random_order": "dataset.image_transforms.random_order={value}",
    "dataset.image_transforms.tfs": "+dataset.image_transforms.tfs={value}",
    "dataset.image_transforms.tfs.*": "+dataset.image_transforms.tfs.*={value}",
    "dataset.revision": "dataset.revision={value}",
    "dataset.use_imagenet_stats": "dataset.use_imagenet_stats={value}",
    "dataset.video_backend": "dataset.video_backend={value}",
    "dataset.streaming": "dataset.streaming={value}",
    "env.type": "env={value}",
    "env.*": "env.*={value}",
    "policy.type": "policy={value}",
    "policy.path": "policy.pretrained_path={value}",
    "policy.*": "policy.*={value}",
    "output_dir": "train.output_dir={value}",
    "job_name": "train.job_name={value}",
    "resume": "- give resume=<run folder> alone; what the run was begun with is in it",
    "config_path": "- give resume=<run folder> to go on with a run; a config of upstream's is not read otherwise",
    "seed": "train.seed={value}",
    "cudnn_deterministic": "train.cudnn_deterministic={value}",
    "num_workers": "train.num_workers={value}",
    "batch_size": "train.batch_size={value}",
    "steps": "train.steps={value}",
    "eval_freq": "train.eval_freq={value}",
    "log_freq": "train.log_freq={value}",
    "tolerance_s": "train.tolerance_s={value}",
    "save_checkpoint": "train.save_checkpoint={value}",
    "save_freq": "train.save_freq={value}",
    "use_policy_training_preset": "- optimizer=... and scheduler=... replace the policy's presets",
    "optimizer.type": "optimizer={value}",
    "optimizer.*": "optimizer.*={value}",
    "scheduler.type": "scheduler={value}",
    "scheduler.*": "scheduler.*={value}",
    "eval.n_episodes": "eval.n_episodes={value}",
    "eval.batch_size": "eval.batch_size={value}",
    "eval.use_async_envs": "eval.use_async_envs={value}",
    "wandb.enable": "logging=wandb",
    "wandb.disable_artifact": "logging.options.disable_artifact={value}",
    "wandb.project": "logging.options.project={value}",
    "wandb.entity": "logging.options.entity={value}",
    "wandb.notes": "logging.options.notes={value}",
    "wandb.run_id": "logging.options.run_id={value}",
    "wandb.mode": "logging.options.mode={value}",
    "wandb.add_tags": "logging.options.add_tags={value}",
    "peft.target_modules": "+peft.target_modules={value}",
    "peft.full_training_modules": "+peft.full_training_modules={value}",
    "peft.method_type": "+peft.method_type={value}",
    "peft.init_type": "+peft.init_type={value}",
    "peft.r": "+peft.r={value}",
    "use_rabc": "train.use_rabc={value}",
    "rabc_progress_path": "train.rabc_progress_path={value}",
    "rabc_kappa": "train.rabc_kappa={value}",
    "rabc_epsilon": "train.rabc_epsilon={value}",
    "rabc_head_mode": "train.rabc_head_mode={value}",
    "rename_map": "+rename_map={value}",
}
EVAL: Mapping[str, str] = {
    "policy.path": "checkpoint={value}",
    "policy.*": "+policy.*={value}",
    "env.type": "env={value}",
    "env.*": "env.*={value}",
    "eval.n_episodes": "eval.n_episodes={value}",
    "eval.batch_size": "eval.num_slots={value}",
    "eval.use_async_envs": "- simulators run in eval.num_workers processes",
    "output_dir": "hydra.run.dir={value}",
    "job_name": "- an evaluation is told by its folder, hydra.run.dir",
    "seed": "eval.first_seed={value}",
    "rename_map": "+rename_map={value}",
}
UNKNOWN_TYPE = "<its option>"
GROUPS = ("policy", "env", "optimizer", "scheduler")
TABLES = {"train": TRAIN, "compare": TRAIN, "plan": TRAIN, "eval": EVAL}


def translate(verb: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Upstream's flags as overrides.

    Args:
        argv: words after the verb, overrides among them kept.

    Returns:
        The overrides, and a sentence for each flag that has none.
    """
    given = list(_flags(argv))
    values = {flag: value for flag, value in given if flag is not None}
    if "resume" in values and "config_path" in values:
        return [f"resume={_quoted(_run_folder(values['config_path']))}"], []
    overrides, refusals = [value for flag, value in given if flag is None], []
    for flag, value in values.items():
        line = override_of(TABLES[verb], flag)
        if line is None:
            refusals.append(f"--{flag} is no flag of upstream's command.")
        elif line.startswith("-"):
            refusals.append(f"--{flag}:{line[1:]}.")
        else:
            overrides += _overrides(verb, flag, value, line)
    return _added_where_there_is_no_option(overrides), refusals


def _overrides(verb: str, flag: str, value: str, line: str) -> list[str]:
    group, _, field = flag.partition(".")
    if flag == "wandb.enable":
        return [] if value.lower() == "false" else [line]
    if flag == "policy.path" and verb != "eval":
        return [*_policy(_type_at(value)), line.format(value=_quoted(value))]
    if flag == "policy.type":
        return _policy(value)
    if field == "type" and value not in options_of(group):
        return [f"+{flag}={value}"]
    return [line.format(value=_quoted(value))]


def _added_where_there_is_no_option(overrides: Sequence[str]) -> list[str]:
    """Choices first; fields of a node that no option of a group has filled are added."""
    choices = [line for line in overrides if "." not in line.partition("=")[0]]
    fields = [line for line in overrides if line not in choices]
    open_nodes = [group for group in GROUPS if f"{group}=upstream" in choices or _has_added_type(group, fields)]
    return choices + [f"++{line}" if line.partition(".")[0] in open_nodes else line for line in fields]


def _has_added_type(group: str, fields: Sequence[str]) -> bool:
    return any(line.startswith(f"+{group}.type=") for line in fields)


def override_of(table: Mapping[str, str], flag: str) -> str | None:
    """The template of a flag; the longest pattern that fits it counts."""
    if flag in table:
        return table[flag]
    patterns = [pattern for pattern in table if pattern.endswith("*") and flag.startswith(pattern[:-1])]
    if not patterns:
        return None
    pattern = max(patterns, key=len)
    return table[pattern].replace("*", flag[len(pattern) - 1 :])


def _flags(argv: Sequence[str]) -> Iterator[tuple[str | None, str]]:
    """Each flag with its value, ``true`` where it has none; None with each other word."""
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            yield None, word
        elif equals:
            yield flag, value
        elif words and not words[0].startswith("--"):
            yield flag, words.pop(0)
        else:
            yield flag, "true"


def _policy(policy_type: str) -> list[str]:
    """The group's option for a type of upstream's."""
    group = support_of(policy_type).config_group
    if group != "upstream" or policy_type == UNKNOWN_TYPE:
        return [f"policy={policy_type if policy_type == UNKNOWN_TYPE else group}"]
    return ["policy=upstream", f"policy.type={policy_type}"]


def _type_at(path: str) -> str:
    """The policy's type where the folder is here, else what stands for it."""
    config = Path(path) / "config.json"
    return str(json.loads(config.read_text())["type"]) if config.is_file() else UNKNOWN_TYPE


def _run_folder(config_path: str) -> str:
    """``<run>/checkpoints/<step>/pretrained_model/train_config.json`` -> its checkpoint's folder."""
    return str(Path(config_path).parent.parent) if config_path.endswith(".json") else config_path


def _quoted(value: str) -> str:
    """A value as Hydra's grammar takes it for one."""
    read = parsable([f"key={value}"])
    if read and not read[0].is_sweep_override():
        return value
    if value.startswith("{") and value.endswith("}"):
        return _mapping(yaml.safe_load(value))
    return "'" + value.replace("'", "\\'") + "'"


def _mapping(node: Any) -> str:
    """JSON in Hydra's grammar, which has no quotes around the keys of a mapping."""
    if isinstance(node, dict):
        return "{" + ",".join(f"{key}:{_mapping(value)}" for key, value in node.items()) + "}"
    return json.dumps(node)
