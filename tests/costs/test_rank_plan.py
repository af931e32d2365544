# SPDX-License-Identifier: Apache-2.0
"""What a plan says of one of several processes."""

from __future__ import annotations

import dataclasses

import pytest

from embodix import plugins
from embodix.config.train_schema import NamedChoice
from embodix.contracts import RankLayout, RunTraits, SampleShape
from embodix.costs.policy_costs import EMBODIX, PolicyCosts
from embodix.costs.rank_plan import PlannedProcesses, plan_ranks, planned_processes
from embodix.parallel.replicated import HostStrategy
from embodix.policies.support import support_of
from embodix_pi05.testing import SMALL_ARCHITECTURE

TRAITS = RunTraits(
    support_of("pi05"), True, "padding_free", False, "none", False, False, False, "cpu", 8, checkpoint_format=None
)
FEATURES = {
    "observation.images.front": {"type": "VISUAL", "shape": [3, 28, 28]},
    "observation.state": {"type": "STATE", "shape": [2]},
}


@pytest.fixture(scope="module")
def small():
    fields = {"type": "pi05", "image_resolution": [28, 28], "chunk_size": 6, "n_action_steps": 6}
    costs = PolicyCosts(fields, FEATURES, {"action": {"type": "ACTION", "shape": [2]}}, SMALL_ARCHITECTURE)
    return costs, costs.count(SampleShape(1, 5), EMBODIX, 2)


def test_each_strategy_is_counted_or_says_why_not(small):
    processes = PlannedProcesses(4, {"ddp": {}, "fsdp2": {"shard": 2}, "single": {}}, TRAITS)
    ddp, fsdp2, single = plan_ranks(*small, processes)
    assert (ddp.layout, fsdp2.layout, single.layout) == (RankLayout(data=4), RankLayout(data=2, shard=2), None)
    assert ddp.counted.placed.replicated == ddp.counted.placed.total == fsdp2.counted.placed.total
    assert ddp.counted.placed.total / 2 <= fsdp2.counted.placed.sharded < ddp.counted.placed.total * 0.6
    assert 0 < fsdp2.counted.exchange < fsdp2.counted.placed.total
    assert set(fsdp2.counted.sent) == {
        *("all-gather forward", "all-gather backward"),
        *("reduce-scatter of gradients", "all-reduce of gradients"),
    }
    assert fsdp2.total == fsdp2.counted.held + small[1].activations
    assert single.counted is None
    assert "4 were started" in single.reason


def test_heads_that_nothing_reads_are_neither_gathered_nor_trained(small):
    costs, step = small
    assert not any("lm_head" in path for path in step.use.entered)
    assert any(path.endswith("language_model.layers.0") for path in step.use.entered)
    unread = {name for name, _ in costs.policy.named_parameters()} - step.use.gradients
    assert any("lm_head" in name for name in unread)


def test_a_run_that_a_strategy_refuses_is_told_why(small):
    (refused,) = plan_ranks(*small, PlannedProcesses(2, {"fsdp2": {}}, dataclasses.replace(TRAITS, packed=False)))
    assert "packed computation" in refused.reason


def test_a_strategy_that_does_not_count_is_shown_so(small, monkeypatch):
    class Silent(HostStrategy):
        rank_bytes = None

    monkeypatch.setattr(plugins, "build", lambda kind, name, options: Silent())
    (silent,) = plan_ranks(*small, PlannedProcesses(2, {"silent": {}}, TRAITS))
    assert silent.reason.startswith("not counted")


def test_an_unknown_strategy_is_no_property_of_the_run(small):
    with pytest.raises(plugins.PluginError, match="fsdp2"):
        plan_ranks(*small, PlannedProcesses(2, {"fspd2": {}}, TRAITS))


def test_which_strategies_are_asked_about():
    assert planned_processes(None, [], NamedChoice("auto"), TRAITS) is None
    everything = planned_processes(8, [], NamedChoice("auto"), TRAITS).strategies
    assert {"ddp", "fsdp2"} <= set(everything)
    assert not {"auto", "single"} & set(everything)
    own = NamedChoice("fsdp2", {"shard": 4})
    assert planned_processes(8, [], own, TRAITS).strategies == {"fsdp2": {"shard": 4}}
    assert planned_processes(8, ["ddp", "fsdp2"], own, TRAITS).strategies == {"ddp": {}, "fsdp2": {"shard": 4}}
    with pytest.raises(ValueError, match=r"plan\.processes=8"):
        planned_processes(None, [], own, TRAITS)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        planned_processes(0, [], own, TRAITS)
