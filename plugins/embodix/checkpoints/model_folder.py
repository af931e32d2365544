# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint keeps its model, and what is known of the run that trained it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draccus.utils import DecodingError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.train import TRAIN_CONFIG_NAME
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.utils.constants import CHECKPOINTS_DIR, LAST_CHECKPOINT_LINK, PRETRAINED_MODEL_DIR
from omegaconf import DictConfig, OmegaConf

from embodix.config.compose import compose_train, merge_overrides
from embodix.contracts import CheckpointQuantizer, StoredWeight
from embodix.data.embodiments import EMBODIMENTS_DIR, embodiment_folder
from embodix.data.mixture_spec import decode_mixture, is_mixture
from embodix.policies.adapters import ADAPTER_CONFIG_FILE, holds_adapters, merge_command
from embodix.policies.quantizers import CONFIG_FILE, CONFIG_KEY, quantizer_of
from embodix.policies.support import support_of
from embodix.training.checkpoint import ARCHITECTURE_FILE, OVERRIDES_FILE

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelFolder:
    """A pretrained model as LeRobot saves it.

    Attributes:
        model: its folder, or its name on the hub.
        run_files: the folder with the run's own files: the same, or that of the mixture it is a member of.
    """

    model: str
    run_files: Path

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides of the run that trained it; none where plain LeRobot did."""
        return list(self._json(OVERRIDES_FILE) or [])

    @property
    def train_config(self) -> dict[str, Any]:
        """Upstream's config of that run; empty where the folder has none."""
        return dict(self._json(TRAIN_CONFIG_NAME) or {})

    @property
    def architecture(self) -> dict[str, Any] | None:
        """Widths and depths of a small policy."""
        architecture: dict[str, Any] | None = self._json(ARCHITECTURE_FILE)
        return architecture

    def quantizer(self) -> CheckpointQuantizer | None:
        """What quantized its weights, as ``lerobot quantize`` writes them; None for a model that is not quantized.

        Raises:
            ValueError: it says that it is, and no registered quantizer knows it.
        """
        return quantizer_of(Path(self.model))

    def stored_weights(self, chosen: str) -> Mapping[str, StoredWeight] | None:
        """Module path -> weight of a quantized model, as its file has it; None for any other.

        Args:
            chosen: name of the quantizer that is to take them.

        Raises:
            ValueError: a damaged file (names the tensor), or one of another quantizer.
        """
        quantizer = self.quantizer()
        if quantizer is None:
            return None
        if quantizer.name != chosen:
            raise ValueError(
                f"{self.model} is quantized by {quantizer.name}; quantization={chosen} can't take its weights. Leave "
                "quantization out, or evaluate it dequantized: quantization=none."
            )
        with quantizer.open(Path(self.model)) as weights:
            return weights.stored()

    def adapter_base(self) -> str | None:
        """The model that the adapters of this one stand beside; None where it is a whole policy.

        Raises:
            ValueError: adapters that name no base, or one that is not there.
        """
        if not holds_adapters(Path(self.model)):
            return None
        base = json.loads((Path(self.model) / ADAPTER_CONFIG_FILE).read_text())["base_model_name_or_path"]
        if not base or not (Path(base).is_dir() or HUB_NAME.fullmatch(base)):
            raise ValueError(
                f"{self.model} holds adapters, which stand beside the weights of {base or 'no model that they name'}: "
                "there is no such folder. Put it back, or merge them beside a copy of it: "
                f"{merge_command(self.model)} base=COPY."
            )
        return str(base)

    def require_policy(self, verb: str) -> None:
        """Refuse adapters where the weights of a whole policy are needed.

        Raises:
            ValueError: the folder holds adapters; the message has the command that merges them.
        """
        if holds_adapters(Path(self.model)):
            raise ValueError(
                f"lerobot {verb} needs a whole policy, and {self.model} holds adapters of PEFT. Merge them and give "
                f"the result: {merge_command(self.model)}."
            )

    def require_whole_mixture(self) -> None:
        """Refuse one embodiment of a mixture where the folder of all of them is needed.

        Raises:
            ValueError: it is one; the message names the folder to give.
        """
        folder = Path(self.model)
        if folder.parent.name == EMBODIMENTS_DIR:
            raise ValueError(f"{folder} is one embodiment of a mixture; give the whole one: {folder.parent.parent}.")

    def local(self) -> ModelFolder:
        """The same model in a folder on this machine."""
        if Path(self.model).is_dir():
            return self
        folder = Path(snapshot_download(self.model))
        return ModelFolder(str(folder), folder)

    def policy_type(self) -> str:
        """The policy's type, as its config says.

        Raises:
            ValueError: neither a folder nor a model on the hub that can be reached.
        """
        config = Path(self.model) / CONFIG_FILE
        if config.is_file():
            return str(read_json(config)["type"])
        try:
            return str(PreTrainedConfig.from_pretrained(self.model).type)
        except (OSError, HFValidationError) as error:
            raise ValueError(
                f"There is no folder {self.model}, and the hub gave no model of that name: {error}"
            ) from error
        except DecodingError as error:
            if CONFIG_KEY not in str(error):
                raise
            raise ValueError(
                f"{self.model} on the hub is quantized; download it (hf download {self.model} --local-dir FOLDER) and "
                "give the folder."
            ) from error

    def trained_instructions(self) -> list[str]:
        """What the tasks of the training data say; nothing where the data set is not on this machine."""
        dataset = self.train_config.get("dataset", {})
        root = dataset.get("root")
        if root is None or not is_dataset(root):
            return []
        return [str(task) for task in LeRobotDatasetMetadata(dataset["repo_id"], root=root).tasks.index]

    def recorded_overrides(self, policy_type: str) -> list[str]:
        """``overrides``; for a checkpoint without, those that a policy of this type needs to run here."""
        group = support_of(policy_type).config_group
        return self.overrides or [f"policy={group}", f"policy.type={policy_type}", "tokenizer.directory=null"]

    def compose_run(self, policy_type: str, added: list[str]) -> DictConfig:
        """The train config of the run, with this command's choices in place of its own.

        Raises:
            ValueError: overrides of the run that no longer compose.
        """
        recorded = self.recorded_overrides(policy_type)
        try:
            cfg = compose_train(merge_overrides(recorded, added))
        except Exception as error:  # Hydra's and OmegaConf's errors have no class in common
            raise ValueError(
                f"The overrides of the run that trained {self.model} do not compose here: {error}. Is a plugin or a "
                f"config missing? They are in {self.run_files / OVERRIDES_FILE}."
            ) from error
        if OmegaConf.is_missing(cfg, "policy"):
            raise ValueError(
                f"{self.run_files / OVERRIDES_FILE} names no policy that is installed here: {self.overrides}. Install "
                "the plugin that has it."
            )
        if self.architecture is not None:
            cfg.architecture = self.architecture
        return cfg

    def member(self, cfg: DictConfig) -> ModelFolder:
        """The model of the embodiment that a mixture is evaluated as; the folder itself for any other run."""
        if not is_mixture(cfg.dataset) or self.run_files != Path(self.model):
            return self
        node: Any = OmegaConf.to_container(cfg.dataset, resolve=True)
        folder = embodiment_folder(self.run_files, decode_mixture(node).evaluate_as)
        return ModelFolder(str(folder), self.run_files)

    def _json(self, name: str) -> Any:
        path = self.run_files / name
        return read_json(path) if path.is_file() else None


def find_model(path: Path | str) -> ModelFolder:
    """Accept a run, checkpoint or model folder, a file in one, a link to one, or a model's name on the hub.

    Raises:
        ValueError: no model there; the message lists where it was looked for.
    """
    given = Path(path)
    start = given.parent if given.is_file() else given
    tried = [
        start,
        start / PRETRAINED_MODEL_DIR,
        start / LAST_CHECKPOINT_LINK / PRETRAINED_MODEL_DIR,
        start / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK / PRETRAINED_MODEL_DIR,
        start / "run" / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK / PRETRAINED_MODEL_DIR,
    ]
    for folder in tried:
        if _is_model(folder):
            return _model_at(folder)
    if HUB_NAME.fullmatch(str(path)) and not given.parent.exists():  # else a misspelt folder
        return ModelFolder(str(path), given)
    raise ValueError(
        f"checkpoint={path} holds no model ({CONFIG_FILE} with the policy's type). Give a run folder, a checkpoint "
        f"(checkpoints/000100, checkpoints/last), its {PRETRAINED_MODEL_DIR}, or a model on the hub as owner/name. "
        f"Looked in: {', '.join(map(str, tried))}."
    )


def is_dataset(root: str) -> bool:
    """Whether a LeRobotDataset is in a folder."""
    return (Path(root) / "meta" / "info.json").is_file()


def _is_model(folder: Path) -> bool:
    config = folder / CONFIG_FILE
    return config.is_file() and "type" in read_json(config)


def read_json(path: Path) -> Any:
    """A JSON file of a checkpoint.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # not text, or not JSON
        raise ValueError(
            f"{path} is no JSON ({error}): the checkpoint is damaged. Copy the file from where it was written, or give "
            "another checkpoint."
        ) from error


def _model_at(folder: Path) -> ModelFolder:
    folder = _without_links(folder)
    of_mixture = folder.parent.name == EMBODIMENTS_DIR
    return ModelFolder(str(folder), folder.parent.parent if of_mixture else folder)


def _without_links(folder: Path) -> Path:
    """The checkpoint that `last` or `best` names now: the link may move on while it is evaluated."""
    return folder.resolve()
