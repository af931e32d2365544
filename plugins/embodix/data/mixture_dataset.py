# SPDX-License-Identifier: Apache-2.0
"""Several LeRobotDatasets as one: each keeps its own statistics, cameras, dimensions and control rate."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lerobot.configs.default import DatasetConfig
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.datasets.feature_utils import dataset_to_policy_features
from lerobot.processor.rename_processor import rename_stats
from lerobot.utils.constants import ACTION, OBS_STATE
from torch.utils.data import Dataset

from embodix.data.mixture_spec import CameraMap, MemberSpec, MixtureSpec, map_cameras, policy_slots
from embodix.data.order import MixtureOrder, SampleOrder
from embodix.data.preprocessing import CAMERA_PAD_KEY, EMBODIMENT_KEY
from embodix.policies.support import require_offered

if TYPE_CHECKING:
    from rich.table import Table

BuildDataset = Callable[[TrainPipelineConfig], Any]


@dataclass(frozen=True)
class Member:
    """A dataset in the mixture.

    Attributes:
        spec: as the config asks for it.
        dataset: upstream's ``LeRobotDataset``; cameras without a slot are taken out of what it reads.
        cameras: dataset camera -> policy slot, or None.
    """

    spec: MemberSpec
    dataset: Any
    cameras: CameraMap

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def slots(self) -> dict[str, str]:
        """The cameras that are read, with their slots."""
        return {camera: slot for camera, slot in self.cameras.items() if slot is not None}

    @property
    def camera_columns(self) -> list[int]:
        """Columns of the dataset's own ``camera_is_pad`` that belong to cameras which are read."""
        return [column for column, slot in enumerate(self.cameras.values()) if slot is not None]

    @property
    def features(self) -> dict[str, PolicyFeature]:
        """What the policy sees of this member: cameras under their slots, its own state and action sizes."""
        own = dataset_to_policy_features(self.dataset.meta.features)
        return {self.slots.get(key, key): feature for key, feature in own.items()}

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Its normalisation statistics, cameras under their slots."""
        return rename_stats(self.dataset.meta.stats, self.slots)

    @property
    def action_dim(self) -> int:
        return int(self.dataset.meta.features[ACTION]["shape"][0])

    @property
    def state_dim(self) -> int:
        return int(self.dataset.meta.features[OBS_STATE]["shape"][0])


class MixtureMeta:
    """What upstream's factories read of a dataset: the features a policy for all members needs, and statistics.

    Every slot that some member fills is a camera, state and action are as wide as the widest member's. The statistics
    are those of one member (``evaluate_as``): they normalise nothing in training, where each member has its own.
    """

    def __init__(self, members: Sequence[Member], evaluated: Member) -> None:
        self.features: dict[str, dict[str, Any]] = {}
        for member in members:
            own = member.dataset.meta.features
            for camera, slot in member.slots.items():
                self.features.setdefault(slot, dict(own[camera]))
        for key, width in (
            (OBS_STATE, max(m.state_dim for m in members)),
            (ACTION, max(m.action_dim for m in members)),
        ):
            self.features[key] = {"dtype": "float32", "shape": (width,), "names": None}
        self.stats = evaluated.stats
        self.fps = evaluated.dataset.meta.fps

    @property
    def camera_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature["dtype"] in ("image", "video")]


class MixtureDataset(Dataset[dict[str, Any]]):
    """The members one after the other: sample i of member k has the index ``offsets[k] + i``.

    A sample is the member's own, with the member's number under ``embodiment``; samples of different members have
    different keys and shapes, so that they are collated by ``embodix.data.preprocessing`` only.
    """

    def __init__(self, members: Sequence[Member], spec: MixtureSpec) -> None:
        self.members = list(members)
        self.spec = spec
        self.lengths = [len(member.dataset) for member in members]
        self.offsets = [0, *accumulate(self.lengths)][:-1]
        self.meta = MixtureMeta(members, members[spec.evaluated_index])
        self.episodes = None

    @property
    def num_frames(self) -> int:
        return sum(self.lengths)

    @property
    def num_episodes(self) -> int:
        return sum(member.dataset.num_episodes for member in self.members)

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, local = self.locate(index)
        member = self.members[number]
        sample = member.dataset[local]
        if CAMERA_PAD_KEY in sample:
            sample[CAMERA_PAD_KEY] = sample[CAMERA_PAD_KEY][member.camera_columns]
        return {**sample, EMBODIMENT_KEY: number}

    def locate(self, index: int) -> tuple[int, int]:
        """The member an index belongs to, and the index in it.

        Raises:
            IndexError: outside the mixture.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"The mixture has {len(self)} samples; got index {index}.")
        number = bisect.bisect_right(self.offsets, index) - 1
        return number, index - self.offsets[number]

    def order(self, seed: int, orders: Sequence[SampleOrder] | None = None) -> MixtureOrder:
        """The draws of an epoch: as many as there are samples, each member in its share.

        Args:
            orders: how each member is walked through; None shuffles each.
        """
        return MixtureOrder(self.lengths, self.spec.weights, seed, orders=orders)


def build_mixture(spec: MixtureSpec, host_cfg: TrainPipelineConfig, build_dataset: BuildDataset) -> MixtureDataset:
    """Load the members through upstream's own factory and check them against the policy.

    Args:
        build_dataset: upstream's ``make_dataset``.

    Raises:
        ValueError: a policy that can't be trained on a mixture, or a member that does not fit it.
    """
    policy = host_cfg.policy
    assert policy is not None
    remedy = "Train this policy on one dataset: dataset=lerobot."
    require_offered(policy.type, "merger", "dataset=mixture trains", remedy)
    if host_cfg.rename_map:
        raise ValueError(
            f"A mixture names its cameras by dataset.members.<name>.cameras; got rename_map={host_cfg.rename_map} too."
        )
    slots = policy_slots(policy)
    members = [_load_member(member, spec, slots, host_cfg, build_dataset) for member in spec.members]
    for member in members:
        _require_fitting(member, policy)
    return MixtureDataset(members, spec)


def _load_member(
    spec: MemberSpec,
    mixture: MixtureSpec,
    slots: tuple[str, ...],
    host_cfg: TrainPipelineConfig,
    build_dataset: BuildDataset,
) -> Member:
    fields: dict[str, Any] = {"repo_id": spec.repo_id, "root": spec.root, "episodes": spec.episodes}
    fields |= {"revision": spec.revision, "image_transforms": host_cfg.dataset.image_transforms}
    fields["use_imagenet_stats"] = host_cfg.dataset.use_imagenet_stats
    if spec.video_backend is not None:
        fields["video_backend"] = spec.video_backend
    dataset = build_dataset(replace(host_cfg, dataset=DatasetConfig(**fields)))
    cameras = map_cameras(spec, tuple(dataset.meta.camera_keys), slots)
    _leave_out(dataset, [camera for camera, slot in cameras.items() if slot is None])
    return Member(spec, dataset, cameras)


def _leave_out(dataset: Any, cameras: list[str]) -> None:
    """Take cameras out of what the dataset reads, so that their images are not decoded."""
    features: dict[str, Any] = dataset.meta.info["features"]
    stored = [camera for camera in cameras if features[camera]["dtype"] == "image"]
    for camera in cameras:
        del features[camera]
    if stored:
        dataset.reader.hf_dataset = dataset.reader.hf_dataset.remove_columns(stored)


def _require_fitting(member: Member, policy: PreTrainedConfig) -> None:
    place = f"dataset.members.{member.name}"
    if member.dataset.meta.tasks is None or len(member.dataset.meta.tasks) == 0:
        raise ValueError(f"{place} has no task strings, which a language-conditioned policy needs.")
    limits = {"state": (member.state_dim, "max_state_dim"), "action": (member.action_dim, "max_action_dim")}
    for what, (width, limit) in limits.items():
        allowed: int = getattr(policy, limit)
        if width > allowed:
            raise ValueError(
                f"{place} has {what}s of {width} dimensions; policy.{limit} is {allowed}. Set policy.{limit}={width} "
                "for a policy trained from scratch; a pretrained one can't take this member."
            )


def image_sizes(members: Sequence[Member]) -> set[tuple[int, ...]]:
    """The image sizes (channels, height, width) of all cameras that are read."""
    features = [feature for member in members for feature in member.features.values()]
    return {tuple(feature.shape) for feature in features if feature.type is FeatureType.VISUAL}


def describe_cameras(members: Sequence[Member]) -> list[dict[str, Any]]:
    """One entry a camera and one for each slot a member lacks, for tables and the manifest."""
    all_slots = list(dict.fromkeys(slot for member in members for slot in member.slots.values()))
    rows: list[dict[str, Any]] = []
    for member in members:
        rows += [{"member": member.name, "camera": camera, "slot": slot} for camera, slot in member.cameras.items()]
        filled = set(member.slots.values())
        rows += [{"member": member.name, "camera": None, "slot": slot} for slot in all_slots if slot not in filled]
    return rows


def camera_table(members: Sequence[Member], quotas: Sequence[int]) -> Table:
    """A rich table: members with their share and sizes, dataset camera -> slot, or absent."""
    from rich.table import Table

    table = Table(title="Mixture", title_justify="left")
    for column in ("member", "share", "frames", "fps", "state", "action", "dataset camera", "policy slot"):
        table.add_column(column, justify="right" if column in ("share", "frames", "fps", "state", "action") else "left")
    rows = describe_cameras(members)
    for member, quota in zip(members, quotas, strict=True):
        meta = member.dataset.meta
        sizes = [f"{quota / sum(quotas):.1%}", str(len(member.dataset)), str(meta.fps)]
        leading = [member.name, *sizes, str(member.state_dim), str(member.action_dim)]
        for row in (row for row in rows if row["member"] == member.name):
            camera, slot = _short(row["camera"]), _short(row["slot"])
            table.add_row(*leading, camera or "absent: 0 tokens", slot or "left out: not read")
            leading = [""] * len(leading)
        table.add_section()
    return table


def _short(camera: str | None) -> str | None:
    return camera.removeprefix("observation.images.") if camera is not None else None
