# SPDX-License-Identifier: Apache-2.0
"""The noise of an episode does not depend on who shares its batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodix.evaluation.episodes import Episode
from embodix.evaluation.noise import EpisodeNoise, episode_generator

DRAWS = {
    "randn": lambda B: torch.randn(B, 5, 3),
    "randn of a tuple": lambda B: torch.randn((B, 5, 3), dtype=torch.float64),
    "randn by name": lambda B: torch.randn(size=(B, 5, 3), device="cpu", generator=None),
    "rand": lambda B: torch.rand(B, 17),
    "randn_like": lambda B: torch.randn_like(torch.zeros(B, 5)),
    "rand_like": lambda B: torch.rand_like(torch.zeros(B, 5), dtype=torch.float64),
    "normal": lambda B: torch.normal(mean=0.0, std=2.0, size=(B, 5, 3), dtype=torch.float32, device="cpu"),
    "normal by place": lambda B: torch.normal(1.0, 2.0, (B, 5)),
    "normal of tensors": lambda B: torch.normal(torch.ones(B, 4), 0.5 * torch.ones(B, 4)),
    "distribution": lambda B: torch.distributions.Normal(torch.ones(B, 4), torch.ones(B, 4)).sample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@given(company=st.lists(st.integers(0, 50), max_size=5), place=st.integers(0, 5))
def test_a_row_is_the_episodes_own(draw, company, place):
    episodes = [Episode("reach-v3", seed) for seed in company]
    place = min(place, len(episodes))
    episodes.insert(place, Episode("push-v3", 7))

    def rows(of):
        generators = [episode_generator(episode) for episode in of]
        with EpisodeNoise(generators):
            return [draw(len(of)) for _ in range(2)]

    together, alone = rows(episodes), rows([Episode("push-v3", 7)])
    for shared, own in zip(together, alone, strict=True):
        assert shared.dtype == own.dtype
        assert torch.equal(shared[place], own[0])
    assert not torch.equal(alone[0], alone[1])


def test_the_numbers_are_as_torch_draws_them():
    episode = Episode("reach-v3", 3)
    with EpisodeNoise([episode_generator(episode)]):
        normal = torch.normal(mean=3.0, std=0.5, size=(1, 20000))
        tensors = torch.normal(torch.full((1, 20000), 3.0), torch.full((1, 20000), 0.5))
        uniform = torch.rand(1, 20000)
    for drawn in (normal, tensors):
        assert abs(float(drawn.mean()) - 3.0) < 0.02
        assert abs(float(drawn.std()) - 0.5) < 0.02
    assert 0.0 <= float(uniform.min()) < 0.01 < 0.99 < float(uniform.max()) < 1.0


def test_task_and_seed_both_decide_the_stream():
    episodes = [Episode("reach-v3", 0), Episode("reach-v3", 1), Episode("push-v3", 0)]
    firsts = {float(torch.randn(1, generator=episode_generator(episode))) for episode in episodes}
    assert len(firsts) == 3


def test_draws_that_belong_to_no_row_are_torchs_own():
    generators = [episode_generator(Episode("reach-v3", seed)) for seed in range(3)]
    draws = {
        "of another size": lambda: torch.randn(4, 3),
        "without size": lambda: torch.randn(()),
        "with a generator": lambda: torch.randn(3, 4, generator=torch.Generator().manual_seed(5)),
        "normal of another size": lambda: torch.normal(mean=0.0, std=1.0, size=(4, 3)),
        "normal of other tensors": lambda: torch.normal(torch.zeros(4, 3), std=torch.ones(4, 3)),
        "like a scalar": lambda: torch.rand_like(torch.zeros(())),
        "randint": lambda: torch.randint(0, 100, (3, 5)),
    }
    for name, draw in draws.items():
        torch.manual_seed(9)
        expected = draw()
        torch.manual_seed(9)
        with EpisodeNoise(generators):
            assert torch.equal(draw(), expected), name
