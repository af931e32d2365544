# SPDX-License-Identifier: Apache-2.0
"""Progress is a line every tenth where nobody watches, and bars with the success so far where somebody does."""

from __future__ import annotations

import io

from rich.console import Console

from embodix.evaluation.episodes import plan_episodes
from embodix.evaluation.session import EvaluationProgress


def shown(num_episodes: int, *, terminal: bool) -> str:
    stream = io.StringIO()
    episodes = plan_episodes(["reach-v3", "push-v3"], num_episodes, 0)
    with EvaluationProgress(Console(file=stream, force_terminal=terminal, width=100)) as progress:
        actor = progress.begin("policy", episodes)
        for episode in episodes:
            actor.ended(episode.task, episode.task == "push-v3")
        actor.close()
    return stream.getvalue()


def test_a_file_gets_ten_lines() -> None:
    lines = shown(50, terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[4] == "policy: 50/100 episodes, 0 solved (0 %)"
    assert lines[-1] == "policy: 100/100 episodes, 50 solved (50 %)"


def test_a_terminal_gets_a_bar_for_each_task() -> None:
    text = shown(3, terminal=True)
    for part in ("policy", "push-v3", "3 solved (50 %)", "6/6"):
        assert part in text
