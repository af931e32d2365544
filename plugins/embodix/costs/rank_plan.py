# SPDX-License-Identifier: Apache-2.0
"""What one of several processes will hold and send, under each parallel strategy that a run can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodix import plugins
from embodix.config.train_schema import NamedChoice
from embodix.contracts import CountsRankBytes, NotOfferedError, RankBytes, RankLayout, RunTraits
from embodix.costs.counting import CountedStep
from embodix.costs.gpu_sizes import smallest_gpu
from embodix.costs.policy_costs import PolicyCosts
from embodix.parallel.choice import KIND, choose_parallel

ALONE = ("auto", "single")  # what trains in one process; of several, auto is ddp


@dataclass(frozen=True)
class PlannedProcesses:
    """Processes that are asked about.

    Attributes:
        number: of them.
        strategies: names to show, with the options of each.
        traits: of the run.
    """

    number: int
    strategies: Mapping[str, Mapping[str, Any]]
    traits: RunTraits


@dataclass(frozen=True)
class RankPlan:
    """One of several processes under one strategy.

    Attributes:
        layout: None where the strategy can't arrange so many processes.
        counted: None where it can't train the run, or does not say what a rank holds.
        activations: bytes of one micro-batch, as one process alone has them: where ranks share layers, at most.
        gpu_gigabytes: of the smallest common GPU that holds them; None where none does, or nothing is counted.
        reason: why nothing is counted.
    """

    strategy: str
    layout: RankLayout | None
    counted: RankBytes | None
    activations: float
    gpu_gigabytes: int | None
    reason: str | None = None

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return self.activations + (0 if self.counted is None else self.counted.held)


def planned_processes(
    number: int | None, names: Sequence[str], chosen: NamedChoice, traits: RunTraits
) -> PlannedProcesses | None:
    """What is asked about; None for one process alone.

    Args:
        number: of processes, as the config says.
        names: of strategies; none for the run's own, or all where that is upstream's.
        chosen: the run's own.

    Raises:
        ValueError: a strategy for several processes without their number, or less than one.
    """
    asked = list(names) or ([] if chosen.name in ALONE else [chosen.name])
    if number is None:
        if asked:
            raise ValueError(
                f"A plan of {', '.join(asked)} is one of several processes, and their number is not set. Set it: "
                "plan.processes=8."
            )
        return None
    if number < 1:
        raise ValueError(f"plan.processes must be at least 1; got {number}.")
    asked = asked or [name for name in plugins.registry().names(KIND) if name not in ALONE]
    options = {name: chosen.options if name == chosen.name else {} for name in asked}
    return PlannedProcesses(number, options, traits)


def plan_ranks(costs: PolicyCosts, step: CountedStep, processes: PlannedProcesses | None) -> list[RankPlan]:
    """The first rank under each strategy, which holds most.

    Raises:
        embodix.plugins.PluginError: an unknown strategy.
        embodix.arguments.ArgumentError: an option that it does not take.
    """
    return [] if processes is None else list(_rank_plans(costs, step, processes))


def _rank_plans(costs: PolicyCosts, step: CountedStep, processes: PlannedProcesses) -> Iterator[RankPlan]:
    use, traits, support = step.use, processes.traits, costs.support
    if traits.packed and support.offers("unread_parameters"):
        use = replace(use, frozen=frozenset(support.unread_parameters(costs.policy)))
    for name, options in processes.strategies.items():
        plugins.build(KIND, name, dict(options))  # a name or an option that there is none of is no property of the run
        try:
            choice = choose_parallel(name, options, traits, processes.number)
            if not isinstance(choice.strategy, CountsRankBytes):
                yield _uncounted(name, step, "not counted: it does not say what a rank holds.", choice.layout)
                continue
            counted = choice.strategy.rank_bytes(costs.policy, choice.layout, support, use)
        except NotOfferedError as error:
            yield _uncounted(name, step, f"not counted: {error}")
        except ValueError as error:
            yield _uncounted(name, step, f"can't train this run: {error}")
        else:
            total = counted.held + step.activations
            yield RankPlan(name, choice.layout, counted, step.activations, smallest_gpu(total))


def _uncounted(name: str, step: CountedStep, reason: str, layout: RankLayout | None = None) -> RankPlan:
    return RankPlan(name, layout, None, step.activations, None, reason)
