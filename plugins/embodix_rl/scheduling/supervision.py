# SPDX-License-Identifier: Apache-2.0
"""Which silence is a hang, and how many restarts an hour are too many. Pure logic: time comes as an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HOUR_S = 3600.0


class RestartBudget:
    """At most `per_hour` restarts in any sliding hour.

    Raises:
        ValueError: a negative budget.
    """

    def __init__(self, per_hour: int) -> None:
        if per_hour < 0:
            raise ValueError(f"Restarts per hour must be 0 or more, got {per_hour}.")
        self._per_hour = per_hour
        self._spent: deque[float] = deque()
        self.total = 0

    def spend(self, now: float) -> bool:
        """Whether one more restart is allowed at `now`; if so, it counts."""
        while self._spent and self._spent[0] <= now - HOUR_S:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return False
        self._spent.append(now)
        self.total += 1
        return True

    def describe(self, now: float) -> str:
        """What was spent, for a person."""
        recent = sum(moment > now - HOUR_S for moment in self._spent)
        return f"{recent} of {self._per_hour} restarts in the last hour, {self.total} in all"


@dataclass(frozen=True)
class Silence:
    """A component that should have reported by now.

    Attributes:
        who: its name.
        doing: what it said it would do.
        since: its last report.
        deadline_s: how long that may take.
    """

    who: str
    doing: str
    since: float
    deadline_s: float

    def describe(self, now: float) -> str:
        """One line for a person."""
        silent_s = now - self.since
        return f"{self.who} has been silent for {silent_s:.1f} s of at most {self.deadline_s:g} s, last: {self.doing}"


class Heartbeats:
    """The last report of each component, and until when the next is due.

    Times are the watcher's own, taken at the receipt of a report, so clocks of two machines are never compared.

    Args:
        deadline_s: the longest silence where a report names no other.
    """

    def __init__(self, deadline_s: float) -> None:
        if deadline_s <= 0:
            raise ValueError(f"`deadline_s` must be positive, got {deadline_s}.")
        self._deadline_s = deadline_s
        self._last: dict[str, Silence] = {}

    def beat(self, who: str, now: float, doing: str = "alive", deadline_s: float | None = None) -> None:
        """`who` reports: it now does `doing`, which may take `deadline_s` (a reset or a compilation takes longer)."""
        self._last[who] = Silence(who, doing, now, self._deadline_s if deadline_s is None else deadline_s)

    def forget(self, who: str) -> None:
        """`who` has ended or is being restarted."""
        self._last.pop(who, None)

    def overdue(self, now: float) -> list[Silence]:
        """Those that hang, the longest overdue first."""
        late = [silence for silence in self._last.values() if now >= silence.since + silence.deadline_s]
        return sorted(late, key=lambda silence: (silence.since + silence.deadline_s, silence.who))

    def next_deadline(self) -> float | None:
        """When `overdue` can next have something to say."""
        return min((silence.since + silence.deadline_s for silence in self._last.values()), default=None)
