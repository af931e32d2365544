# SPDX-License-Identifier: Apache-2.0
"""Components as tasks: they start in order, fail, hang and are drained, and nothing is left running."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.conductor import Conductor, RunFailedError
from embodix_rl.scheduling.protocol import Deadlines, DrainMode, RunProtocol, RunStage
from embodix_rl.scheduling.virtual_clock import run_virtually

STAGES = [RunStage(("trainer",), ends_run=True), RunStage(("rollout 0",)), RunStage(("env 0", "env 1"), may_end=True)]
DEADLINES = Deadlines(start_s=30.0, drain_s=100.0, cut_s=10.0)


@dataclass
class Part:
    """A component with a life of its own.

    Attributes:
        life: what `run` does: seconds of work, then ``end``, ``raise``, ``group`` or ``hang``.
        start_s: of starting.
        drain_s: from being asked to ending; None for a deaf one.
        log: of what was asked of it.
    """

    life: tuple[float, str] = (1e6, "end")
    start_s: float = 1.0
    drain_s: float | None = 1.0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._asked = asyncio.Event()

    async def start(self) -> None:
        self.log.append("start")
        await asyncio.sleep(self.start_s)

    async def run(self) -> None:
        seconds, end = self.life
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
            if self.drain_s is None:
                await asyncio.Event().wait()
            await asyncio.sleep(self.drain_s)
        except TimeoutError:
            if end == "raise":
                raise EOFError("the simulator's process died") from None
            if end == "group":
                raise ExceptionGroup("of tasks", [ValueError("restarts are spent"), EOFError("it is gone")]) from None
            if end == "hang":
                await asyncio.sleep(1e9)
        finally:
            self.log.append("gone")

    async def drain(self, mode: DrainMode) -> None:
        self.log.append(mode)
        self._asked.set()

    async def kill(self) -> None:
        self.log.append("kill")


def conduct(parts: dict[str, Part]) -> tuple[float, str]:
    """Run to the end; returns when that was and the failure's report, and checks that no task is left."""

    async def run() -> tuple[float, str]:
        conductor = Conductor(RunProtocol(STAGES, DEADLINES), parts)
        report = ""
        try:
            await conductor.run()
        except RunFailedError as error:
            report = str(error)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time(), report

    return run_virtually(run())


def parts(**changed: Part) -> dict[str, Part]:
    usual = {"trainer": Part((20.0, "end")), "rollout 0": Part(), "env 0": Part(), "env 1": Part()}
    return usual | {name.replace("_", " "): part for name, part in changed.items()}


def test_a_run_ends_when_training_is_complete():
    components = parts()
    assert conduct(components) == (24.0 - 1.0, "")
    assert components["env 0"].log == components["rollout 0"].log == ["start", "finish", "gone"]


def test_a_crashed_environment_worker_ends_the_run_and_drains_the_rest():
    components = parts(trainer=Part((1e6, "end")), env_1=Part((5.0, "raise")))
    ended, report = conduct(components)
    assert "env 1 failed: EOFError: the simulator's process died" in report
    assert components["rollout 0"].log == ["start", "cut", "gone"] == components["trainer"].log
    assert ended < 40


def test_a_failed_rollout_worker_drains_the_others():
    components = parts(rollout_0=Part((5.0, "raise")))
    _, report = conduct(components)
    assert report.startswith("ended, policy version 0: rollout 0 failed: EOFError")
    assert components["env 0"].log == ["start", "cut", "gone"]


def test_what_tasks_of_a_component_raised_is_told_without_their_group():
    _, report = conduct(parts(**{"rollout 0": Part((20.0, "group"))}))
    assert "rollout 0 failed: ValueError: restarts are spent; EOFError: it is gone" in report


def test_a_component_that_does_not_start_or_end_is_named_and_killed():
    _, report = conduct(parts(trainer=Part((1e6, "end")), rollout_0=Part(start_s=1e6)))
    assert "the run waits for rollout 0 to start, since t=1.000 s (30.000 s of at most 30 s)" in report
    components = parts(rollout_0=Part(drain_s=None))
    _, report = conduct(components)
    assert "the run waits for rollout 0 to end" in report and "kill" in components["rollout 0"].log


def test_a_component_that_refuses_its_end_is_reported():
    class Refusing(Part):
        async def drain(self, mode: DrainMode) -> None:
            raise ConnectionError("no such actor")

    _, report = conduct(parts(rollout_0=Refusing()))
    assert "rollout 0 failed: it does not take its end: ConnectionError: no such actor" in report


def test_a_run_counts_the_versions_that_are_offered():
    components = parts()

    async def run() -> int:
        conductor = Conductor(RunProtocol(STAGES, DEADLINES), components)
        running = asyncio.create_task(conductor.run())
        for version in (1, 2):
            await asyncio.sleep(5)
            conductor.advanced(version)
        await running
        return conductor.protocol.version

    assert run_virtually(run()) == 2


LIVES = st.tuples(st.sampled_from([0.0, 1.0, 7.0, 40.0]), st.sampled_from(["end", "raise"]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lives=st.lists(LIVES, min_size=4, max_size=4),
    starts=st.lists(st.sampled_from([0.0, 2.0, 50.0]), min_size=4, max_size=4),
    drains=st.lists(st.sampled_from([0.0, 5.0, None]), min_size=4, max_size=4),
)
def test_any_mixture_of_accidents_ends_within_the_deadlines(lives, starts, drains):
    """Whatever comes first, the end of training or a failure, the rest is drained."""
    components = {
        name: Part(own, start_s, drain_s)
        for name, own, start_s, drain_s in zip(
            ("trainer", "rollout 0", "env 0", "env 1"), lives, starts, drains, strict=True
        )
    }

    async def run() -> float:
        conductor = Conductor(RunProtocol(STAGES, DEADLINES), components)
        try:
            await conductor.run()
        except RunFailedError as error:
            assert "failed" in str(error)
        return asyncio.get_running_loop().time()

    work_s = 40.0 + len(STAGES) * DEADLINES.start_s
    assert run_virtually(run()) <= work_s + len(STAGES) * (DEADLINES.drain_s + DEADLINES.cut_s)
