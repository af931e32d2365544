# SPDX-License-Identifier: Apache-2.0
"""Masked reduction: only steps that exist count, and they count globally."""

from __future__ import annotations

import pytest
import torch

from embodix.policies.functional import fill_padded_actions, reduce_all, reduce_valid, valid_elements

PAD = torch.tensor([[False, False, True, True], [False, False, False, False], [True, True, True, True]])


def test_padding_is_replaced_by_the_last_step_that_exists():
    actions = torch.arange(12.0).view(3, 4, 1)
    filled = fill_padded_actions(actions, PAD)
    assert filled[..., 0].tolist() == [[0, 1, 1, 1], [4, 5, 6, 7], [0, 0, 0, 0]]


def test_steps_before_the_first_take_the_first():
    filled = fill_padded_actions(torch.arange(4.0).view(1, 4, 1), torch.tensor([[True, True, False, True]]))
    assert filled.flatten().tolist() == [2, 2, 2, 2]


def test_poison_in_padding_reaches_neither_values_nor_gradients():
    actions = torch.randn(3, 4, 2)
    poisoned = actions.masked_fill(PAD[..., None], float("nan")).requires_grad_()
    assert torch.equal(fill_padded_actions(poisoned, PAD), fill_padded_actions(actions, PAD))
    losses = poisoned[:, None].square()
    loss, logged = reduce_valid(losses, valid_elements(losses, PAD, None), "mean", None)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(map(torch.isfinite, map(torch.tensor, logged["loss_per_dim"])))


def test_the_mean_is_over_elements_that_exist():
    losses = torch.rand(3, 1, 4, 2)
    kept = losses[~PAD[:, None].expand(3, 1, 4)]
    loss, logged = reduce_valid(losses, valid_elements(losses, PAD, None), "mean", None)
    assert loss.item() == pytest.approx(kept.mean().item())
    assert logged["loss_per_dim"] == pytest.approx(kept.mean(dim=0).tolist())
    per_sample, _ = reduce_valid(losses, valid_elements(losses, PAD, None), "none", None)
    expected = [losses[0, 0, :2].mean(), losses[1].mean(), torch.tensor(0.0)]
    torch.testing.assert_close(per_sample, torch.stack(expected))


def plain_loss(losses, pad, reduce_count=None):
    return reduce_valid(losses, valid_elements(losses, pad, None), "mean", reduce_count)[0]


def test_ranks_of_unequal_size_get_the_global_mean():
    """Averaging the ranks' losses, as DDP does with gradients, gives total sum / total count."""
    first, second = torch.rand(2, 1, 4, 2), torch.rand(1, 1, 4, 2)
    pads = PAD[:2], torch.tensor([[False, True, True, True]])
    mean_count = (~pads[0]).sum().add((~pads[1]).sum()).float() * 2 / 2
    both = list(zip((first, second), pads, strict=True))
    parts = [plain_loss(losses, pad, lambda count: mean_count) for losses, pad in both]
    whole = plain_loss(torch.cat([first, second]), torch.cat(pads))
    torch.testing.assert_close(sum(parts) / 2, whole)
    diluted = sum(plain_loss(losses, pad) for losses, pad in both) / 2
    assert abs(diluted - whole) > 1e-3


def test_a_sample_counts_in_its_own_dimensions_only():
    losses, dims = torch.rand(3, 2, 4, 5), torch.tensor([5, 2, 3])
    poisoned = losses.clone()
    poisoned[1, ..., 2:] = poisoned[2, ..., 3:] = float("nan")
    loss, logged = reduce_valid(poisoned, valid_elements(losses, None, dims), "mean", None)
    kept = torch.cat([losses[sample, ..., :n].flatten() for sample, n in enumerate(dims)])
    torch.testing.assert_close(loss, kept.mean())
    assert logged["loss_per_dim"][4] == pytest.approx(losses[0, ..., 4].mean().item())
    per_sample, _ = reduce_valid(poisoned, valid_elements(losses, None, dims), "none", None)
    torch.testing.assert_close(per_sample[1], losses[1, ..., :2].mean())


@pytest.mark.parametrize("dims", [0, 6])
def test_dimensions_that_do_not_exist_are_refused(dims):
    with pytest.raises(ValueError, match=r"1 to 5 here; got \[3, "):
        valid_elements(torch.rand(2, 1, 4, 5), None, torch.tensor([3, dims]))


def test_a_batch_without_any_step_is_zero_not_nan():
    loss = plain_loss(torch.rand(1, 1, 4, 2), PAD[2:])
    assert loss.item() == 0


def test_the_host_reduction_is_the_plain_mean():
    losses = torch.rand(3, 2, 4, 2)
    loss, logged = reduce_all(losses, "mean")
    assert loss.item() == pytest.approx(losses.mean().item())
    assert logged["loss"] == loss.item()
    per_sample, _ = reduce_all(losses, "none")
    torch.testing.assert_close(per_sample, losses.mean(dim=(1, 2, 3)))
