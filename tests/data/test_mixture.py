# SPDX-License-Identifier: Apache-2.0
"""A mixture's samples are preprocessed as in a run on their member alone, whatever they lie beside in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.factory import make_dataset
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from torch.utils.data import default_collate

from embodix.data.embodiments import ProcessorCall
from embodix.data.mixture_dataset import build_mixture, camera_table, describe_cameras
from embodix.data.mixture_spec import decode_mixture
from embodix.data.preprocessing import PreprocessedBatch, PreprocessingCollate
from embodix.data.tokenizer import offline_tokenizer
from embodix.policies.support import support_of

IMAGES = "observation.images."
TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"


def pi05_config(**changes: Any) -> PI05Config:
    sizes = {"chunk_size": 6, "n_action_steps": 3, "max_action_dim": 16, "max_state_dim": 16}
    return PI05Config(device="cpu", tokenizer_max_length=96, image_resolution=(28, 28), **{**sizes, **changes})


def host_config(policy: PI05Config, **dataset: Any) -> TrainPipelineConfig:
    return TrainPipelineConfig(dataset=DatasetConfig(**{"repo_id": "embodix/mixture", **dataset}), policy=policy)


@pytest.fixture(scope="module")
def members(arm_dataset, hands_dataset):
    return {
        "arm": {"repo_id": "embodix/arm", "root": str(arm_dataset), "cameras": {"front": "base", "wrist": "wrist"}},
        "hands": {
            "repo_id": "embodix/hands",
            "root": str(hands_dataset),
            "cameras": {"top": "base", "left": "left_wrist", "right": "wrist"},
        },
    }


def mixture_of(members, policy=None, **node):
    policy = policy or pi05_config()
    return build_mixture(decode_mixture({"members": members, **node}), host_config(policy), make_dataset)


@pytest.fixture(scope="module")
def mixture(members):
    return mixture_of(members)


def with_features(policy: PI05Config, mixture) -> PI05Config:
    """The policy's config as upstream's make_policy leaves it."""
    from lerobot.datasets.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(mixture.meta.features)
    policy.output_features = {"action": features.pop("action")}
    policy.input_features = features
    return policy


@pytest.fixture(scope="module")
def collate(mixture, tokenizer_folder):
    policy = with_features(pi05_config(), mixture)
    with offline_tokenizer(tokenizer_folder):
        call = ProcessorCall(make_pre_post_processors, policy, None, {"dataset_stats": mixture.meta.stats})
        own = [call.build(member, device="cpu")[0] for member in mixture.members]
        return PreprocessingCollate(own, support_of(policy.type).merger(policy, mixture.members, own))


def alone(members, name, tokenizer_folder, local):
    """A batch of one sample, as upstream makes it in a run on this member alone."""
    policy = pi05_config()
    dataset = make_dataset(host_config(policy, repo_id=members[name]["repo_id"], root=members[name]["root"]))
    features = dataset.meta.features
    from lerobot.datasets.feature_utils import dataset_to_policy_features

    policy.input_features = dataset_to_policy_features(features)
    policy.output_features = {"action": policy.input_features.pop("action")}
    with offline_tokenizer(tokenizer_folder):
        preprocessor, _ = make_pre_post_processors(policy, dataset_stats=dataset.meta.stats)
        return preprocessor(default_collate([dataset[local]]))


def test_indices_and_samples(mixture):
    assert mixture.offsets == [0, 24] and len(mixture) == mixture.num_frames == 36 and mixture.num_episodes == 3
    sample = mixture[30]
    own = mixture.members[1].dataset[6]
    assert sample.pop("embodiment") == 1
    assert sample.keys() == own.keys() and torch.equal(sample["action"], own["action"])
    with pytest.raises(IndexError, match="36 samples"):
        mixture[36]


def test_order_follows_the_weights(members):
    weighted = {name: {**node, "weight": weight} for (name, node), weight in zip(members.items(), (1, 3), strict=True)}
    order = mixture_of(weighted).order(seed=0)
    assert order.quotas == [9, 27] and order.num_draws == 36
    assert mixture_of(members).order(seed=0).quotas == [24, 12]


def test_upstreams_policy_takes_the_mixtures_features(mixture):
    features = mixture.meta.features
    assert set(mixture.meta.camera_keys) == {IMAGES + name for name in ("base", "wrist", "left_wrist")}
    assert features["observation.state"]["shape"] == (14,) and features["action"]["shape"] == (14,)


@pytest.mark.parametrize(("name", "index", "local"), [("arm", 5, 5), ("hands", 31, 7)])
def test_a_sample_is_what_it_is_in_a_run_on_its_member_alone(
    mixture, collate, members, tokenizer_folder, name, index, local
):
    batch = collate([mixture[0], mixture[25], mixture[index], mixture[10], mixture[29]])
    assert isinstance(batch, PreprocessedBatch)
    expected = alone(members, name, tokenizer_folder, local)
    number = list(members).index(name)
    width = mixture.members[number].action_dim
    assert int(batch["action_dims"][2]) == width
    for key in (TOKENS, MASK, "action_is_pad", "index", "episode_index", "task_index"):
        assert torch.equal(batch[key][2], expected[key][0]), key
    assert batch["task"][2] == expected["task"][0]
    for key in ("action", "observation.state"):
        assert torch.equal(batch[key][2, ..., :width], expected[key][0]), key
        assert not batch[key][2, ..., width:].any()
    slots = {camera.removeprefix(IMAGES): slot for camera, slot in mixture.members[number].slots.items()}
    for camera, slot in slots.items():
        assert torch.equal(batch[slot][2], expected[IMAGES + camera][0]), camera


def test_absent_cameras_are_marked_and_blank(mixture, collate):
    batch = collate([mixture[24], mixture[0], mixture[35]])
    slots = [slot for slot in batch if slot.startswith(IMAGES)]
    assert slots == [IMAGES + name for name in ("base", "wrist", "left_wrist")]
    assert batch["camera_is_pad"].tolist() == [[False] * 3, [False, False, True], [False] * 3]
    assert not batch[IMAGES + "left_wrist"][1].any() and batch[IMAGES + "left_wrist"][0].any()


def test_a_batch_of_one_member_has_no_slot_that_it_lacks(mixture, collate):
    batch = collate([mixture[0], mixture[1]])
    assert IMAGES + "left_wrist" not in batch and batch["camera_is_pad"].shape == (2, 2)
    assert batch["action"].shape == (2, 6, 14) and batch["action_dims"].tolist() == [7, 7]


def test_statistics_are_each_members_own(mixture, collate):
    """Both have seven first dimensions: with the other's statistics they would come out differently."""
    batch = collate([mixture[3], mixture[27]])
    for row, (own, other) in enumerate([(0, 1), (1, 0)]):
        raw = mixture[3 if row == 0 else 27]["action"][:, :7]
        found = batch["action"][row, :, :7]
        assert torch.allclose(found, by_quantiles(mixture, own, raw), atol=1e-5)
        assert not torch.allclose(found, by_quantiles(mixture, other, raw), atol=1e-2)


def by_quantiles(mixture, member, raw):
    stats = mixture.members[member].dataset.meta.stats["action"]
    low, high = (torch.as_tensor(stats[name][:7], dtype=torch.float32) for name in ("q01", "q99"))
    return 2 * (raw - low) / (high - low) - 1


def test_images_of_several_sizes_are_resized_as_upstream_does(members, other_size_dataset, tokenizer_folder):
    from lerobot.policies.pi05.modeling_pi05 import resize_with_pad_torch

    node = {"repo_id": "embodix/large", "root": str(other_size_dataset), "cameras": {"front": "base"}}
    mixture = mixture_of({"arm": members["arm"], "large": node})
    policy = with_features(pi05_config(), mixture)
    with offline_tokenizer(tokenizer_folder):
        call = ProcessorCall(make_pre_post_processors, policy, None, {"dataset_stats": mixture.meta.stats})
        own = [call.build(member, device="cpu")[0] for member in mixture.members]
        batch = PreprocessingCollate(own, support_of(policy.type).merger(policy, mixture.members, own))(
            [mixture[0], mixture[24]]
        )
    raw = mixture[24][IMAGES + "front"]
    assert raw.shape == (3, 40, 40)
    expected = resize_with_pad_torch(raw[None].permute(0, 2, 3, 1), 28, 28).permute(0, 3, 1, 2)
    assert torch.equal(batch[IMAGES + "base"][1], expected[0])
    assert torch.equal(batch[IMAGES + "base"][0], mixture[0][IMAGES + "front"])


def test_a_camera_that_is_left_out_is_not_decoded(members, monkeypatch):
    from PIL import PngImagePlugin

    decoded = []
    load_image = PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda image: decoded.append(image) or load_image(image))
    arm = {**members["arm"], "cameras": {"front": "base", "wrist": None}}
    mixture = mixture_of({"arm": arm}, policy=pi05_config(chunk_size=1, n_action_steps=1))
    sample = mixture[0]
    assert IMAGES + "wrist" not in sample and IMAGES + "front" in sample
    images_read = {id(image) for image in decoded}
    decoded.clear()
    mixture_of({"arm": members["arm"]}, policy=pi05_config(chunk_size=1, n_action_steps=1))[0]
    assert 2 * len(images_read) == len({id(image) for image in decoded})


def test_the_camera_map_is_told(mixture):
    rows = describe_cameras(mixture.members)
    assert {"member": "arm", "camera": None, "slot": IMAGES + "left_wrist"} in rows
    assert {"member": "hands", "camera": IMAGES + "right", "slot": IMAGES + "wrist"} in rows
    table = camera_table(mixture.members, mixture.order(0).quotas)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1][0] == "66.7%" and "absent: 0 tokens" in cells[6]


def test_a_members_own_marks_are_kept(marked_dataset, members, tokenizer_folder):
    """A dataset may mark absent cameras itself; its columns follow the cameras to their slots."""
    node = {"repo_id": "embodix/marked", "root": str(marked_dataset), "cameras": {"front": None, "gripper": "base"}}
    mixture = mixture_of({"arm": members["arm"], "marked": node})
    policy = with_features(pi05_config(), mixture)
    with offline_tokenizer(tokenizer_folder):
        call = ProcessorCall(make_pre_post_processors, policy, None, {"dataset_stats": mixture.meta.stats})
        own = [call.build(member, device="cpu")[0] for member in mixture.members]
        collate = PreprocessingCollate(own, support_of(policy.type).merger(policy, mixture.members, own))
    dataset = make_dataset(host_config(pi05_config(), repo_id="embodix/marked", root=str(marked_dataset)))
    marks = [bool(dataset.hf_dataset[index]["camera_is_pad"][1]) for index in range(0, len(dataset), 9)]
    assert set(marks) == {False, True}
    for place, mark in enumerate(marks):
        batch = collate([mixture[0], mixture[24 + 9 * place]])
        columns = [slot for slot in batch if slot.startswith(IMAGES)]
        assert bool(batch["camera_is_pad"][1, columns.index(IMAGES + "base")]) is mark


BAD = {
    "unknown_camera": ({"cameras": {"fornt": "base"}}, r"names observation.images.fornt; the dataset has .*front"),
    "two_on_one_slot": ({"cameras": {"front": "base", "wrist": "base"}}, r"front and .*wrist on one slot"),
    "no_camera": ({"cameras": {"front": None}}, r"leaves no camera"),
    "weight_zero": ({"weight": 0}, r"positive; dataset.members.arm.weight is 0"),
    "weight_negative": ({"weight": -1.0}, r"positive"),
    "weight_nan": ({"weight": float("nan")}, r"positive"),
    "unknown_field": ({"camera": {}}, r"no field 'camera'. Did you mean 'cameras'"),
    "no_episode": ({"episodes": []}, r"lists no episode"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_an_unsound_member_is_refused(members, change, message):
    with pytest.raises(ValueError, match=message):
        mixture_of({"arm": {**members["arm"], **change}})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"members": {}}, "at least one member"),
        ({"members": {"arm": "data/arm"}}, "is a mapping with a repo_id"),
        ({"members": {"arm": {"root": "data/arm"}}}, "needs repo_id"),
        ({"members": {"a/b": {"repo_id": "x"}}}, "letters, digits"),
        ({"members": {"a": {"repo_id": "x", "weight": 1}, "b": {"repo_id": "y"}}}, "without one: b"),
        ({"members": {"a": {"repo_id": "x"}}, "evaluate_as": "b"}, "names a member; got 'b'"),
        ({"members": {"a": {"repo_id": "x"}}, "streaming": True}, "streaming=false"),
        ({"members": {"a": {"repo_id": "x"}}, "repo_id": "y"}, "no field 'repo_id'"),
    ],
)
def test_an_unsound_mixture_is_refused(node, message):
    with pytest.raises(ValueError, match=message):
        decode_mixture(node)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_action_dim": 8}, r"members.hands has actions of 14 dimensions; policy.max_action_dim is 8"),
        ({"max_state_dim": 8}, r"members.hands has states of 14 dimensions; policy.max_state_dim is 8"),
    ],
)
def test_a_member_beyond_the_policys_limits_is_refused(members, limits, message):
    with pytest.raises(ValueError, match=message):
        mixture_of(members, policy=pi05_config(**limits))


def test_a_slot_that_a_pretrained_policy_lacks_is_refused(members):
    from lerobot.configs.types import FeatureType, PolicyFeature

    policy = pi05_config()
    policy.input_features = {IMAGES + "base": PolicyFeature(FeatureType.VISUAL, (3, 28, 28))}
    with pytest.raises(ValueError, match=r"no such slot for .*wrist -> .*wrist.*its slots are observation.images.base"):
        mixture_of(members, policy=policy)


def test_policies_that_cannot_be_mixed_are_refused(members):
    from lerobot.policies.act.configuration_act import ACTConfig

    with pytest.raises(ValueError, match=r"got policy.type=act"):
        mixture_of(members, policy=ACTConfig(device="cpu"))


def test_proportions_hold_over_draws(members):
    weighted = {
        name: {**node, "weight": weight} for (name, node), weight in zip(members.items(), (0.7, 0.3), strict=True)
    }
    mixture = mixture_of(weighted)
    order = mixture.order(seed=3)
    draws = np.concatenate([order.epoch(epoch) for epoch in range(150)])[:5000]
    assert abs((draws < 24).mean() - 0.7) < 0.02


def test_upstreams_make_policy_accepts_the_mixture(mixture):
    from embodix.patching import patched
    from embodix_pi05.testing import SMALL_ARCHITECTURE

    with patched({"lerobot_pi05_sizes": {"architecture": SMALL_ARCHITECTURE}}):
        policy = make_policy(pi05_config(), ds_meta=mixture.meta)
    assert policy.config.output_features["action"].shape == (14,)
    assert set(policy.config.image_features) == set(mixture.meta.camera_keys)
