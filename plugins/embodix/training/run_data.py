# SPDX-License-Identifier: Apache-2.0
"""What one run does about its data: which data set, how it is read and in what order, where it is preprocessed.

Upstream's loop asks for a data set and for processors by two names of its script; the patches that stand there ask the
running session, and everything is left to upstream unless the config says otherwise. What can be checked of a local
data set is checked before the run starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import OBS_IMAGES
from torch.utils.data import DataLoader

from embodix.checks.dataset_check import local_folder, statistics_choice
from embodix.checks.exact_statistics import exact_statistics_of
from embodix.checks.guard import require_readable_metadata
from embodix.contracts import ShortenedTask
from embodix.data.column_reads import read_columns
from embodix.data.embodiments import MemberPostprocessor, ProcessorCall, ProcessorPair, member_config, save_embodiments
from embodix.data.joined_columns import JOIN, decode_join
from embodix.data.mixture_dataset import BuildDataset, MixtureDataset, build_mixture, camera_table, describe_cameras
from embodix.data.mixture_spec import MixtureSpec, decode_mixture, is_mixture, require_local_members
from embodix.data.order import SampleOrder, ShuffledOrder, WindowShuffledOrder, files_of_samples
from embodix.data.preprocessing import LoopPreprocessor, PreprocessingCollate
from embodix.data.sample_sizes import SizedDataset
from embodix.data.statistics import require_statistics
from embodix.data.streams import guard_stream, require_streamable
from embodix.policies.support import support_of
from embodix.training.interruption import ignore_in_worker
from embodix.training.loader import OrderSampler


@dataclass(frozen=True)
class DataChoices:
    """The data groups of a config.

    Attributes:
        mixture: the members, or None for one data set.
        reads: ``upstream``, or ``columns`` for action chunks read from their own column.
        preprocessing: ``main`` in the training loop as upstream, or ``workers`` where the samples are read.
        sampling: ``upstream``, or ``file_window`` for a shuffle among a few files at a time.
        window: files of that window.
        statistics: ``recorded`` with the data set, or ``exact``, of all its frames.
    """

    mixture: MixtureSpec | None = None
    reads: str = "upstream"
    preprocessing: str = "main"
    sampling: str = "upstream"
    window: int = 1
    statistics: str = "recorded"

    @property
    def preprocesses_in_loader(self) -> bool:
        """A mixture must: its samples have no common form before they are preprocessed."""
        return self.preprocessing == "workers" or self.mixture is not None

    @property
    def orders_samples(self) -> bool:
        """Whether the order is embodix's own rather than the shuffle of upstream's loader."""
        return self.sampling == "file_window" or self.mixture is not None


def read_choices(config: Mapping[str, Any]) -> DataChoices:
    """The data groups of a resolved config.

    Raises:
        ValueError: an unknown choice, a window without a file, or a mixture that is not sound.
    """
    names = {"reads": ("upstream", "columns"), "preprocessing": ("main", "workers")}
    names["sampling"] = ("upstream", "file_window")
    chosen = {group: str(config[group]["name"]) for group in names}
    for group, known in names.items():
        if chosen[group] not in known:
            raise ValueError(f"{group} is one of {', '.join(known)}; got {chosen[group]!r}.")
    window = int((config["sampling"].get("options") or {}).get("window", 1))
    if window < 1:
        raise ValueError(f"sampling.options.window counts files, 1 at least; got {window}.")
    mixture = decode_mixture(config["dataset"]) if is_mixture(config["dataset"]) else None
    statistics = statistics_choice(config["dataset"])
    return DataChoices(mixture=mixture, window=window, statistics=statistics, **chosen)


class RunData:
    """The data of one run.

    Attributes:
        choices: what the config asks for.
        dataset: what the loop reads, once it is built.
        announces: print a mixture's table when the run starts.
        collate: the loader's collate function, once the processors are built; None for upstream's.
        sampler: the loader's sampler, once it is adapted; None for upstream's.
        shortened: tasks whose text the policy's prompts can't hold, once they are counted.
    """

    def __init__(self, choices: DataChoices) -> None:
        self.choices = choices
        self.dataset: Any = None
        self.announces = True
        self.collate: PreprocessingCollate | None = None
        self.sampler: OrderSampler | None = None
        self._first_frames: dict[int, int] | None = None
        self.shortened: list[ShortenedTask] = []
        self._call: ProcessorCall | None = None
        self._host_preprocessors: Callable[[], list[Any]] = list
        self._saved: list[ProcessorPair] = []

    def build_dataset(self, host_cfg: TrainPipelineConfig, upstream: Callable[[TrainPipelineConfig], Any]) -> Any:
        """The data set of upstream's loop (stands in for ``make_dataset``).

        Raises:
            ValueError: an order of samples for a streamed data set, or a mixture that does not fit the policy.
        """
        streamed = host_cfg.dataset.streaming
        if streamed and self.choices.orders_samples:
            raise ValueError("sampling=file_window reads samples by index; set dataset.streaming=false.")
        build = self._with_exact_statistics(upstream) if self.choices.statistics == "exact" else upstream
        if self.choices.mixture is None:
            self.dataset = build(host_cfg)
            datasets = [self.dataset]
        else:
            self.dataset = build_mixture(self.choices.mixture, host_cfg, build)
            datasets = [member.dataset for member in self.dataset.members]
        if streamed:
            guard_stream(self.dataset)
        if self.choices.reads == "columns" and not streamed:  # a streamed sample is read with its neighbours at hand
            for dataset in datasets:
                read_columns(dataset)
        return self.dataset

    def _with_exact_statistics(self, upstream: BuildDataset) -> BuildDataset:
        """Upstream's factory, whose data sets have statistics of all their frames."""

        def build(host_cfg: TrainPipelineConfig) -> Any:
            dataset = upstream(host_cfg)
            join = getattr(dataset.meta, "embodix_join", {})
            dataset.meta.stats = exact_statistics_of(
                Path(dataset.root), host_cfg.dataset.episodes, join, dataset.meta.stats
            )
            return dataset

        return build

    def build_processors(
        self,
        upstream: Callable[..., ProcessorPair],
        policy_cfg: PreTrainedConfig,
        pretrained_path: str | None,
        options: Mapping[str, Any],
    ) -> ProcessorPair:
        """The loop's processors (stands in for ``make_pre_post_processors``); the loader's are made beside them."""
        call = ProcessorCall(upstream, policy_cfg, pretrained_path, options)
        device = torch.device(policy_cfg.device or "cpu")
        if not isinstance(self.dataset, MixtureDataset):
            pre, post = call.build()
            require_statistics((pre, post), *_named(self.dataset, options))
            self._host_preprocessors = lambda: [call.build(device="cpu")[0]]
            if self.choices.preprocesses_in_loader:
                self.collate = PreprocessingCollate([call.build(device="cpu")[0]])
            return LoopPreprocessor(pre, device), post
        members = self.dataset.members
        own = [call.build(member, device="cpu")[0] for member in members]
        self.collate = PreprocessingCollate(own, support_of(policy_cfg.type).merger(policy_cfg, members, own))
        self._host_preprocessors = lambda: own
        self._call, self._saved = call, [call.build(member) for member in members]
        for member, pair in zip(members, self._saved, strict=True):
            require_statistics(pair, f"{member.name} of the mixture", member.slots.values())
        evaluated = self.dataset.spec.evaluated_index
        pre, post = self._saved[evaluated]
        return LoopPreprocessor(pre, device), MemberPostprocessor(post, members[evaluated].action_dim)

    def adapt_loader(self, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
        """Upstream's loader with the run's order and collate function."""
        order = self.order(seed)
        if order is None:
            if self.collate is not None:
                loader.collate_fn = self.collate
            loader.worker_init_fn = ignore_in_worker
            return loader
        self.sampler = OrderSampler(order)
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self.sampler,
            num_workers=loader.num_workers,
            collate_fn=self.collate,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=ignore_in_worker,
        )

    def order(self, seed: int) -> SampleOrder | None:
        """The order of the samples, None for the shuffle of upstream's loader."""
        if not self.choices.orders_samples:
            return None
        if isinstance(self.dataset, MixtureDataset):
            walks = [self._walk(member.dataset, seed + k) for k, member in enumerate(self.dataset.members)]
            return self.dataset.order(seed, walks)
        return self._walk(self.dataset, seed)

    def first_frames(self) -> dict[int, int]:
        """Episode -> the number of its first frame in the data set; empty for a mixture, which has several of each."""
        if self._first_frames is None:
            episodes = getattr(self.dataset.meta, "episodes", None)
            numbers = (
                () if episodes is None else zip(episodes["episode_index"], episodes["dataset_from_index"], strict=True)
            )
            self._first_frames = {int(episode): int(first) for episode, first in numbers}
        return self._first_frames

    def sized_datasets(self) -> list[SizedDataset]:
        """The data sets that the loop reads, one after the other, for measuring their samples."""
        preprocessors = self._host_preprocessors()
        if not isinstance(self.dataset, MixtureDataset):
            return [SizedDataset(self.dataset, preprocessors[0])]
        members = zip(self.dataset.members, preprocessors, strict=True)
        return [SizedDataset(member.dataset, own, tuple(member.cameras.values())) for member, own in members]

    def _walk(self, dataset: Any, seed: int) -> SampleOrder:
        if self.choices.sampling == "file_window":
            return WindowShuffledOrder(files_of_samples(dataset), self.choices.window, seed)
        return ShuffledOrder(len(dataset), seed)

    def count_shortened(self, policy_type: str) -> None:
        """Find the tasks whose text the policy's prompts can't hold, and say so; a streamed data set is not looked at.

        Raises:
            ValueError: prompts that can't hold the state either.
        """
        support = support_of(policy_type)
        if not support.offers("shortened_tasks") or not isinstance(self.dataset, MixtureDataset | LeRobotDataset):
            return
        self.shortened = [task for part in self.sized_datasets() for task in support.shortened_tasks(part)]
        for task in self.shortened:
            logging.warning(task.sentence)

    def save_embodiments(self, model_dir: Path) -> None:
        """Add each member's processors and config to a checkpoint's ``pretrained_model`` folder."""
        if self._call is not None:
            configs = [member_config(self._call.policy_cfg, member) for member in self.dataset.members]
            names = [member.name for member in self.dataset.members]
            save_embodiments(model_dir, names, configs, self._saved)

    def announce(self, baseline: bool) -> None:
        """Print a mixture: shares, sizes and which camera fills which slot; say what its baseline computes."""
        if not self.announces or not isinstance(self.dataset, MixtureDataset):
            return
        from rich.console import Console

        Console().print(camera_table(self.dataset.members, self._quotas()))
        if baseline:
            logging.info(
                "Upstream can't leave absent cameras and padded action dimensions of a mixture out: the baseline "
                "computes padded rows as upstream does, with both masked (packing=none, exact)."
            )

    def describe(self) -> dict[str, Any]:
        """The choices and the camera map, for the manifest."""
        described: dict[str, Any] = {
            "reads": self.choices.reads,
            "preprocessing": "workers" if self.choices.preprocesses_in_loader else "main",
            "sampling": self.choices.sampling,
            "statistics": self.choices.statistics,
        }
        if self.shortened:
            described["shortened_tasks"] = [asdict(task) for task in self.shortened]
        if isinstance(self.dataset, MixtureDataset):
            quotas = self._quotas()
            members = zip(self.dataset.members, quotas, strict=True)
            described["shares"] = {member.name: round(quota / sum(quotas), 6) for member, quota in members}
            described["cameras"] = describe_cameras(self.dataset.members)
        return described

    def _quotas(self) -> list[int]:
        return self.dataset.order(seed=0).quotas  # shares do not depend on the seed


def _named(dataset: Any, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A data set for messages, and its cameras as the policy calls them."""
    overrides = options.get("preprocessor_overrides") or {}
    renamed = (overrides.get("rename_observations_processor") or {}).get("rename_map") or {}
    return f"the data set {dataset.meta.root}", [renamed.get(key, key) for key in dataset.meta.camera_keys]


def require_trainable_dataset(host_cfg: TrainPipelineConfig, dataset_node: Mapping[str, Any]) -> None:
    """Check what can be checked without loading data; a dataset only on the hub is left to upstream.

    Args:
        host_cfg: upstream's config.
        dataset_node: the config's ``dataset``, which may ask for a mixture.

    Raises:
        ValueError: no dataset at an explicit root, no task strings, damaged metadata, episodes that it does not have,
            cameras that the policy and the dataset name differently (both lists are printed), or a stream that upstream
            would not read whole, or not joined.
    """
    if is_mixture(dataset_node):
        members = decode_mixture(dataset_node)
        require_local_members(members)
        for member in members.members:
            if member.root is not None:
                require_readable_metadata(Path(member.root), member.episodes)
        return
    if host_cfg.dataset.streaming:
        require_streamable(host_cfg, decode_join(f"dataset.{JOIN}", dataset_node.get(JOIN)))
    root = local_folder(vars(host_cfg.dataset))
    if root is None:
        return
    info_path = root / "meta" / "info.json"
    if not info_path.is_file():
        if host_cfg.dataset.root is None:
            return
        raise ValueError(
            f"No LeRobotDataset at dataset.root={root} (meta/info.json is missing). "
            "Record one with `lerobot data <source>`, or give the folder of an existing dataset."
        )
    if not (root / "meta" / "tasks.parquet").is_file():
        raise ValueError(
            f"The dataset at {root} has no task strings (meta/tasks.parquet is missing), which a language-conditioned "
            "policy needs. Re-record with a `task` in every frame, or convert it with upstream's dataset tools."
        )
    tables = require_readable_metadata(root, host_cfg.dataset.episodes)
    _require_known_cameras(host_cfg, tables.features)


def _require_known_cameras(host_cfg: TrainPipelineConfig, features: dict[str, Any]) -> None:
    policy = host_cfg.policy
    expected = {key for key in (policy.input_features or {}) if key.startswith(OBS_IMAGES)} if policy else set()
    present = {key for key, feature in features.items() if feature["dtype"] in ("image", "video")}
    present = {host_cfg.rename_map.get(key, key) for key in present}
    if not expected or present <= expected:
        return
    raise ValueError(
        f"Camera {', '.join(sorted(present - expected))} of the dataset is in no slot of the policy. "
        f"Policy slots: {', '.join(sorted(expected))}. Dataset cameras: {', '.join(sorted(present))}. "
        "Rename with +rename_map={<dataset key>: <policy key>}, or train with policy.input_features={}."
    )
