# SPDX-License-Identifier: Apache-2.0
"""Samples that a checkpoint is measured on: of its own data set, preprocessed as in training, from several episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import ACTION
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import default_collate

from embodix.checkpoints.model_folder import ModelFolder, is_dataset
from embodix.checkpoints.processor_files import load_processors
from embodix.data.column_reads import read_columns
from embodix.data.mixture_spec import decode_mixture, is_mixture
from embodix.patching import patched
from embodix.schema.gate import AccuracyGateSettings
from embodix.training.host_context import METADATA_PATCH, joins_of

Batch = dict[str, Any]
LAST_SHARE = 10  # one in so many episodes, the last ones, where training left none out


@dataclass(frozen=True)
class HeldOutBatches(Sequence[Batch]):
    """Preprocessed batches, as the policy's training forward takes them.

    Attributes:
        batches: with actions.
        episodes: the episode of each sample.
        description: where the samples come from, and whether training saw them, in words.
        action_names: of the action dimensions; none where the data set does not name them.
    """

    batches: list[Batch]
    episodes: list[int]
    description: str
    action_names: list[str] = field(default_factory=list)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class TrainedOn:
    """The data set of a run.

    Attributes:
        repo_id, root, video_backend: as in upstream's ``DatasetConfig``.
        episodes: those that training read; None for all, none for another recording.
    """

    repo_id: str
    root: str | None
    episodes: list[int] | None
    video_backend: str | None = None


def held_out_batches(
    source: ModelFolder, cfg: DictConfig, settings: AccuracyGateSettings, device: str | None = None
) -> HeldOutBatches:
    """Samples of the run's own data set; of a mixture, of the member that it is evaluated as.

    From the episodes of its tasks that the run left out, where there are two at least, else from the last tenth of
    those it was trained on. ``settings.dataset_root`` names another recording, of which all are taken. Call it with the
    policy's patches and its tokenizer in force.

    Args:
        source: the checkpoint.
        cfg: the train config of its run, as ``source.compose_run`` gives it.
        device: where the batches are; None for the checkpoint's.

    Raises:
        ValueError: no data set on this machine, or fewer than two episodes.
    """
    source = source.member(cfg)
    trained_on = _trained_on(source, cfg, settings.dataset_root)
    with patched({METADATA_PATCH: {"joins": joins_of(cfg.dataset)}}):
        return _read_batches(source, trained_on, settings, device)


def _read_batches(
    source: ModelFolder, trained_on: TrainedOn, settings: AccuracyGateSettings, device: str | None
) -> HeldOutBatches:
    policy_cfg = PreTrainedConfig.from_pretrained(source.model)
    meta = LeRobotDatasetMetadata(trained_on.repo_id, root=trained_on.root)
    tasks = [tuple(sorted(meta.episodes[episode]["tasks"])) for episode in range(meta.total_episodes)]
    episodes, words = choose_episodes(tasks, trained_on.episodes)
    lengths = {episode: _bounds(meta, episode) for episode in episodes}
    frames = spread_frames(lengths, settings.num_samples)
    dataset = LeRobotDataset(
        trained_on.repo_id,
        root=trained_on.root,
        delta_timestamps=resolve_delta_timestamps(policy_cfg, meta),
        video_backend=trained_on.video_backend,
    )
    read_columns(dataset)
    overrides = {"device_processor": {"device": device or str(policy_cfg.device)}}
    preprocess, _ = load_processors(policy_cfg, source.model, overrides)
    rows = [frame for _, frame in frames]
    parts = [rows[start : start + settings.batch_size] for start in range(0, len(rows), settings.batch_size)]
    batches = [preprocess(default_collate([dataset[row] for row in part])) for part in parts]
    names = meta.features[ACTION].get("names")
    return HeldOutBatches(
        batches,
        [episode for episode, _ in frames],
        f"{meta.root}: {words}",
        [str(name) for name in names] if isinstance(names, list) else [],
    )


def choose_episodes(tasks: Sequence[Any], trained: Sequence[int] | None) -> tuple[list[int], str]:
    """The episodes to take samples from, and what they are, in words.

    Args:
        tasks: of each episode of the data set.
        trained: the episodes that training read; None for all, none for a recording that it did not read.

    Raises:
        ValueError: fewer than two episodes.
    """
    if len(tasks) < 2:
        raise ValueError(
            f"The accuracy gate compares on samples of two episodes at least, and the data set has {len(tasks)}: one "
            "episode says nothing of the others. Give another recording of the same robot: gate.dataset_root=..."
        )
    if trained is not None and not trained:
        return list(range(len(tasks))), f"{len(tasks)} episodes of another recording than training's"
    read = sorted(trained) if trained is not None else list(range(len(tasks)))
    known = {tasks[episode] for episode in read}
    left_out = [episode for episode in range(len(tasks)) if episode not in read and tasks[episode] in known]
    if len(left_out) >= 2:
        return left_out, f"{len(left_out)} episodes that training left out, of the tasks that it knows"
    num_last = max(2, -(-len(read) // LAST_SHARE))
    return read[-num_last:], (
        f"the last {len(read[-num_last:])} of the {len(read)} episodes that training saw: of their tasks it left fewer "
        "than two out"
    )


def spread_frames(bounds: Mapping[int, tuple[int, int]], num_samples: int) -> list[tuple[int, int]]:
    """(episode, frame) of samples spread evenly over the episodes, and evenly within each.

    Args:
        bounds: first and past-the-last frame of each episode.
        num_samples: fewer are returned where the episodes have fewer frames.
    """
    episodes = list(bounds)
    if len(episodes) > num_samples:
        episodes = [episodes[(2 * k + 1) * len(episodes) // (2 * num_samples)] for k in range(num_samples)]
    frames = []
    for place, episode in enumerate(episodes):
        first, end = bounds[episode]
        quota = num_samples // len(episodes) + (place < num_samples % len(episodes))
        count = min(quota, end - first)
        frames += [(episode, first + (2 * k + 1) * (end - first) // (2 * count)) for k in range(count)]
    return frames


def _bounds(meta: LeRobotDatasetMetadata, episode: int) -> tuple[int, int]:
    row = meta.episodes[episode]
    return int(row["dataset_from_index"]), int(row["dataset_to_index"])


def _trained_on(source: ModelFolder, cfg: DictConfig, root: str | None) -> TrainedOn:
    """The run's data set, or the one in another folder in its place.

    That is another recording where the run's own is on this machine, too; else it is taken for the run's own, moved.

    Raises:
        ValueError: not on this machine.
    """
    found = _of_mixture(cfg) if is_mixture(cfg.dataset) else _of_run(source)
    if root is not None:
        is_other = (
            found is not None and found.root is not None and is_dataset(found.root) and not _same(found.root, root)
        )
        episodes = [] if is_other else found.episodes if found else None
        found = TrainedOn(found.repo_id if found else Path(root).name, root, episodes)
    if found is None or (found.root is not None and not is_dataset(found.root)):
        where = "nothing says what it was trained on" if found is None else f"there is none at {found.root}"
        raise ValueError(
            f"The accuracy gate measures {source.model} on its own data set, and {where}. "
            "Give its folder: gate.dataset_root=<folder of a data set>."
        )
    return found


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _of_run(source: ModelFolder) -> TrainedOn | None:
    node = source.train_config.get("dataset")
    if node is None:
        return None
    return TrainedOn(node["repo_id"], node.get("root"), node.get("episodes"), node.get("video_backend"))


def _of_mixture(cfg: DictConfig) -> TrainedOn:
    node: Any = OmegaConf.to_container(cfg.dataset, resolve=True)
    spec = decode_mixture(node)
    member = spec.members[spec.evaluated_index]
    return TrainedOn(member.repo_id, member.root, member.episodes, member.video_backend)
