# SPDX-License-Identifier: Apache-2.0
"""The stream of steps: every sample once an epoch, whatever the ranks, from any position."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.contracts import BatchComposer
from embodix.data.order import ShuffledOrder
from embodix.packing.batches import BatchStream, FixedCountComposer, OptimizerStep, assign_to_ranks
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.packing.sample_cost import CostModel, SampleSizes
from embodix.packing.sequence_length import SequenceLengthPacker
from embodix.packing.token_budget import TokenBudgetPacker


def mixture_sizes(num_samples: int, seed: int = 0) -> SampleSizes:
    is_small = np.random.default_rng(seed).random(num_samples) < 0.5
    return SampleSizes(np.where(is_small, 276, 918), np.where(is_small, 1, 3), num_actions=50)


def stream_of(
    num_samples: int, num_ranks: int = 1, composer: BatchComposer | None = None, samples_per_step: float = 8
) -> BatchStream:
    composer = composer or TokenBudgetPacker(look_ahead=32)
    order, sizes = ShuffledOrder(num_samples, seed=3), mixture_sizes(num_samples)
    return BatchStream(order, composer, sizes, num_ranks=num_ranks, samples_per_step=samples_per_step)


def flat(steps: list[OptimizerStep]) -> list[list[int]]:
    """The bins of steps in some order that does not depend on the ranks."""
    return sorted(samples.tolist() for step in steps for bins in step.ranks for samples in bins)


def take_bins(stream: BatchStream, num_bins: int) -> list[OptimizerStep]:
    steps = []
    while stream.position.num_bins < num_bins:
        steps.append(next(stream))
    return steps


@pytest.mark.parametrize("packer", [TokenBudgetPacker(), SequenceLengthPacker(), FixedCountComposer()])
def test_packers_that_compose_say_so(packer):
    assert isinstance(packer, BatchComposer)
    assert not isinstance(PaddedPacker(), BatchComposer) and not isinstance(PaddingFreePacker(), BatchComposer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_samples=st.integers(20, 120),
    num_ranks=st.integers(1, 8),
    bins_per_step=st.integers(1, 3),
    algorithm=st.sampled_from(["best_fit", "first_fit_decreasing", "fixed", "sequence_length"]),
)
def test_every_sample_once_an_epoch_at_any_number_of_ranks(num_samples, num_ranks, bins_per_step, algorithm):
    composers = {
        "fixed": lambda: FixedCountComposer(bins_per_step),
        "sequence_length": lambda: SequenceLengthPacker(rows=4000, bins_per_step=bins_per_step, look_ahead=16),
    }
    budget = lambda: TokenBudgetPacker(4000, algorithm, look_ahead=16, bins_per_step=bins_per_step)  # noqa: E731
    composer = composers.get(algorithm, budget)()
    stream = stream_of(num_samples, num_ranks, composer)
    steps = []
    while stream.position.epoch < 2:
        start, step = stream.position, next(stream)
        assert [len(bins) for bins in step.ranks] == [bins_per_step] * num_ranks
        assert step.end.num_samples - start.num_samples == step.num_samples
        steps.append(step)
    same_composer, epochs, alone_steps = composers.get(algorithm, budget)(), ([], []), []
    alone = stream_of(num_samples, 1, same_composer)
    same_composer.bins_per_step = 1  # one bin a step, so that no step spans two epochs
    while alone.position.num_bins < stream.position.num_bins:
        epoch, step = alone.position.epoch, next(alone)
        alone_steps.append(step)
        if epoch < 2:
            epochs[epoch].extend(step.ranks[0][0].tolist())
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_samples))] * 2
    assert flat(steps) == flat(alone_steps)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(first=st.integers(1, 8), second=st.integers(1, 8), num_steps=st.integers(0, 12), bins_per_step=st.integers(1, 2))
def test_a_saved_position_continues_at_another_number_of_ranks(first, second, num_steps, bins_per_step):
    composer = TokenBudgetPacker(3000, look_ahead=16, bins_per_step=bins_per_step)
    before = stream_of(100, first, composer)
    steps = [next(before) for _ in range(num_steps)]
    state = json.loads(json.dumps(before.state_dict()))
    after = stream_of(100, second, composer)
    after.load_state_dict(state)
    steps += [next(after) for _ in range(6)]
    whole = take_bins(stream_of(100, 1, TokenBudgetPacker(3000, look_ahead=16)), after.position.num_bins)
    assert flat(steps) == flat(whole)
    assert after.position == whole[-1].end


def test_bins_do_not_depend_on_the_ranks_and_epochs_differ():
    one, four = take_bins(stream_of(200, 1), 40), take_bins(stream_of(200, 4), 40)
    assert flat(one) == flat(four)
    stream = stream_of(64, composer=FixedCountComposer())
    first, second = ([next(stream) for _ in range(8)] for _ in range(2))
    assert flat(first) != flat(second)


@pytest.mark.parametrize(("num_ranks", "bins_per_step"), [(8, 1), (8, 2), (3, 4)])
def test_ranks_are_balanced_where_naive_splitting_is_not(num_ranks, bins_per_step):
    packed = stream_of(60_000, num_ranks, TokenBudgetPacker(bins_per_step=bins_per_step), 8 * bins_per_step)
    naive = stream_of(60_000, num_ranks, FixedCountComposer(), 8 * bins_per_step)
    imbalance = {name: [next(s).imbalance for _ in range(300)] for name, s in (("packed", packed), ("naive", naive))}
    assert max(imbalance["packed"]) <= 1.03
    assert np.mean(imbalance["naive"]) > 1.05


def test_dear_bins_go_to_ranks_with_cheap_ones():
    assert assign_to_ranks([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert assign_to_ranks([9, 1], 2) == [[0], [1]]
    with pytest.raises(ValueError, match="3 bins cannot be shared equally by 2 ranks"):
        assign_to_ranks([1, 1, 1], 2)


def test_a_fitted_model_changes_no_step_of_its_epoch_and_is_part_of_the_state():
    generator = np.random.default_rng(0)
    sizes = SampleSizes(generator.integers(100, 900, 200), generator.integers(0, 4, 200))

    def new_stream() -> BatchStream:
        packer = TokenBudgetPacker(look_ahead=32, bins_per_step=2)
        return BatchStream(ShuffledOrder(200, seed=3), packer, sizes, num_ranks=2, samples_per_step=8)

    stream, plain = new_stream(), new_stream()
    steps = [next(stream) for _ in range(2)]
    stream.adopt(CostModel(tokens=1.0, images=2000.0))
    state = stream.state_dict()
    while stream.position.epoch == 0:
        steps.append(next(stream))
    same = [next(plain) for _ in steps]
    for ours, theirs in zip(steps[:-1], same[:-1], strict=True):
        assert flat([ours]) == flat([theirs])  # who computes which bin may differ
    later, theirs = next(stream), next(plain)
    assert flat([later]) != flat([theirs])
    resumed = new_stream()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    continued = [next(resumed) for _ in range(len(steps) - 1)]
    assert [step.costs for step in [*steps[2:], later]] == [step.costs for step in continued]
    assert flat([*steps[2:], later]) == flat(continued)


def test_another_data_set_or_packing_is_refused_on_resume():
    stream = stream_of(100)
    for _ in range(9):
        next(stream)
    with pytest.raises(ValueError, match="epochs of 100 samples; this run's have 90"):
        stream_of(90).load_state_dict(stream.state_dict())
    other = stream_of(100, composer=TokenBudgetPacker(50_000))
    other.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match=r"packing options and train.batch_size that it was trained with"):
        next(other)


def test_a_budget_of_none_holds_the_batch_size_on_average():
    stream = stream_of(20_000, 1, TokenBudgetPacker(bins_per_step=2), samples_per_step=16)
    samples = [next(stream).num_samples for _ in range(500)]
    assert np.mean(samples) == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("samples_per_step", [1, 2.67, 3])
def test_a_budget_of_none_holds_few_samples_on_average_too(samples_per_step):
    stream = stream_of(5_000, 1, TokenBudgetPacker(), samples_per_step)
    samples = [next(stream).num_samples for _ in range(500)]
    assert np.mean(samples) == pytest.approx(samples_per_step, rel=0.15 if samples_per_step > 1 else 0.6)


def test_a_sample_larger_than_the_budget_is_refused_before_training():
    with pytest.raises(ValueError, match=r"Sample \d+ alone costs 968, more than a bin's budget of 900"):
        stream_of(50, composer=TokenBudgetPacker(900))


def test_an_order_of_unknown_samples_is_refused():
    with pytest.raises(ValueError, match="sizes are known of 5"):
        BatchStream(ShuffledOrder(9, 0), FixedCountComposer(), SampleSizes.equal(5), num_ranks=1, samples_per_step=2)
