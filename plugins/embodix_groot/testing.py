# SPDX-License-Identifier: Apache-2.0
"""Small GR00T-N1.5 policies, batches for them, and runs of upstream's and of the packed computation to compare.

Shape suffixes: B samples, L language-model tokens (left-padded), I images, T action steps, A action dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from embodix.patching import patched
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import TrainingRun, finish_run
from embodix.testing.host_runs import VOCAB_SIZE
from embodix_groot.action_head import draw_noise_and_time
from embodix_groot.architecture import MAX_EMBODIMENT_ID, SPECIAL_TOKENS
from embodix_groot.reference import samples_of
from embodix_groot.wrapper import GrootN15Wrapper

SMALL_ARCHITECTURE: dict[str, Any] = {
    "vision": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    },
    "language": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    },
    "vl_self_attention": {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8},
    "action_head": {
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "hidden_size": 24,
        "num_future_tokens": 5,
        "num_embodiments": 32,
        "num_inference_timesteps": 4,
    },
    "dropout": 0.0,
}


def small_groot(
    architecture: Mapping[str, Any] = SMALL_ARCHITECTURE,
    seed: int = 0,
    tune_llm: bool = False,
    tune_visual: bool = False,
    *,
    cameras: Sequence[str] = ("front", "gripper"),
    action_dim: int = 4,
    **config: Any,
) -> Any:
    """Upstream's ``GrootPolicy`` in a small size, in float32 on the CPU unless ``config`` says otherwise, in training
    mode. No file is read or written."""
    tuned = {"tune_llm": tune_llm, "tune_visual": tune_visual, **config}
    groot_config = groot_policy_config(architecture["vision"]["image_size"], cameras, action_dim, **tuned)
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    with torch.random.fork_rng(devices=[]), patched({"lerobot_groot_sizes": {"architecture": architecture}}):
        torch.manual_seed(seed)
        policy = GrootPolicy(groot_config)
    policy.train()
    return policy


def groot_policy_config(
    image_size: int, cameras: Sequence[str] = ("front", "gripper"), action_dim: int = 4, **config: Any
) -> Any:
    """Upstream's ``GrootConfig`` of a small policy for the CPU, with four state dimensions; ``config`` has the last
    word."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.groot.configuration_groot import GrootConfig

    options = {
        "device": "cpu",
        "use_bf16": False,
        "chunk_size": 16,
        "n_action_steps": 8,
        "max_state_dim": 12,
        "max_action_dim": 8,
        "image_size": (image_size, image_size),
        **config,
    }
    visual = PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size))
    inputs = {f"observation.images.{name}": visual for name in cameras}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (4,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (action_dim,))}
    return GrootConfig(input_features=inputs, output_features=outputs, **options)


def random_batch(
    policy: Any, text_lengths: Sequence[int], num_images: Sequence[int], seed: int = 0
) -> dict[str, Tensor]:
    """A preprocessed training batch in the form that upstream's processors give it.

    Args:
        policy: a GR00T-N1.5; its sizes decide those of the batch.
        text_lengths: text tokens of each sample, 2 at least.
        num_images: images of each sample, which stand after its first text token.
        seed: everything is drawn from it.

    Returns:
        ``eagle_input_ids`` and ``eagle_attention_mask`` [B, L], left-padded; ``eagle_pixel_values`` [I, 3, H, W] in
        the samples' order, with ``eagle_image_sizes`` [I, 2]; ``state`` and ``state_mask`` [B, 1, max_state_dim];
        ``action`` and ``action_mask`` [B, T, max_action_dim]; ``embodiment_id`` [B].
    """
    generator = torch.Generator().manual_seed(seed)
    eagle = policy._groot_model.backbone.eagle_model
    vocab_size = eagle.config.text_config.vocab_size
    image_ids = torch.full((eagle.num_image_token,), eagle.image_token_index)
    rows = []
    for length, images in zip(text_lengths, num_images, strict=True):
        text = torch.randint(len(SPECIAL_TOKENS), vocab_size, (length,), generator=generator)
        rows.append(torch.cat([text[:1], image_ids.repeat(images), text[1:]]))
    longest = max(map(len, rows))
    pad_id = SPECIAL_TOKENS.index("<|endoftext|>")
    image_size = eagle.config.vision_config.image_size
    total = sum(num_images)
    return {
        "eagle_input_ids": torch.stack([torch.nn.functional.pad(r, (longest - len(r), 0), value=pad_id) for r in rows]),
        "eagle_attention_mask": torch.stack([_left_mask(len(row), longest) for row in rows]),
        "eagle_pixel_values": torch.randn(total, 3, image_size, image_size, generator=generator),
        "eagle_image_sizes": torch.full((total, 2), image_size),
        **_state_and_action(policy.config, len(rows), generator),
        "embodiment_id": torch.full((len(rows),), MAX_EMBODIMENT_ID),
    }


def _left_mask(length: int, padded: int) -> Tensor:
    return (torch.arange(padded) >= padded - length).long()


def _state_and_action(config: Any, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random values in the real dimensions, zeros behind them as upstream pads."""
    state_dim = config.input_features["observation.state"].shape[0]
    action_dim = config.output_features["action"].shape[0]
    horizon = min(config.chunk_size, 16)
    state = torch.zeros(batch_size, 1, config.max_state_dim)
    state[..., :state_dim] = torch.randn(batch_size, 1, state_dim, generator=generator)
    action = torch.zeros(batch_size, horizon, config.max_action_dim)
    action[..., :action_dim] = torch.randn(batch_size, horizon, action_dim, generator=generator)
    state_mask, action_mask = torch.zeros_like(state, dtype=torch.bool), torch.zeros_like(action, dtype=torch.bool)
    state_mask[..., :state_dim] = True
    action_mask[..., :action_dim] = True
    return {"state": state, "state_mask": state_mask, "action": action, "action_mask": action_mask}


def meta_groot(architecture: Mapping[str, Any], **config: Any) -> Any:
    """Upstream's ``GrootPolicy`` of these sizes on the meta device: shapes and names without memory."""
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    sizes = {"chunk_size": 50, "n_action_steps": 50, "max_state_dim": 64, "max_action_dim": 32, **config}
    groot_config = groot_policy_config(architecture["vision"]["image_size"], action_dim=7, **sizes)
    with patched({"lerobot_groot_sizes": {"architecture": architecture}}), torch.device("meta"):
        return GrootPolicy(groot_config)


def small_groot_run(dataset_root: Path, *overrides: str) -> list[str]:
    """Hydra overrides of a run that takes seconds on a CPU: 28-pixel images, batches of 3, 3 steps."""
    architecture = {**SMALL_ARCHITECTURE, "language": {**SMALL_ARCHITECTURE["language"], "vocab_size": VOCAB_SIZE}}
    sizes = json.dumps(architecture).replace('"', "")
    return [
        "policy=groot_n15_small",
        f"architecture={sizes}",
        f"dataset.root={dataset_root}",
        "policy.image_size=[28,28]",
        "policy.chunk_size=6",
        "policy.n_action_steps=3",
        "train.batch_size=3",
        "train.num_workers=0",
        "train.steps=3",
        "train.eval_freq=0",
        *overrides,
    ]


# Parts of upstream's model that tokens start from.
EMBEDDINGS = ("embed_tokens", "mlp1", "_encoder.", "position_embedding", "future_tokens")


@torch.no_grad()
def strengthen(policy: Any) -> Any:
    """Give every token and every attention an effect: fresh weights are so small that tokens are nearly equal."""
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(10.0 if any(part in name for part in EMBEDDINGS) else 3.0)
    return policy


@contextmanager
def given_noise(head: Any, noise: Tensor, time: Tensor | None = None) -> Iterator[None]:
    """Upstream's head takes this noise, and this time, instead of drawing."""
    with mock.patch.object(torch, "randn", lambda *_, **__: noise):
        if time is None:
            yield
        else:
            with mock.patch.object(head, "sample_time", lambda *_, **__: time):
                yield


def run_reference(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream, one sample at a time, on the noise that its own batched call would draw."""
    head = policy._groot_model.action_head
    torch.manual_seed(seed)
    noise_BFTA, time_BF = draw_noise_and_time(head, batch["action"], 1)
    total, count = torch.zeros(()), batch["action_mask"].sum()
    for index, sample in enumerate(samples_of(policy, batch)):
        with given_noise(head, noise_BFTA[index], time_BF[index]):
            loss, _ = type(policy).forward(policy, sample)
        total = total + loss * sample["action_mask"].sum()
    return finish_run(policy, total / count)


def run_upstream(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream's own batched call."""
    torch.manual_seed(seed)
    loss, _ = type(policy).forward(policy, dict(batch))
    return finish_run(policy, loss)


def run_fast(policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0) -> TrainingRun:
    """Forward and backward with the fast path installed."""
    installation = GrootN15Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        loss, _ = policy(dict(batch))
        return finish_run(policy, loss)
    finally:
        installation.uninstall()


def reference_actions(policy: Any, batch: Mapping[str, Tensor], noise_BTA: Tensor) -> Tensor:
    """``[B, T, A]`` actions of upstream's own sampler, one sample at a time."""
    actions = []
    for index, sample in enumerate(samples_of(policy, batch)):
        with given_noise(policy._groot_model.action_head, noise_BTA[index : index + 1]):
            actions.append(type(policy).predict_action_chunk(policy, sample))
    policy.train()
    return torch.cat(actions)


def fast_actions(
    policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, noise_BTA: Tensor | None = None
) -> Tensor:
    """``[B, T, A]`` actions with the fast path installed."""
    installation = GrootN15Wrapper().install(policy, settings)
    try:
        actions: Tensor = policy.predict_action_chunk(dict(batch), noise=noise_BTA)
    finally:
        installation.uninstall()
        policy.train()
    return actions
