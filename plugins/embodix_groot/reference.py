# SPDX-License-Identifier: Apache-2.0
"""Hold a fast path to upstream run one sample at a time: in a batch, upstream attends to the padding.

What that changes is measured too: upstream's batched loss against that of valid tokens, on the same noise.

Shape suffixes: B samples, F flow samples an observation, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodix.attention.cpu import SegmentSdpa
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings, ReferenceCheck
from embodix_groot.action_head import draw_noise_and_time, reduce_masked
from embodix_groot.fast_path import GrootFastPath


@torch.no_grad()
def check_reference(policy: Any, batch: Mapping[str, Any], settings: FastPathSettings) -> ReferenceCheck:
    """Compare on a training batch in the form of upstream's processors; dropout is off meanwhile.

    Upstream draws noise and time inside its forward pass, so each sample gets a seed, and the fast path the draws that
    upstream makes from these seeds.
    """
    chosen = replace(settings, action_pad="host", flow_samples=1, reduce_count=None)
    fast_path, head = GrootFastPath(policy, chosen), policy._groot_model.action_head
    mask_BTA = batch["action_mask"]
    references, noises, times = [], [], []
    with dropout_off(policy), torch.random.fork_rng():
        for seed, sample in enumerate(samples_of(policy, batch)):
            torch.manual_seed(seed)
            references.append(type(policy).forward(policy, sample)[0] * sample["action_mask"].sum())
            torch.manual_seed(seed)
            noise_1FTA, time_1F = draw_noise_and_time(head, sample["action"], 1)
            noises.append(noise_1FTA)
            times.append(time_1F)
        losses_BFTA = fast_path.losses(batch, torch.cat(noises), torch.cat(times))
        fast = reduce_masked(losses_BFTA, mask_BTA.to(losses_BFTA.device), "mean", None)
    reference = torch.stack(references).sum() / mask_BTA.sum()
    return ReferenceCheck(
        reference="upstream run one sample at a time",
        cause="it attends to the padding of shorter prompts",
        fast_difference=float((fast - reference).abs() / reference.abs()),
        host_batch_difference=padding_effect(policy, batch).relative,
    )


def samples_of(policy: Any, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each sample as a batch of its own, without padding and with its own images."""
    eagle = policy._groot_model.backbone.eagle_model
    num_images = (batch["eagle_input_ids"] == eagle.image_token_index).sum(dim=1) // eagle.num_image_token
    images = {
        key: batch[key].split(num_images.tolist())
        for key in ("eagle_pixel_values", "eagle_image_sizes")
        if key in batch
    }
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and key not in images}
    samples = []
    for index, mask in enumerate(batch["eagle_attention_mask"].bool()):
        sample = {key: value[index : index + 1] for key, value in tensors.items()}
        for key in ("eagle_input_ids", "eagle_attention_mask"):
            sample[key] = batch[key][index][mask][None]
        sample.update({key: parts[index] for key, parts in images.items()})
        samples.append(sample)
    return samples


@dataclass(frozen=True)
class PaddingEffect:
    """Losses of one batch without dropout.

    Attributes:
        upstream: upstream's batched call, whose action head attends to padding.
        valid: valid tokens only, which is upstream one sample at a time.
        num_padding: rows of padding in upstream's batch.
        num_tokens: rows that are tokens.
    """

    upstream: float
    valid: float
    num_padding: int
    num_tokens: int

    @property
    def relative(self) -> float:
        """``|upstream - valid| / valid``; rounding error where the batch has no padding."""
        return abs(self.upstream - self.valid) / abs(self.valid)


@torch.no_grad()
def padding_effect(policy: Any, batch: Mapping[str, Any], seed: int = 0) -> PaddingEffect:
    """Both losses for a ``GrootPolicy`` and a training batch in the form of upstream's processors.

    Dropout is off meanwhile: padding would draw from the random stream, and the noise would differ.
    """
    fast_path = GrootFastPath(policy, FastPathSettings(PaddingFreePacker(), SegmentSdpa()))
    calls = {"upstream": lambda given: type(policy).forward(policy, given), "valid": fast_path.forward}
    losses: dict[str, float] = {}
    with dropout_off(policy):
        for name, forward in calls.items():
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                losses[name] = float(forward(dict(batch))[0])
    mask = batch["eagle_attention_mask"].bool()
    num_tokens = int(mask.sum())
    return PaddingEffect(
        upstream=losses["upstream"],
        valid=losses["valid"],
        num_padding=mask.numel() - num_tokens,
        num_tokens=num_tokens,
    )


@contextmanager
def dropout_off(policy: Any) -> Iterator[None]:
    """Evaluation mode for the duration of a block, then each module's own mode again."""
    training = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
