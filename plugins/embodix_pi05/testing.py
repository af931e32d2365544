# SPDX-License-Identifier: Apache-2.0
"""Small π0.5 policies, batches for them, and runs of upstream's and of the packed computation to compare.

Shape suffixes: B samples, L language tokens (padded), T action steps, A action dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from embodix.attention.cpu import SegmentAuto
from embodix.contracts import Packer
from embodix.data.preprocessing import MicroBatches
from embodix.patching import patched
from embodix.policies.settings import ActionPad, FastPathSettings, TokenCounts
from embodix.testing.errors import TrainingRun, finish_run, gradients_of
from embodix.testing.host_runs import VOCAB_SIZE
from embodix.training.step_forward import StepCount, StepForward
from embodix_pi05.wrapper import Pi05Wrapper

SMALL_ARCHITECTURE: dict[str, dict[str, int]] = {
    "vision": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 14,
    },
    "language": {
        "width": 32,
        "depth": 3,
        "mlp_dim": 64,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 16,
        "vocab_size": 128,
    },
    "action_expert": {
        "width": 24,
        "depth": 3,
        "mlp_dim": 40,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 16,
    },
}


def image_key(name: str) -> str:
    return f"observation.images.{name}"


def small_pi05(
    architecture: Mapping[str, Mapping[str, int]] = SMALL_ARCHITECTURE,
    *,
    cameras: Sequence[str] = ("front", "gripper"),
    image_size: int = 28,
    action_dim: int = 4,
    seed: int = 0,
    **config: Any,
) -> Any:
    """Upstream's ``PI05Policy`` in a small size, on the CPU unless ``device`` says otherwise, in training mode.

    The adaptive norms are initialised with zeros upstream, which switches the time path off; they are drawn here.
    """
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    options = {"device": "cpu", "chunk_size": 6, "n_action_steps": 3, "max_action_dim": 8, **config}
    inputs = {image_key(name): PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size)) for name in cameras}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (4,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (action_dim,))}
    pi05_config = PI05Config(
        input_features=inputs, output_features=outputs, image_resolution=(image_size, image_size), **options
    )
    with torch.random.fork_rng(devices=[]), patched({"lerobot_pi05_sizes": {"architecture": architecture}}):
        torch.manual_seed(seed)
        policy = PI05Policy(pi05_config)
        randomise_adaptive_norms(policy)
    policy.train()
    return policy


def randomise_adaptive_norms(policy: Any) -> None:
    """Give the time condition an effect: upstream starts its projections at zero."""
    for name, parameter in policy.named_parameters():
        if name.endswith("norm.dense.weight"):
            torch.nn.init.normal_(parameter, std=0.02)
        elif "gemma_expert" in name and name.endswith("norm.dense.bias"):
            torch.nn.init.normal_(parameter, std=0.5)


def random_batch(
    policy: Any,
    prompt_lengths: Sequence[int],
    *,
    cameras: Sequence[str] = ("front", "gripper"),
    camera_is_pad: Sequence[Sequence[bool]] | None = None,
    padded_length: int = 12,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A preprocessed training batch: images, tokens with their mask, actions, ``action_is_pad`` (none padded)."""
    generator = torch.Generator().manual_seed(seed)
    config = policy.config
    batch_size = len(prompt_lengths)
    embeddings = policy.model.paligemma_with_expert.paligemma.model.language_model.embed_tokens
    token_mask_BL = torch.arange(padded_length) < torch.tensor(prompt_lengths)[:, None]
    tokens_BL = torch.randint(1, embeddings.num_embeddings, (batch_size, padded_length), generator=generator)
    action_dim = config.output_features["action"].shape[0]
    batch: dict[str, Tensor] = {
        image_key(name): torch.rand(batch_size, 3, *config.image_resolution, generator=generator) for name in cameras
    }
    batch["observation.language.tokens"] = tokens_BL * token_mask_BL
    batch["observation.language.attention_mask"] = token_mask_BL
    batch["action"] = torch.randn(batch_size, config.chunk_size, action_dim, generator=generator)
    batch["action_is_pad"] = torch.zeros(batch_size, config.chunk_size, dtype=torch.bool)
    if camera_is_pad is not None:
        batch["camera_is_pad"] = torch.tensor(camera_is_pad, dtype=torch.bool)
    return batch


def upstream_losses(
    policy: Any, batch: Mapping[str, Tensor], noise_BTA: Tensor | None = None, time_B: Tensor | None = None
) -> Tensor:
    """Upstream's own unreduced losses ``[B, T, A]``, honouring ``camera_is_pad`` in its image masks."""
    images, masks = policy._preprocess_images(batch)
    masks = masked_by_camera_pad(batch, masks)
    tokens, token_mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    actions = policy.prepare_action(batch)
    return policy.model.forward(images, masks, tokens, token_mask, actions, noise=noise_BTA, time=time_B)


def masked_by_camera_pad(batch: Mapping[str, Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Upstream's image masks with the cameras that ``camera_is_pad`` marks absent taken out."""
    if "camera_is_pad" not in batch:
        return masks
    columns = (~batch["camera_is_pad"]).unbind(dim=1)
    return [mask & columns[index] if index < len(columns) else mask for index, mask in enumerate(masks)]


def meta_pi05(**config: Any) -> Any:
    """Upstream's ``PI05Policy`` in its real size on the meta device: shapes and names without memory."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    inputs = {image_key(name): PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for name in ("front", "gripper")}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    pi05_config = PI05Config(input_features=inputs, output_features=outputs, device="cpu", **config)
    # Upstream's config replaces a device that it does not know; it is set afterwards.
    pi05_config.device = "meta"
    with torch.device("meta"):
        return PI05Policy(pi05_config)


def small_run(dataset_root: Path, *overrides: str) -> list[str]:
    """Hydra overrides of a run that takes seconds on a CPU: 28-pixel images, batches of 3, 3 steps."""
    architecture = {part: dict(sizes) for part, sizes in SMALL_ARCHITECTURE.items()}
    architecture["language"]["vocab_size"] = VOCAB_SIZE
    sizes = json.dumps(architecture).replace('"', "")
    return [
        "policy=pi05_small",
        f"architecture={sizes}",
        f"dataset.root={dataset_root}",
        "policy.image_resolution=[28,28]",
        "policy.chunk_size=6",
        "policy.n_action_steps=3",
        "policy.tokenizer_max_length=64",
        "train.batch_size=3",
        "train.num_workers=0",
        "train.steps=3",
        "train.eval_freq=0",
        *overrides,
    ]


def run_upstream(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream's own model, ``camera_is_pad`` honoured in its image masks."""
    action_dim = policy.config.output_features["action"].shape[0]
    torch.manual_seed(seed)
    return finish_run(policy, upstream_losses(policy, batch)[..., :action_dim].mean())


def run_fast(policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0) -> TrainingRun:
    """Forward and backward with the fast path installed."""
    installation = Pi05Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        loss, _ = policy(batch)
        return finish_run(policy, loss)
    finally:
        installation.uninstall()


def upstream_actions(policy: Any, batch: Mapping[str, Tensor], seed: int = 0, **kwargs: Any) -> Tensor:
    """``[B, T, A]`` actions of upstream's own sampler, ``camera_is_pad`` honoured in its image masks."""
    policy.eval()
    images, masks = policy._preprocess_images(batch)
    torch.manual_seed(seed)
    actions = policy.model.sample_actions(
        images,
        masked_by_camera_pad(batch, masks),
        batch["observation.language.tokens"],
        batch["observation.language.attention_mask"],
        **kwargs,
    )
    policy.train()
    return actions[..., : policy.config.output_features["action"].shape[0]]


def fast_actions(
    policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0, **kwargs: Any
) -> Tensor:
    """``[B, T, A]`` actions with the fast path installed."""
    installation = Pi05Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        actions: Tensor = policy.predict_action_chunk(batch, **kwargs)
    finally:
        installation.uninstall()
        policy.train()
    return actions


PROMPTS = (5, 9, 3, 12, 1, 7, 4)
CAMERA_IS_PAD = ((0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (0, 0), (1, 0))
VALID_STEPS = (6, 2, 1, 3, 6, 4, 5)
ACTION_DIMS = (4, 2, 3, 4, 1, 4, 2)


class NoTimer:
    """Measures nothing."""

    def bin_started(self) -> None: ...
    def forward_ended(self) -> None: ...
    def bin_ended(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one rank has after a step, before the optimizer."""

    loss: float
    logged: dict[str, Any]
    gradients: dict[str, Tensor | None]
    token_counts: TokenCounts


def seven_samples(policy: Any, with_dims: bool) -> dict[str, Tensor]:
    """A batch whose samples differ in everything: prompts, cameras, valid steps and, if asked, action dimensions."""
    batch = random_batch(policy, PROMPTS, camera_is_pad=[[bool(pad) for pad in row] for row in CAMERA_IS_PAD])
    for sample, num_valid in enumerate(VALID_STEPS):
        batch["action"][sample, num_valid:] = batch["action"][sample, num_valid - 1]
        batch["action_is_pad"][sample, num_valid:] = True
    if with_dims:
        batch["action_dims"] = torch.tensor(ACTION_DIMS)
        for sample, num_dims in enumerate(ACTION_DIMS):
            batch["action"][sample, :, num_dims:] = 0
    return batch


def draw_by_sample(policy: Any, bins: Sequence[Sequence[int]]) -> None:
    """Make the model draw each sample's noise and time from a table, whatever bin it is in."""
    generator = torch.Generator().manual_seed(5)
    model, config = policy.model, policy.config
    noise_BTA = torch.randn(len(PROMPTS), config.chunk_size, config.max_action_dim, generator=generator)
    time_B = torch.rand(len(PROMPTS), generator=generator) * 0.9 + 0.05
    noise, times = iter(list(bins)), iter(list(bins))
    model.sample_noise = lambda shape, device: noise_BTA[list(next(noise))]
    model.sample_time = lambda batch_size, device: time_B[list(next(times))]


def run_step(
    bins: Sequence[Sequence[int]],
    packer: Packer,
    *,
    action_pad: ActionPad = "mask",
    with_dims: bool = True,
    accelerator: Accelerator | None = None,
    count: Callable[[Tensor], Tensor] | None = None,
) -> StepResult:
    """Forward and backward of one step of this rank's ``bins``, as upstream's loop runs it.

    Args:
        count: replaces the count that losses are divided by.
    """
    accelerator = accelerator or Accelerator(cpu=True)
    policy = small_pi05()
    step_count = StepCount()
    settings = FastPathSettings(
        packer, SegmentAuto(), action_pad=action_pad, reduce_count=count or step_count, uneven_batches=True
    )
    installation: Any = Pi05Wrapper().install(policy, settings)
    samples = seven_samples(policy, with_dims)
    draw_by_sample(policy, bins)
    prepared: Any = accelerator.prepare(policy)
    forward = StepForward(prepared, accelerator, installation, step_count, lambda phase: None, NoTimer())
    parts = [{key: value[list(members)] for key, value in samples.items()} for members in bins]
    loss, logged = prepared.forward(MicroBatches(parts) if len(parts) > 1 else parts[0])
    accelerator.backward(loss)
    forward.release()
    assert forward.token_counts is not None
    return StepResult(float(loss.detach()), logged, gradients_of(policy), forward.token_counts)
