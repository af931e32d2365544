# SPDX-License-Identifier: Apache-2.0
"""The record of a policy, and what is registered as one and is none."""

from __future__ import annotations

import pytest

from embodix import Registration, plugins
from embodix.plugins import PluginError, load_plugins
from embodix.policies.support import support_of


@pytest.mark.parametrize(
    ("target", "why"),
    [("fractions:Fraction", "it gives Fraction"), ("embodix.plugins:load_plugins", "it gives Plugin")],
)
def test_what_is_no_record_is_refused_with_its_plugin(monkeypatch: pytest.MonkeyPatch, target: str, why: str) -> None:
    registry, name = load_plugins(), target.replace(":", "_")
    registry.implementations["policies"][name] = Registration(name, target, "no record")
    registry.providers["policies", name] = "third"
    monkeypatch.setattr(plugins, "registry", lambda: registry)
    with pytest.raises(PluginError, match=rf"policy '{name}' of plugin 'third' must be registered as .*: {why}"):
        support_of(name)


def test_a_policy_that_nobody_registered_is_upstreams() -> None:
    assert support_of("of_nobody").policy_type == "of_nobody"
    assert not support_of("of_nobody").offers("wrapper")
