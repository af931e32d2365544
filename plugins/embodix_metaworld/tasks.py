# SPDX-License-Identifier: Apache-2.0
"""MetaWorld's tasks: their names, the sets that are known by a name, and what a person would tell the robot.

Named sets are MetaWorld's own MT10, MT25 and MT50, and LeRobot's four difficulties; both lists are read where they are
kept: metaworld/env_dict.py and lerobot/envs/metaworld_config.json.

Instruction length matters for training speed, because hosts pad every prompt to a fixed length; so the
instructions of a data set recorded here differ in length as instructions of people do.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

BENCHMARKS = ("MT10", "MT25", "MT50")
INSTRUCTIONS: dict[str, str] = {
    "reach-v3": "Reach",
    "drawer-close-v3": "Close the drawer",
    "button-press-topdown-v3": "Press the button from the top",
    "coffee-button-v3": "Go to the coffee machine and push the button on its front",
    "faucet-open-v3": (
        "Move your hand beside the handle of the faucet on the table and push it counter-clockwise until the "
        "faucet is open"
    ),
    "door-open-v3": (
        "In front of you stands a cabinet with a door that turns on a hinge. Reach over to its handle, hook the "
        "handle with your fingers, and pull the door towards you until it is open"
    ),
    "window-open-v3": (
        "Look for the window with a sliding pane at the back of the table. Place your closed gripper against "
        "the left side of the handle that sticks out of the pane, and then slide the pane to the right until "
        "the window is open"
    ),
    "handle-press-v3": (
        "On the table in front of you there is a box with a long handle on one of its sides. First raise your "
        "hand, then bring it right above the handle without touching the box, and finally press the handle "
        "straight down, all the way to its lowest position, and keep it there"
    ),
    "dial-turn-v3": "Put your fingers beside the knob of the dial and turn it",
}


def task_names() -> list[str]:
    """Every task of MetaWorld."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    return sorted(ALL_V3_ENVIRONMENTS)


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


def instruction_for(task: str, overrides: dict[str, str] | None = None) -> str:
    """The instruction of a MetaWorld task: the user's own, else that of `INSTRUCTIONS`, else LeRobot's description.

    Args:
        task: MetaWorld name, for example ``button-press-topdown-v3``.
        overrides: the user's own instructions by task, which win.

    Raises:
        ValueError: the task has no instruction anywhere.
    """
    instructions = {**INSTRUCTIONS, **(overrides or {})}
    if task not in instructions:
        instructions = {**upstream_descriptions(), **instructions}
    if task not in instructions:
        raise ValueError(
            f"Every task needs an instruction, and {task!r} has none. Tasks with one: {sorted(instructions)}. "
            f"Give yours as instructions={{{task!r}: 'what to do'}}."
        )
    return instructions[task]


@cache
def upstream_descriptions() -> dict[str, str]:
    """LeRobot's description of every MetaWorld task (lerobot/envs/metaworld_config.json), read without importing it."""
    spec = importlib.util.find_spec("lerobot")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    config = json.loads((folder / "envs" / "metaworld_config.json").read_text())
    return {str(task): str(text) for task, text in config["TASK_DESCRIPTIONS"].items()}
