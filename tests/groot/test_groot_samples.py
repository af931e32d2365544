# SPDX-License-Identifier: Apache-2.0
"""Each sample of a GR00T-N1.5 batch has its own instruction and its own cameras."""

from __future__ import annotations

import pytest
import torch

from embodix.patching import patched
from embodix_groot.architecture import IMAGE_TOKEN, SPECIAL_TOKENS

from .groot_files import BRIGHTNESS, INSTRUCTIONS, policy_config, processed, raw_batch, valid_ids

TASKS = list(INSTRUCTIONS)
IMAGE_ID = SPECIAL_TOKENS.index(IMAGE_TOKEN)


def colours(batch):
    """The colour of each image, as the raw batch has it."""
    return [round(float(image.mean()) / 2 + 0.5, 1) for image in batch["eagle_pixel_values"]]


def text_of(config, ids):
    from lerobot.policies.groot.processor_groot import _build_eagle_processor

    with patched({"lerobot_groot_runs": {}}):
        return _build_eagle_processor(config.tokenizer_assets_repo).tokenizer.decode(ids)


def test_each_sample_has_its_own_instruction():
    config = policy_config()
    batch = processed(config, TASKS, language="per_sample")
    alone = [processed(config, [task], language="per_sample") for task in TASKS]
    for sample, (single, task) in enumerate(zip(alone, TASKS, strict=True)):
        assert valid_ids(batch, sample) == valid_ids(single, 0)
        text = text_of(config, valid_ids(batch, sample))
        assert task in text
        assert not any(other in text for other in TASKS if other != task)
    assert batch["eagle_attention_mask"][0, 0] == 0, "the shorter prompt is padded on the left"
    assert batch["language"] == TASKS


@pytest.mark.parametrize("language", ["upstream", None])
def test_upstreams_language_is_the_first_samples(language):
    """Mutation: with the old behaviour, asked for or unpatched, the second task is nowhere."""
    batch = processed(policy_config(), TASKS, language=language)
    assert torch.equal(batch["eagle_input_ids"][0], batch["eagle_input_ids"][1])
    assert batch["eagle_attention_mask"].all()
    assert batch["language"] == TASKS[0]


@pytest.mark.parametrize("task", TASKS)
def test_one_sample_is_what_upstream_makes_of_it(task):
    config = policy_config()
    ours, upstream = (processed(config, [task], language=language) for language in ("per_sample", None))
    tensors = [key for key, value in upstream.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 9
    for key in tensors:
        assert torch.equal(ours[key], upstream[key]), key


def test_no_task_is_upstreams_default_instruction():
    batch = processed(policy_config(), ["", TASKS[0]], language="per_sample")
    assert batch["language"] == ["Perform the task.", TASKS[0]]


def test_as_many_tasks_as_samples():
    from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors

    raw = {**raw_batch(TASKS), "task": [TASKS[0]]}
    with patched({"lerobot_groot_runs": {}, "lerobot_groot_samples": {}}):
        preprocess, _ = make_groot_pre_post_processors(policy_config(), {})
        with pytest.raises(ValueError, match="got 1 tasks for 2 samples"):
            preprocess(raw)


def test_an_unknown_language_is_refused():
    with (
        pytest.raises(ValueError, match="per_sample, upstream; got 'none'"),
        patched({"lerobot_groot_samples": {"language": "none"}}),
    ):
        pass


def test_an_absent_camera_has_no_image_and_no_tokens():
    config = policy_config()
    batch = processed(config, TASKS, [[False, True], [False, False]], language="per_sample")
    assert colours(batch) == [0.2, 0.2, 0.8]  # front of both, gripper of the second
    assert [(batch["eagle_input_ids"][i] == IMAGE_ID).sum().item() for i in (0, 1)] == [4, 8]
    assert "<image 2>" not in text_of(config, valid_ids(batch, 0))
    assert batch["eagle_image_sizes"].shape[0] == 3
    assert "video_is_pad" not in batch
    assert torch.equal(batch["camera_is_pad"], torch.tensor([[False, True], [False, False]]))


@pytest.mark.parametrize("language", ["upstream", "per_sample"])
def test_without_the_mark_every_camera_is_encoded(language):
    """Twin: the mark alone takes the image out."""
    assert colours(processed(policy_config(), TASKS, language=language)) == [0.2, 0.8, 0.2, 0.8]
    marked = processed(policy_config(), TASKS, [[True, False], [False, False]], language=language)
    assert colours(marked) == [0.8, 0.2, 0.8]


def test_without_the_patch_an_absent_camera_is_encoded():
    assert colours(processed(policy_config(), TASKS, [[True, False]] * 2, language=None)) == [0.2, 0.8, 0.2, 0.8]


def test_columns_are_the_batchs_cameras_and_not_the_alphabets():
    """Upstream stacks cameras by name; a dataset that records the gripper first has its column first."""
    assert sorted(BRIGHTNESS) == ["front", "gripper"]
    batch = processed(policy_config(), TASKS, [[True, False]] * 2, language="per_sample", flip=True)
    assert colours(batch) == [0.2, 0.2]


@pytest.mark.parametrize(
    ("camera_is_pad", "message"),
    [
        ([[True, True], [False, True]], r"all cameras absent for samples \[0\]"),
        ([[True], [False]], r"one column a camera; got shape \(2, 1\) for 2 cameras"),
    ],
)
def test_marks_that_do_not_fit_are_refused(camera_is_pad, message):
    with pytest.raises(ValueError, match=message):
        processed(policy_config(), TASKS, camera_is_pad, language="per_sample")


def test_the_loss_sees_the_own_instruction():
    """Through upstream's own forward: with the second sample's task as the first's, the loss is another."""
    from embodix_groot.testing import small_groot

    from .groot_files import ARCHITECTURE

    policy = small_groot(ARCHITECTURE)
    losses = []
    for language in ("per_sample", "upstream"):
        batch = processed(policy_config(), TASKS, language=language)
        torch.manual_seed(0)
        losses.append(policy(batch)[0].item())
    assert losses[0] != losses[1]


def preprocess_changed(**changes):
    from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors

    with patched({"lerobot_groot_runs": {}, "lerobot_groot_samples": {}}):
        preprocess, _ = make_groot_pre_post_processors(policy_config(), {})
        return preprocess({**raw_batch(TASKS), **changes})


@pytest.mark.parametrize(("key", "field"), [("observation.state", "max_state_dim"), ("action", "max_action_dim")])
def test_nothing_of_state_and_action_is_cut_off(key, field):
    limit = getattr(policy_config(), field)
    raw = raw_batch(TASKS)[key]
    wide = raw[..., :1].expand(*raw.shape[:-1], limit + 1)
    with pytest.raises(ValueError, match=f"{key} has {limit + 1} dimensions and policy.{field} is {limit}"):
        preprocess_changed(**{key: wide})
    assert preprocess_changed(**{key: wide[..., :limit]}) is not None


def test_a_state_that_is_not_finite_is_refused():
    state = raw_batch(TASKS)["observation.state"].clone()
    state[1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"observation.state\[0\] of sample 1 of the batch is nan"):
        preprocess_changed(**{"observation.state": state})
