# SPDX-License-Identifier: Apache-2.0
"""Which patches a config asks for."""

from __future__ import annotations

import pytest

from embodix.config.compose import compose
from embodix.training.host_context import required_patches

GROOT = {
    "lerobot_groot_runs",
    "lerobot_groot_strict_load",
    "lerobot_groot_action_queue",
    "lerobot_groot_samples",
}


def _patches(*overrides: str) -> dict[str, dict[str, object]]:
    return required_patches(compose("train", list(overrides)))


@pytest.mark.parametrize("policy", ["pi05", "pi05_small"])
def test_pi05_asks_for_nothing_of_groot(policy: str) -> None:
    patches = _patches(f"policy={policy}")
    assert not any("groot" in name for name in patches)
    assert ("lerobot_pi05_sizes" in patches) == (policy == "pi05_small")
    assert _patches(f"policy={policy}", "language=upstream").keys() == patches.keys()


@pytest.mark.parametrize("policy", ["groot_n15", "groot_n15_small"])
def test_groot_asks_for_its_own(policy: str) -> None:
    patches = _patches(f"policy={policy}")
    assert patches.keys() >= GROOT
    assert "lerobot_pi05_sizes" not in patches
    assert ("lerobot_groot_sizes" in patches) == (policy == "groot_n15_small")
    assert patches["lerobot_groot_samples"] == {"language": "per_sample"}
    assert _patches(f"policy={policy}", "language=upstream")["lerobot_groot_samples"] == {"language": "upstream"}
    assert _patches(f"policy={policy}", "patches=none").keys() >= GROOT, "without them it does not run"


def test_sizes_of_another_policy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives sizes to groot and pi05; got policy\.type=act"):
        _patches("policy=pi05_small", "policy.type=act")
