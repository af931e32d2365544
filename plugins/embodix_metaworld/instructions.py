# SPDX-License-Identifier: Apache-2.0
"""Instructions of the MetaWorld tasks: what a person would tell the robot, from one word to about fifty.

Instruction length matters for training speed, because hosts pad every prompt to a fixed length; so the
instructions of a data set recorded here differ in length as instructions of people do.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

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
