# SPDX-License-Identifier: Apache-2.0
"""A key that no schema knows is an error in every command, at every depth, however it was added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from embodix.config.closed import UnknownKeyError, require_known_keys
from embodix.config.compose import compose, config_names, options_of


@pytest.mark.parametrize(
    ("config_name", "override", "message"),
    [
        ("train", "+trian.steps=3", "'trian' is neither a group nor a field of train; did you mean train?"),
        ("train", "+plugins=embodix", "'plugins' is neither a group nor a field of train; did you mean plugin"),
        ("train", "+train.stepz=3", "'train.stepz' .* did you mean train.steps"),
        ("train", "++packing.option={}", "'packing.option' .* did you mean packing.options"),
        ("train", "+packing/extra=none", "Config key 'packing/extra' is a group that did not land"),
        ("compare", "+compare.variant.a=[]", "'compare.variant' .* did you mean compare.variants"),
        ("plan", "+tokeniser.directory=x", "'tokeniser' .* did you mean tokenizer"),
        ("quantize", "+gat.enabled=true", "'gat' is neither a group nor a field of quantize; did you mean gate?"),
        ("quantize", "+gate.enabld=true", "'gate.enabld' .* did you mean gate.enabled"),
        ("eval", "+controlls=[blind]", "'controlls' is neither a group nor a field of eval; did you mean controls?"),
        ("eval", "+eval.episodes=3", "'eval.episodes' .* did you mean eval.n_episodes"),
        ("rl", "+optim.lrr=3", "'optim.lrr' .* did you mean optim.lr"),
        ("bench_rl", "+bench.onyl=[a]", "'bench.onyl' .* did you mean bench.only"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(config_name: str, override: str, message: str) -> None:
    with pytest.raises(UnknownKeyError, match=message):
        compose(config_name, [override])


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose("train", ["+trian.steps=3", "+plugins=embodix"])
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["'trian'", "'plugins'"]


def test_what_is_open_stays_open() -> None:
    overrides = ["+policy.anything=1", "+packing.options.anything=1", "+compare.variants.mine=[]", "+rename_map.a=b"]
    config = compose("compare", overrides)
    assert (config.policy.anything, config.packing.options.anything) == (1, 1)
    assert config.compare.variants.mine == [] and config.rename_map.a == "b"


def test_every_option_that_ships_composes() -> None:
    groups = {"packing": "train", "attention": "train", "quantization": "eval", "logging": "train", "env": "eval"}
    composed = [compose(name, [f"{group}={option}"]) for group, name in groups.items() for option in options_of(group)]
    composed += [compose(name, []) for name in config_names()]
    assert len(composed) >= 30


@dataclass
class Inner:
    depth: int | None = None


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    given_elsewhere: Any = "${inner}"
    nothing: Inner | None = None
    missing: Inner = "???"  # type: ignore[assignment]
    free: Any = field(default_factory=lambda: {"any": {"thing": 1}, 1: 2})


def test_null_missing_and_interpolated_nodes_are_passed_over() -> None:
    config = OmegaConf.structured(Outer)
    require_known_keys(config, "it")
    OmegaConf.update(config, "inner.deep", 1, force_add=True)
    with pytest.raises(
        UnknownKeyError, match=r"'inner.deep' is neither a group nor a field of it; did you mean inner."
    ):
        require_known_keys(config, "it")
