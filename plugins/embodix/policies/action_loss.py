# SPDX-License-Identifier: Apache-2.0
"""Reduction of an action-chunk loss over its valid elements: steps that exist, dimensions that a sample has.

Shape suffixes: B samples, F flow samples an observation, T action steps, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def fill_padded_actions(actions_BTA: Tensor, is_pad_BT: Tensor) -> Tensor:
    """Replace padded steps by the last step before them that exists (datasets repeat it anyway).

    The action tokens attend to each other, so what stands in a padded step matters to the others: this keeps them
    what they are in an unmasked run, and makes the loss independent of the values that the padding holds (NaN
    included). Steps before the first one take the first; a sample without any step becomes zeros.
    """
    steps_T = torch.arange(is_pad_BT.shape[1], device=is_pad_BT.device)
    last_BT = torch.where(is_pad_BT, -1, steps_T).cummax(dim=1).values
    first_B1 = (~is_pad_BT).to(torch.int8).argmax(dim=1, keepdim=True)
    source_BT = torch.where(last_BT < 0, first_B1, last_BT)
    filled_BTA = actions_BTA.gather(1, source_BT[..., None].expand_as(actions_BTA))
    empty_B = is_pad_BT.all(dim=1)
    return torch.where(empty_B[:, None, None], torch.zeros_like(filled_BTA), filled_BTA)


def reduce_all(losses_BFTA: Tensor, reduction: str) -> tuple[Tensor, dict[str, Any]]:
    """Upstream's reduction: the mean over everything, or over everything but the sample with ``none``."""
    logged: dict[str, Any] = {"loss_per_dim": losses_BFTA.detach().mean(dim=(0, 1, 2)).float().tolist()}
    loss = losses_BFTA.mean(dim=(1, 2, 3)) if reduction == "none" else losses_BFTA.mean()
    logged["loss"] = loss.mean().item()
    return loss, logged


def valid_elements(losses_BFTA: Tensor, is_pad_BT: Tensor | None, action_dims_B: Tensor | None) -> Tensor:
    """``[B, T, A]`` bool: elements that count.

    Args:
        is_pad_BT: steps that do not exist; None where padded steps count too.
        action_dims_B: leading action dimensions that each sample has; None for all.

    Raises:
        ValueError: a number of dimensions that is not between one and A.
    """
    batch_size, _, num_steps, num_dims = losses_BFTA.shape
    valid_BTA = torch.ones(batch_size, num_steps, num_dims, dtype=torch.bool, device=losses_BFTA.device)
    if is_pad_BT is not None:
        valid_BTA &= ~is_pad_BT[..., None]
    if action_dims_B is not None:
        if bool(((action_dims_B < 1) | (action_dims_B > num_dims)).any()):
            raise ValueError(
                f"action_dims counts the action dimensions of each sample, 1 to {num_dims} here; "
                f"got {action_dims_B.tolist()}."
            )
        valid_BTA &= torch.arange(num_dims, device=valid_BTA.device) < action_dims_B[:, None, None]
    return valid_BTA


def reduce_valid(
    losses_BFTA: Tensor,
    valid_BTA: Tensor,
    reduction: str,
    reduce_count: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Mean over the valid elements.

    The sum is divided by the count that ``reduce_count`` makes of the batch's own: the mean count over ranks of the
    whole step. DDP averages gradients over ranks and micro-batches add theirs up, so together they get total sum /
    total count. With ``none``, each sample is the mean over its own elements, and 0 where it has none.
    """
    valid_BFTA = valid_BTA[:, None].expand_as(losses_BFTA)
    kept_BFTA = torch.where(valid_BFTA, losses_BFTA, torch.zeros_like(losses_BFTA))
    counts_A = valid_BFTA.sum(dim=(0, 1, 2))
    per_dim_A = kept_BFTA.detach().sum(dim=(0, 1, 2)) / counts_A.clamp(min=1)
    logged: dict[str, Any] = {"loss_per_dim": per_dim_A.float().tolist()}
    if reduction == "none":
        per_sample = valid_BFTA.sum(dim=(1, 2, 3)).clamp(min=1)
        loss = kept_BFTA.sum(dim=(1, 2, 3)) / per_sample
        logged["loss"] = loss.mean().item()
        return loss, logged
    count = counts_A.sum().to(torch.float32)
    global_count = count if reduce_count is None else reduce_count(count)
    loss = kept_BFTA.sum() / global_count.clamp(min=torch.finfo(torch.float32).tiny)
    logged["loss"] = loss.item()
    return loss, logged
