# SPDX-License-Identifier: Apache-2.0
"""A sample's loss in a batch of several embodiments is its own: that of upstream alone, whatever its neighbours hold.

Two members share packed batches: an arm (two cameras, seven action dimensions) and a pair of arms (three cameras,
fourteen dimensions, a longer prompt), preprocessed by their own processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.factory import make_dataset
from lerobot.policies.factory import make_pre_post_processors

from embodix.attention.cpu import SegmentAuto
from embodix.data.embodiments import ProcessorCall
from embodix.data.mixture_dataset import MixtureDataset, build_mixture
from embodix.data.mixture_spec import decode_mixture
from embodix.data.preprocessing import PreprocessedBatch, PreprocessingCollate
from embodix.data.tokenizer import offline_tokenizer
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix_pi05.testing import SMALL_ARCHITECTURE, small_pi05, upstream_losses
from embodix_pi05.wrapper import Pi05Wrapper

SETTINGS = {
    "packed": FastPathSettings(PaddingFreePacker(), SegmentAuto()),
    "baseline": FastPathSettings(PaddedPacker(), None, vision_tokens="upstream"),
}
TOKENS = "observation.language.tokens"
ARM, HANDS = (0, 9, 20), (24, 30, 35)  # indices in the mixture


@pytest.fixture(scope="module")
def policy() -> Any:
    architecture = {**SMALL_ARCHITECTURE, "language": {**SMALL_ARCHITECTURE["language"], "vocab_size": 1024}}
    sizes = {"max_action_dim": 16, "max_state_dim": 16, "tokenizer_max_length": 96}
    policy = small_pi05(architecture, cameras=("base", "wrist", "left_wrist"), action_dim=14, **sizes)
    policy.config.input_features["observation.state"].shape = (14,)
    return policy


@pytest.fixture(scope="module")
def mixture(policy, arm_dataset, hands_dataset) -> MixtureDataset:
    cameras = {"top": "base", "left": "left_wrist", "right": "wrist"}
    members = {
        "arm": {"repo_id": "embodix/arm", "root": str(arm_dataset), "cameras": {"front": "base", "wrist": "wrist"}},
        "hands": {"repo_id": "embodix/hands", "root": str(hands_dataset), "cameras": cameras},
    }
    host_cfg = TrainPipelineConfig(dataset=DatasetConfig(repo_id="embodix/mixture"), policy=policy.config)
    return build_mixture(decode_mixture({"members": members}), host_cfg, make_dataset)


@pytest.fixture(scope="module")
def collate(policy, mixture, demonstrations) -> PreprocessingCollate:
    with offline_tokenizer(demonstrations / "tokenizer"):
        call = ProcessorCall(make_pre_post_processors, policy.config, None, {"dataset_stats": mixture.meta.stats})
        own = [call.build(member, device="cpu")[0] for member in mixture.members]
    return PreprocessingCollate(own, support_of(policy.config.type).merger(policy.config, mixture.members, own))


@pytest.fixture(params=SETTINGS)
def installed(policy, request) -> Iterator[Any]:
    installation = Pi05Wrapper().install(policy, SETTINGS[request.param])
    yield policy
    installation.uninstall()


def losses_of(policy: Any, batch: PreprocessedBatch) -> torch.Tensor:
    """One loss a sample; noise and time depend on the place in the batch alone."""
    torch.manual_seed(0)
    with torch.no_grad():
        return policy(batch, reduction="none")[0]


def batch_of(mixture, collate, *indices: int) -> PreprocessedBatch:
    return collate([mixture[index] for index in indices])


def poisoned(batch: PreprocessedBatch, kept: int) -> PreprocessedBatch:
    """Every other sample's images and actions become NaN, its prompt other words."""
    changed = PreprocessedBatch({k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()})
    others = torch.arange(len(batch["action"])) != kept
    changed["action"][others] = float("nan")
    for key in batch:
        if key.startswith("observation.images."):
            changed[key][others] = float("nan")
    changed[TOKENS][others] = changed[TOKENS][others].flip(1)
    return changed


@pytest.mark.parametrize("first", [ARM[0], HANDS[0]], ids=["arm", "hands"])
def test_a_loss_depends_on_no_neighbour(installed, mixture, collate, first):
    neighbours = [(HANDS[1], HANDS[2]), (ARM[1], ARM[2]), (ARM[1], HANDS[2]), (HANDS[1], ARM[2])]
    losses = [losses_of(installed, batch_of(mixture, collate, first, *others)) for others in neighbours]
    assert len({loss[1:].tolist().__repr__() for loss in losses}) == len(neighbours)
    for loss in losses[1:]:
        assert torch.equal(loss[0], losses[0][0])


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_poisoned_neighbours_change_nothing(installed, mixture, collate, kept):
    batch = batch_of(mixture, collate, ARM[0], HANDS[0], HANDS[1], ARM[1])
    clean, changed = losses_of(installed, batch), losses_of(installed, poisoned(batch, kept))
    assert torch.equal(changed[kept], clean[kept])
    others = [row for row in range(4) if row != kept]
    assert torch.isnan(changed[others]).all()


def test_the_loss_is_upstreams_on_the_sample_alone(policy, installed, mixture, collate):
    """Upstream's own model on each sample by itself, its absent cameras missing, over its own action dimensions."""
    indices = (ARM[0], HANDS[0], ARM[1])
    found = losses_of(installed, batch_of(mixture, collate, *indices))
    torch.manual_seed(0)
    noise = policy.model.sample_noise((3, policy.config.chunk_size, 16), torch.device("cpu"))
    time = policy.model.sample_time(3, torch.device("cpu"))
    for row, index in enumerate(indices):
        alone = batch_of(mixture, collate, index)
        dims = int(alone.pop("action_dims")[0])
        assert dims == (7 if index < 24 else 14)
        with torch.no_grad():
            losses = upstream_losses(policy, alone, noise[row : row + 1], time[row : row + 1])
        assert found[row].item() == pytest.approx(losses[..., :dims].mean().item(), rel=1e-6)


def test_padded_action_dimensions_are_no_loss(installed, mixture, collate):
    """Without the count of dimensions the arm's loss would be a mean over fourteen."""
    batch = batch_of(mixture, collate, ARM[0], HANDS[0])
    kept = losses_of(installed, batch)
    del batch["action_dims"]
    assert losses_of(installed, batch)[0] != kept[0]


def test_absent_cameras_are_not_seen(installed, mixture, collate):
    """Without the mark, the blank image of the arm's missing camera would change its loss."""
    batch = batch_of(mixture, collate, ARM[0], HANDS[0])
    kept = losses_of(installed, batch)
    batch["observation.images.left_wrist"][0] = 0.7
    assert torch.equal(losses_of(installed, batch)[0], kept[0])
    del batch["camera_is_pad"]
    assert not torch.equal(losses_of(installed, batch)[0], kept[0])
