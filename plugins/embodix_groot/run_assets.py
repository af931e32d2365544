# SPDX-License-Identifier: Apache-2.0
"""Files that a policy of other sizes than upstream's needs on disk before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from omegaconf import DictConfig, OmegaConf

GROOT_FOLDER = "groot_n15"


def prepare_host_assets(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> None:
    """Make what a GR00T-N1.5 of other sizes needs in ``<dataset>/groot_n15`` and name it in upstream's config.

    Assets that the config names and that are there are taken as they are: those of the checkpoint that is resumed,
    or the user's own. Other policies, and GR00T-N1.5 at its real size, need nothing.

    Raises:
        ValueError: sizes that upstream can't compute with, assets that were changed, or assets that the config names
            and that are neither there nor those of this dataset.
    """
    policy: Any = host_cfg.policy
    if cfg.architecture is None or policy is None or policy.type != "groot":
        return
    from embodix_groot.assets import (
        BASE_MODEL,
        RECORD_FILE,
        AssetSettings,
        prepare_assets,
        require_unchanged,
    )

    named = _named_folder(policy)
    if named is not None and named.is_dir():
        if (named / RECORD_FILE).is_file():
            require_unchanged(named)
        return
    datasets = _metadata(cfg, host_cfg)
    architecture: Any = OmegaConf.to_container(cfg.architecture, resolve=True)
    settings = AssetSettings(
        architecture=architecture,
        instructions=[str(task) for dataset in datasets for task in dataset.tasks.index],
        max_state_dim=policy.max_state_dim,
        max_action_dim=policy.max_action_dim,
        chunk_size=policy.chunk_size,
    )
    folder = prepare_assets(Path(datasets[0].root) / GROOT_FOLDER, settings)
    if named is not None and named.name != folder.name:
        raise ValueError(
            f"policy.tokenizer_assets_repo={named} is not there, and the assets of this dataset and architecture are "
            f"others ({folder}). Give the folder the checkpoint was trained with, or leave the field out."
        )
    policy.tokenizer_assets_repo = str(folder)
    policy.base_model_path = str(folder / BASE_MODEL)


def _named_folder(policy: Any) -> Path | None:
    """The folder that the config names instead of upstream's hub repository."""
    from lerobot.policies.groot.processor_groot import DEFAULT_TOKENIZER_ASSETS_REPO

    name = policy.tokenizer_assets_repo
    return None if name == DEFAULT_TOKENIZER_ASSETS_REPO else Path(name)


def _metadata(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> list[LeRobotDatasetMetadata]:
    """Of the dataset, or of each member of a mixture."""
    members = cfg.dataset.get("members")
    if members is None:
        dataset = host_cfg.dataset
        return [LeRobotDatasetMetadata(dataset.repo_id, root=dataset.root, revision=dataset.revision)]
    return [
        LeRobotDatasetMetadata(member.repo_id, root=member.get("root"), revision=member.get("revision"))
        for member in members.values()
    ]
