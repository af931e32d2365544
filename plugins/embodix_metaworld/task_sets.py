# SPDX-License-Identifier: Apache-2.0
"""Named sets of MetaWorld tasks: MetaWorld's own MT10, MT25 and MT50, and LeRobot's four difficulties.

Both lists are read where they are kept: metaworld/env_dict.py and lerobot/envs/metaworld_config.json.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from embodix_metaworld.scene import task_names

BENCHMARKS = ("MT10", "MT25", "MT50")


def task_sets() -> dict[str, tuple[str, ...]]:
    """Every named set with its tasks, in the order of its source."""
    from lerobot.envs.metaworld import DIFFICULTY_TO_TASKS
    from metaworld import env_dict

    benchmarks = {name: tuple(getattr(env_dict, f"{name}_V3")) for name in BENCHMARKS}
    return benchmarks | {name: tuple(tasks) for name, tasks in DIFFICULTY_TO_TASKS.items()}


def expand_tasks(tasks: str | Sequence[str]) -> tuple[str, ...]:
    """The tasks that a config names, each once, in the order in which they are named.

    Args:
        tasks: task names and set names, as a list or as upstream's comma-separated string; sets in any case.

    Raises:
        ValueError: no name, or one that is neither a task nor a set; the message has the nearest ones.
    """
    words = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names = [word.strip() for word in words if word.strip()]
    if not names:
        raise ValueError(f"env.task needs at least one MetaWorld task or set of tasks; got {tasks!r}.")
    sets = {name.casefold(): members for name, members in task_sets().items()}
    known = set(task_names())
    expanded: dict[str, None] = {}
    for name in names:
        members = sets.get(name.casefold(), (name,) if name in known else None)
        if members is None:
            raise ValueError(_unknown(name))
        expanded |= dict.fromkeys(members)
    return tuple(expanded)


def _unknown(name: str) -> str:
    candidates = [*task_names(), *task_sets()]
    nearest = difflib.get_close_matches(name, candidates, n=3) or difflib.get_close_matches(f"{name}-v3", candidates)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"tasks: {', '.join(task_names())}."
    return f"{name!r} is no MetaWorld task and no set of tasks ({', '.join(task_sets())}); {hint}"
