# SPDX-License-Identifier: Apache-2.0
"""One protocol for start, advance, drain and failure of a run's components, as a state machine without time or tasks.

Components stand in stages, consumers before producers: weight exchange, trainer, rollout workers, environment workers.

- *start*: stage by stage; a stage starts when all before it run, so nothing is produced that nobody takes.
- *advance*: the trainer announces each policy version, one after the other.
- *drain*: stage by stage from the last: environment workers end their trajectories, rollout workers answer them, then
  the trainer ends, then the weight exchange. A run drains when the trainer ends.
- *failure*: it drains the rest with ``cut``: trajectories end at once, unfinished. A component that does not answer
  within its deadline has failed, in whatever state it is; one that does not end is killed.

Events go in by `handle`, commands come out; `Conductor` executes them on asyncio. Every state but the last has either
a deadline or a component that runs, so there is always a next move; the tests walk through interleavings to hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

DrainMode = Literal["finish", "cut"]


class State(StrEnum):
    """Of one component."""

    WAITING = "waiting"  # for its stage
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Phase(StrEnum):
    """Of the run."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class RunStage:
    """Components that start and drain together.

    Attributes:
        components: their names.
        may_end: a component may end before it is asked to: an environment worker when the run needs no more samples.
        ends_run: the run is complete when these have ended: the trainer.
    """

    components: tuple[str, ...]
    may_end: bool = False
    ends_run: bool = False


@dataclass(frozen=True)
class ComponentStarted:
    """A component runs."""

    who: str


@dataclass(frozen=True)
class VersionAdvanced:
    """The trainer offers a policy version."""

    version: int


@dataclass(frozen=True)
class ComponentEnded:
    """A component has ended, asked or by itself."""

    who: str


@dataclass(frozen=True)
class ComponentFailed:
    """A component has failed, or is taken to have."""

    who: str
    reason: str


RunEvent = ComponentStarted | VersionAdvanced | ComponentEnded | ComponentFailed


@dataclass(frozen=True)
class StartCommand:
    """Start a component."""

    who: str


@dataclass(frozen=True)
class DrainCommand:
    """Ask a component to end; one that still starts ends as soon as it has."""

    who: str
    mode: DrainMode


@dataclass(frozen=True)
class KillCommand:
    """End a component without asking."""

    who: str


Command = StartCommand | DrainCommand | KillCommand


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a component may take.

    Attributes:
        start_s: to start.
        drain_s: to end when asked with ``finish``: at least a trajectory, or a global batch's training.
        cut_s: to end when asked with ``cut``: at least a chunk step.
    """

    start_s: float = 600.0
    drain_s: float = 1800.0
    cut_s: float = 120.0


class RunProtocol:
    """The state of a run.

    Args:
        stages: in the order of starting; names are unique.
        deadlines: of the components.
        version: that the run begins with.

    Raises:
        ValueError: no stage ends the run, or a name occurs twice.
    """

    def __init__(self, stages: Sequence[RunStage], deadlines: Deadlines | None = None, version: int = 0) -> None:
        names = [name for stage in stages for name in stage.components]
        if len(set(names)) < len(names) or not any(stage.ends_run for stage in stages):
            raise ValueError(f"Stages need unique names and one that ends the run; got {list(stages)}.")
        self._stages, self._deadlines = list(stages), deadlines or Deadlines()
        self._stage_of = {name: stage for stage in stages for name in stage.components}
        self.states = dict.fromkeys(names, State.WAITING)
        self._since = dict.fromkeys(names, 0.0)
        self.phase, self.version = Phase.STARTING, version
        self.mode: DrainMode = "finish"
        self.reason: str | None = None
        self.failures: list[ComponentFailed] = []

    @property
    def has_failed(self) -> bool:
        """Whether the run ends because of a failure."""
        return self.mode == "cut"

    def begin(self, now: float) -> list[Command]:
        """Start the first stage."""
        return self._go_on(now)

    def handle(self, event: RunEvent, now: float) -> list[Command]:
        """What to do now that `event` has happened. Late news of components that are gone changes nothing.

        Raises:
            ValueError: an unknown component, or a version that is not the next one.
        """
        if isinstance(event, VersionAdvanced):
            if event.version != self.version + 1:
                raise ValueError(f"Version {self.version + 1} comes after {self.version}, got {event.version}.")
            self.version = event.version
            return []
        if event.who not in self.states:
            raise ValueError(f"Components are {list(self.states)}, got {event.who!r}.")
        if self.states[event.who] in (State.STOPPED, State.FAILED, State.WAITING):
            return []
        if isinstance(event, ComponentStarted):
            return self._started(event.who, now)
        return self._ended(event.who, now) if isinstance(event, ComponentEnded) else self._failed(event, now)

    def tick(self, now: float) -> list[Command]:
        """Have deadlines that passed count as failures."""
        commands: list[Command] = []
        for who, state in list(self.states.items()):
            limit = self._limit_s(who)
            if limit is None or now < self._since[who] + limit:
                continue
            asked = "start" if state is State.STARTING else "end"
            reason = (
                f"the run waits for {who} to {asked}, since t={self._since[who]:.3f} s "
                f"({now - self._since[who]:.3f} s of at most {limit:g} s)"
            )
            commands += [KillCommand(who), *self.handle(ComponentFailed(who, reason), now)]
        return commands

    def next_deadline(self) -> float | None:
        """When `tick` can next have something to do."""
        limits = ((who, self._limit_s(who)) for who in self.states)
        return min((self._since[who] + limit for who, limit in limits if limit is not None), default=None)

    def describe(self) -> str:
        """How a run ended, or how far it is, for a person."""
        lines = [f"{self.phase}, policy version {self.version}" + (f": {self.reason}" if self.reason else "")]
        lines += [f"{who}: {state}" for who, state in self.states.items()]
        return "\n".join([*lines, *(f"{failure.who} failed: {failure.reason}" for failure in self.failures)])

    def _started(self, who: str, now: float) -> list[Command]:
        if self.states[who] is State.STARTING:
            self._set(who, State.RUNNING, now)
        return self._go_on(now)

    def _ended(self, who: str, now: float) -> list[Command]:
        stage, asked = self._stage_of[who], self.states[who] is State.DRAINING
        if not (asked or stage.may_end or stage.ends_run):
            return self._failed(ComponentFailed(who, "it ended before it was asked to"), now)
        self._set(who, State.STOPPED, now)
        if stage.ends_run and all(self.states[name] is State.STOPPED for name in stage.components):
            return self._drain("finish", "training is complete", now)
        return self._go_on(now)

    def _failed(self, event: ComponentFailed, now: float) -> list[Command]:
        self.failures.append(event)
        self._set(event.who, State.FAILED, now)
        return self._drain("cut", f"{event.who} failed: {event.reason}", now)

    def _drain(self, mode: DrainMode, reason: str, now: float) -> list[Command]:
        """Begin to drain, or make the draining that goes on a cut."""
        if self.phase is Phase.ENDED or (self.phase is Phase.DRAINING and (mode == "finish" or self.mode == "cut")):
            return self._go_on(now)
        self.reason = reason if self.reason is None or mode == "cut" else self.reason
        self.mode, self.phase = mode, Phase.DRAINING
        for who, state in self.states.items():
            if state is State.WAITING:
                self._set(who, State.STOPPED, now)
        asked = [who for who, state in self.states.items() if state is State.DRAINING]
        for who in asked:  # those that were asked to finish are now asked to cut
            self._since[who] = now
        return [*(DrainCommand(who, mode) for who in asked), *self._go_on(now)]

    def _go_on(self, now: float) -> list[Command]:
        """The next stage to start or to drain, when the one before has done so."""
        if self.phase is Phase.STARTING:
            return self._start_next(now)
        return self._drain_next(now) if self.phase is Phase.DRAINING else []

    def _start_next(self, now: float) -> list[Command]:
        for stage in self._stages:
            states = {self.states[name] for name in stage.components}
            if states & {State.STARTING}:
                return []
            if states == {State.WAITING}:
                for name in stage.components:
                    self._set(name, State.STARTING, now)
                return [StartCommand(name) for name in stage.components]
        self.phase = Phase.RUNNING
        return []

    def _drain_next(self, now: float) -> list[Command]:
        for stage in reversed(self._stages):
            live = [name for name in stage.components if self.states[name] not in (State.STOPPED, State.FAILED)]
            asked = [name for name in live if self.states[name] is not State.DRAINING]
            for name in asked:
                self._set(name, State.DRAINING, now)
            if live:
                return [DrainCommand(name, self.mode) for name in asked]
        self.phase = Phase.ENDED
        return []

    def _set(self, who: str, state: State, now: float) -> None:
        self.states[who], self._since[who] = state, now

    def _limit_s(self, who: str) -> float | None:
        state, deadlines = self.states[who], self._deadlines
        if state is State.STARTING:
            return deadlines.start_s
        if state is State.DRAINING:
            return deadlines.drain_s if self.mode == "finish" else deadlines.cut_s
        return None
