# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order: there is a next move, the order of start and drain holds, and the run ends."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from embodix_rl.scheduling.protocol import (
    Command,
    ComponentEnded,
    ComponentFailed,
    ComponentStarted,
    Deadlines,
    DrainCommand,
    KillCommand,
    Phase,
    RunProtocol,
    RunStage,
    StartCommand,
    State,
    VersionAdvanced,
)

STAGES = [
    RunStage(("weights",)),
    RunStage(("trainer",), ends_run=True),
    RunStage(("rollout 0", "rollout 1")),
    RunStage(("env 0", "env 1", "env 2"), may_end=True),
]
NAMES = [name for stage in STAGES for name in stage.components]
STAGE_OF = {name: place for place, stage in enumerate(STAGES) for name in stage.components}
LIVE = (State.STARTING, State.RUNNING, State.DRAINING)
GONE = (State.STOPPED, State.FAILED)
DEADLINES = Deadlines(start_s=10.0, drain_s=50.0, cut_s=5.0)


def protocol() -> RunProtocol:
    return RunProtocol(STAGES, DEADLINES)


class Interleavings(RuleBasedStateMachine):
    """Components that answer, fail and fall silent in any order; a model of each checks what it is told."""

    @initialize()
    def begin(self) -> None:
        self.now, self.run = 0.0, protocol()
        self.drained: dict[str, str] = {}
        self.obey(self.run.begin(self.now))

    def obey(self, commands: list[Command]) -> None:
        """Every command must make sense for the component that gets it."""
        for command in commands:
            place = STAGE_OF[command.who]
            if isinstance(command, StartCommand):
                assert self.run.states[command.who] is State.STARTING
                before = [name for name in NAMES if STAGE_OF[name] < place]
                assert all(self.run.states[name] is State.RUNNING or name in GONE for name in before if name)
            elif isinstance(command, DrainCommand):
                after = [name for name in NAMES if STAGE_OF[name] > place]
                assert all(self.run.states[name] in GONE for name in after), "producers end before consumers"
                assert self.drained.get(command.who) in (None, "finish") and command.mode == self.run.mode
                assert self.drained.get(command.who) != command.mode, "asked once for each mode"
                self.drained[command.who] = command.mode
            else:
                assert self.run.states[command.who] is not State.DRAINING

    def those(self, *states: State) -> list[str]:
        return [name for name in NAMES if self.run.states[name] in states]

    @precondition(lambda self: self.run.phase is not Phase.ENDED)
    @rule(data=st.data())
    def answers(self, data: st.DataObject) -> None:
        """A component does what it was asked to."""
        who = data.draw(st.sampled_from(self.those(*LIVE)))
        answer = ComponentStarted(who) if self.run.states[who] is State.STARTING else ComponentEnded(who)
        self.obey(self.run.handle(answer, self.now))

    @rule(who=st.sampled_from(NAMES))
    def fails(self, who: str) -> None:
        self.obey(self.run.handle(ComponentFailed(who, "killed by signal 9"), self.now))

    @rule(who=st.sampled_from(NAMES), event=st.sampled_from([ComponentStarted, ComponentEnded]))
    def speaks_late_or_twice(self, who: str, event: type) -> None:
        if self.run.states[who] in (*GONE, State.WAITING):
            before = dict(self.run.states)
            assert self.run.handle(event(who), self.now) == [] and self.run.states == before

    @rule()
    def advances(self) -> None:
        self.obey(self.run.handle(VersionAdvanced(self.run.version + 1), self.now))

    @rule(seconds=st.sampled_from([1.0, 20.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.run.tick(self.now))
        due = self.run.next_deadline()
        assert due is None or due > self.now, "a deadline that passed is dealt with"

    @invariant()
    def there_is_a_next_move(self) -> None:
        if not hasattr(self, "run"):
            return
        waits = self.those(State.STARTING, State.DRAINING)
        if self.run.phase is Phase.ENDED:
            assert not self.those(*LIVE, State.WAITING)
        elif self.run.phase is Phase.RUNNING:
            assert waits or self.those(State.RUNNING)
        else:
            assert waits, f"nobody was asked anything: {self.run.describe()}"
        assert (self.run.next_deadline() is not None) == bool(waits)

    @invariant()
    def a_failure_ends_the_run(self) -> None:
        if hasattr(self, "run") and self.run.failures:
            assert self.run.has_failed and self.run.phase in (Phase.DRAINING, Phase.ENDED)

    def teardown(self) -> None:
        """From wherever it is, silence alone ends a run that has failed."""
        if not hasattr(self, "run"):
            return
        for who in self.those(*LIVE)[:1]:
            self.obey(self.run.handle(ComponentFailed(who, "teardown"), self.now))
        for _ in range(3 * len(NAMES)):
            due = self.run.next_deadline()
            if due is None:
                break
            self.now = max(due, self.now)
            self.obey(self.run.tick(self.now))
        assert self.run.phase is Phase.ENDED, self.run.describe()


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestInterleavings = Interleavings.TestCase


class AllAtOnce(RunProtocol):
    """Drains producers and consumers together, so that somebody may wait for a component that has ended."""

    def _drain_next(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for name in [name for name in NAMES if self.states[name] in (State.STARTING, State.RUNNING)]:
            self._set(name, State.DRAINING, now)
            commands.append(DrainCommand(name, self.mode))
        if all(state in GONE for state in self.states.values()):
            self.phase = Phase.ENDED
        return commands


class Forgetful(RunProtocol):
    """Goes on to the next stage only when the one before has ended in good order."""

    def _failed(self, event: ComponentFailed, now: float) -> list[Command]:
        self._set(event.who, State.FAILED, now)
        return []


@pytest.mark.parametrize("kind", [AllAtOnce, Forgetful])
def test_the_interleavings_find_a_wrong_protocol(kind, monkeypatch):
    monkeypatch.setitem(globals(), "RunProtocol", kind)
    brief = settings(
        max_examples=200,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # a busy machine
        derandomize=True,
        phases=[Phases.generate],
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Interleavings, settings=brief)


def started() -> RunProtocol:
    """A run whose components all run."""
    run = protocol()
    commands = run.begin(0.0)
    while commands:
        commands = [more for one in commands for more in run.handle(ComponentStarted(one.who), 0.0)]
    assert run.phase is Phase.RUNNING
    return run


def test_consumers_start_before_producers():
    run, order = protocol(), []
    commands = run.begin(0.0)
    while commands:
        order.append([command.who for command in commands])
        commands = [more for one in commands for more in run.handle(ComponentStarted(one.who), 0.0)]
    assert order == [list(stage.components) for stage in STAGES]


def test_the_trainers_end_drains_producers_first():
    run, order = started(), []
    commands = run.handle(ComponentEnded("trainer"), 1.0)
    assert run.reason == "training is complete"
    while commands:
        order.append([command.who for command in commands])
        assert {command.mode for command in commands} == {"finish"}
        commands = [more for one in commands for more in run.handle(ComponentEnded(one.who), 2.0)]
    assert order == [list(STAGES[3].components), list(STAGES[2].components), ["weights"]]
    assert run.phase is Phase.ENDED and not run.has_failed


def test_a_failed_environment_worker_ends_the_run():
    run = started()
    commands = run.handle(ComponentFailed("env 1", "exit code -9"), 3.0)
    assert commands == [DrainCommand("env 0", "cut"), DrainCommand("env 2", "cut")]
    assert run.reason == "env 1 failed: exit code -9" and run.has_failed


def test_a_failed_rollout_worker_drains_the_others_at_once():
    run = started()
    commands = run.handle(ComponentFailed("rollout 1", "out of memory"), 1.0)
    assert commands == [DrainCommand(name, "cut") for name in STAGES[3].components]
    for name in STAGES[3].components:
        commands = run.handle(ComponentEnded(name), 1.0)
    assert commands == [DrainCommand("rollout 0", "cut")]


def test_ending_without_being_asked_is_a_failure_of_those_who_may_not():
    run = started()
    assert run.handle(ComponentEnded("env 0"), 1.0) == [] and run.phase is Phase.RUNNING
    run.handle(ComponentEnded("rollout 0"), 1.0)
    assert run.has_failed and "rollout 0 failed: it ended before it was asked to" in run.describe()


def test_a_silent_component_is_killed_at_its_deadline_and_named():
    run = started()
    run.handle(ComponentEnded("trainer"), 100.0)
    assert run.next_deadline() == 150.0 and run.tick(149.0) == []
    commands = run.tick(150.0) + run.tick(150.0 + DEADLINES.cut_s)
    assert [one.who for one in commands if isinstance(one, KillCommand)] == list(STAGES[3].components)
    assert run.failures[0].reason == ("the run waits for env 0 to end, since t=100.000 s (50.000 s of at most 50 s)")
    assert DrainCommand("rollout 0", "cut") in commands


def test_a_cut_overtakes_a_finish():
    run = started()
    run.handle(ComponentEnded("trainer"), 1.0)
    commands = run.handle(ComponentFailed("rollout 0", "out of memory"), 2.0)
    assert commands == [DrainCommand(name, "cut") for name in STAGES[3].components]
    assert run.next_deadline() == 2.0 + DEADLINES.cut_s


def test_nonsense_is_refused():
    run = started()
    with pytest.raises(ValueError, match=r"Components are \['weights'.*got 'env 9'"):
        run.handle(ComponentStarted("env 9"), 0.0)
    with pytest.raises(ValueError, match="Version 1 comes after 0, got 2"):
        run.handle(VersionAdvanced(2), 0.0)
    with pytest.raises(ValueError, match="unique names and one that ends the run"):
        RunProtocol([RunStage(("a",))])
    with pytest.raises(ValueError, match="unique names"):
        RunProtocol([RunStage(("a", "a"), ends_run=True)])
