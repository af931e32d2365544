# SPDX-License-Identifier: Apache-2.0
"""What a run is: its data, tokenizer, batches, policy, optimizer and algorithm, kept in every checkpoint.

A resumed run is compared with what its checkpoint recorded, and each difference is an error unless it is accepted by
name. What is accepted stands in the next checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import embodix
from embodix.checks.dataset_check import STATISTICS_CHOICES, statistics_choice
from embodix.data.content import dataset_content, files_content
from embodix.data.joined_columns import JOIN, decode_join
from embodix.data.mixture_dataset import MixtureDataset
from embodix.data.mixture_spec import STATISTICS, is_mixture
from embodix.report.manifest import write_text_atomically

IDENTITY_FILE = "embodix_identity.json"
POSITION = "position"  # the place in the data, which is no part of the identity but may be given up by the same option
FIXED = "optimizer"  # upstream restores optimizer and schedule from the checkpoint, whatever the config says
ASPECTS = ("data", "tokenizer", "batch", "policy", FIXED, "algorithm", "versions")
ACCEPTABLE = (*(aspect for aspect in ASPECTS if aspect != FIXED), POSITION)
ENDS_POSITION = ("data", "batch")  # changes after which a place in the epoch means other samples
# Of a policy's config: where it runs, how it is stored and published, and what upstream fills in from the data.
HARMLESS_POLICY_FIELDS = (
    *("device", "compile_mode", "compile_model", "gradient_checkpointing", "pretrained_path"),
    *("push_to_hub", "repo_id", "private", "tags", "license", "input_features", "output_features"),
)
DATA_SETTINGS = ("episodes", "image_transforms", "use_imagenet_stats", "streaming")
PRESET_PREFIXES = ("optimizer_", "scheduler_")  # fields of a policy that upstream makes both from, not on resume
BATCH_SETTINGS = ("batch_size", "seed")
ALGORITHM_GROUPS = ("action_pad", "language", "precision", "quantization")


@dataclass(frozen=True)
class RunIdentity:
    """Values by aspect and name, as JSON holds them.

    Attributes:
        aspects: one of ``ASPECTS`` -> name -> value.
        accepted: changes that earlier resumptions have accepted: step, aspect, name, recorded and found value.
    """

    aspects: dict[str, dict[str, Any]]
    accepted: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2, default=str)
        write_text_atomically(folder / IDENTITY_FILE, text + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunIdentity | None:
        """The identity in a checkpoint's ``training_state`` folder, or None for a checkpoint without one.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / IDENTITY_FILE
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} must hold the identity of a run as JSON, and does not: {error}.") from error

    def changes(self, found: RunIdentity) -> list[Change]:
        """What differs between this record and what is there now."""
        plain = json.loads(json.dumps(found.aspects, default=str))
        return [
            Change(aspect, name, recorded.get(name), now.get(name))
            for aspect, recorded, now in ((a, self.aspects.get(a, {}), plain.get(a, {})) for a in ASPECTS)
            for name in dict.fromkeys((*recorded, *now))
            if recorded.get(name) != now.get(name)
        ]


@dataclass(frozen=True)
class Change:
    """One value that is not as the checkpoint has recorded it."""

    aspect: str
    name: str
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.aspect}: {self.name} was {_shown(self.recorded)}, is {_shown(self.found)}"


def _shown(value: Any) -> str:
    return str(value) if value is not None else "absent"


def data_identity(dataset: Any) -> dict[str, Any]:
    """Content of the data set of a run, or of each member of a mixture."""
    if not isinstance(dataset, MixtureDataset):
        return dataset_content(Path(dataset.root))
    found: dict[str, Any] = {}
    for member in dataset.members:
        chosen = {name: getattr(member.spec, name) for name in ("weight", "episodes", "cameras")}
        content = {**dataset_content(Path(member.dataset.root)), **chosen, JOIN: member.spec.join or None}
        found |= {f"{member.name}.{name}": value for name, value in content.items()}
    return found


def run_identity(
    config: Mapping[str, Any],
    host_fields: Mapping[str, Any],
    data: Mapping[str, Any],
    num_processes: int,
    mixed_precision: str,
    composes: bool,
) -> RunIdentity:
    """What a run is.

    Args:
        config: the resolved Hydra config.
        host_fields: upstream's config as plain containers.
        data: of ``data_identity``.
        num_processes: ranks; recorded, and no part of the identity where the packer composes the batches, which
            continue in their order with any number.
        composes: whether the packer composes the batches.
    """
    policy = host_fields["policy"]
    tokenizers = {key: value for key, value in policy.items() if "tokenizer" in key and _is_folder(value)}
    preset = {name: value for name, value in policy.items() if name.startswith(PRESET_PREFIXES)}
    hidden = (*HARMLESS_POLICY_FIELDS, *tokenizers, *preset)
    batch = {name: host_fields[name] for name in BATCH_SETTINGS} | {"sampling": config["sampling"]}
    batch |= {"packing": config["packing"]} if composes else {"processes": num_processes}
    if host_fields["dataset"]["streaming"]:
        batch["num_workers"] = host_fields["num_workers"]
    algorithm = {name: config[name] for name in ALGORITHM_GROUPS}
    algorithm |= {name: value for name, value in host_fields.items() if "rabc" in name and "path" not in name}
    return RunIdentity(
        {
            "data": {**data, **_data_settings(config["dataset"], host_fields["dataset"])},
            "tokenizer": _tokenizers(config["tokenizer"]["directory"], tokenizers),
            "batch": batch,
            "policy": {name: value for name, value in policy.items() if name not in hidden},
            FIXED: {
                **{f"policy.{name}": value for name, value in preset.items()},
                **{f"optimizer.{name}": value for name, value in (host_fields["optimizer"] or {}).items()},
                **{f"scheduler.{name}": value for name, value in (host_fields["scheduler"] or {}).items()},
            },
            "algorithm": {
                **algorithm,
                "flow_samples": config["flow_samples"],
                "mixed_precision": mixed_precision,
                "peft": host_fields["peft"],
            },
            "versions": {"embodix": embodix.__version__, "lerobot": importlib.metadata.version("lerobot")},
        }
    )


def _data_settings(node: Mapping[str, Any], host_fields: Mapping[str, Any]) -> dict[str, Any]:
    """How the data are read; what is not chosen is None, as in a checkpoint that does not record it."""
    statistics = statistics_choice(node)
    join = {} if is_mixture(node) else decode_join(f"dataset.{JOIN}", node.get(JOIN))
    return {
        **{name: host_fields[name] for name in DATA_SETTINGS},
        f"dataset.{STATISTICS}": None if statistics == STATISTICS_CHOICES[0] else statistics,
        f"dataset.{JOIN}": join or None,
    }


def _tokenizers(directory: str | None, of_policy: Mapping[str, str]) -> dict[str, str]:
    folders = {**of_policy, **({"directory": directory} if directory is not None else {})}
    return {name: files_content(Path(folder)) for name, folder in folders.items()}


def _is_folder(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_dir()


def require_known_aspects(accepted: Sequence[str]) -> None:
    """
    Raises:
        ValueError: a name that is no change that can be accepted.
    """
    unknown = sorted(set(accepted) - set(ACCEPTABLE))
    if unknown:
        raise ValueError(f"accept_changes takes {', '.join(ACCEPTABLE)}; got {', '.join(unknown)}.")


def require_same_run(
    checkpoint: Path, recorded: RunIdentity, found: RunIdentity, accepted: Sequence[str], step: int
) -> RunIdentity:
    """The identity that goes on, with the accepted changes.

    Raises:
        ValueError: something has changed and is not accepted; the message has recorded and found values.
    """
    changes = recorded.changes(found)
    refused = [change for change in changes if change.aspect not in accepted or change.aspect == FIXED]
    if refused:
        raise ValueError(_refusal(checkpoint, refused))
    history = [{"step": step, **dataclasses.asdict(change)} for change in changes]
    return dataclasses.replace(found, accepted=[*recorded.accepted, *history])


def _refusal(checkpoint: Path, refused: Sequence[Change]) -> str:
    aspects = list(dict.fromkeys(change.aspect for change in refused))
    listed = "".join(f"\n  {change}" for change in refused)
    advice = []
    free = [aspect for aspect in aspects if aspect != FIXED]
    if free:
        advice.append(
            f"Put it back, or accept it with 'accept_changes=[{','.join(free)}]', which the next checkpoint records."
        )
    if any(aspect in ENDS_POSITION for aspect in free):
        advice.append("The epoch then begins again.")
    if FIXED in aspects:
        advice.append(
            "A resumed run keeps the checkpoint's optimizer and schedule, so that other values would change nothing: "
            "leave them out, or start another run from the weights with policy.pretrained_path="
            f"{checkpoint / 'pretrained_model'}."
        )
    return f"This is not the run that wrote {checkpoint}:{listed}\n{' '.join(advice)}"
