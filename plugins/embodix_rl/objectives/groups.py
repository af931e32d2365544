# SPDX-License-Identifier: Apache-2.0
"""How many of GRPO's groups teach nothing, and what may be done with them; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

TREATMENTS = ("count", "leave_out")


@dataclass(frozen=True)
class GroupCount:
    """Groups that were compared, and the even ones among them; ``+`` gives those of both."""

    even: int = 0
    compared: int = 0

    def __add__(self, other: GroupCount) -> GroupCount:
        return GroupCount(self.even + other.even, self.compared + other.compared)

    def metrics(self) -> dict[str, float]:
        """The share of even groups; nothing where none was compared."""
        return {"rollout/even_group_share": self.even / self.compared} if self.compared else {}
