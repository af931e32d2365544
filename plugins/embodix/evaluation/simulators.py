# SPDX-License-Identifier: Apache-2.0
"""What the evaluation engine asks of a simulator, and the simulators of a LeRobot environment config.

Importing this module imports neither torch nor LeRobot: worker processes do, and start faster without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodix.contracts import Simulators


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one action. `done` ends the episode; so does the simulator's `max_steps`."""

    reward: float
    success: bool
    done: bool


class SimulatorError(RuntimeError):
    """A simulator can't be set up here, or fails again and again."""


def simulators_of(env_cfg: Any) -> Simulators:
    """The simulators of a LeRobot environment config.

    A config with a method `simulators()` decides itself; any other runs through LeRobot's own `make_env`.

    Raises:
        ValueError: an environment of LeRobot that ignores seeds; the message says what to use instead.
    """
    if hasattr(env_cfg, "simulators"):
        simulators: Simulators = env_cfg.simulators()
        return simulators
    from embodix.evaluation.gym_simulators import GymSimulators

    return GymSimulators.of(env_cfg)
