# SPDX-License-Identifier: Apache-2.0
"""A scripted controller for LIBERO's tasks of putting a black bowl on something, which sees the whole state.

It checks the simulator and the evaluation, not a policy: it grasps the bowl by its rim, lifts it, carries it over its
destination, lowers it and lets go.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BOWL = "akita_black_bowl"
RIM_RADIUS = 0.048  # metres, of the middle of the bowl's wall
GRASP_HEIGHT = 0.038  # metres above the bowl's frame, below the rim's upper edge at 0.052
RELEASE_HEIGHT = 0.012  # metres of the bowl's frame above the destination's
CLEARANCE = 0.12  # metres above the grasp when moving sideways
FINGER_REACH = 0.045  # metres that an open finger stands off from the middle between both
FURNITURE_RADIUS = 0.12  # metres
MAX_HEIGHT_BESIDE = 0.1  # metres that the bowl is above what it stands on rather than beside
TOLERANCE = 0.008  # metres
MAX_STEPS_A_WAYPOINT = 60
NUM_GRIP_STEPS = 12
STEP_LENGTH = 0.05  # metres that the controller takes an action of 1 for
OPEN, CLOSED = -1.0, 1.0


class LiberoExpert:
    """The controller of one episode, made after its reset.

    Args:
        robosuite_env: LIBERO's environment.

    Raises:
        ValueError: the task is another than to put a black bowl on something.
    """

    def __init__(self, robosuite_env: Any) -> None:
        goals = robosuite_env.parsed_problem["goal_state"]
        if len(goals) != 1 or goals[0][0] != "on" or not goals[0][1].startswith(BOWL):
            raise ValueError(
                f"The scripted controller only puts a black bowl on something, but the task's goal is {goals}. "
                "All tasks of libero_spatial are of this kind."
            )
        self._env = robosuite_env
        self._bowl, self._destination = goals[0][1:]
        self._actions = self._script()

    def action(self) -> np.ndarray:
        """The next action, float32 (7,): translation, no rotation, gripper."""
        return next(self._actions)

    def _script(self) -> Iterator[np.ndarray]:
        rim = self._clearer_side() * RIM_RADIUS + np.array([0.0, 0.0, GRASP_HEIGHT])
        above = np.array([0.0, 0.0, CLEARANCE])
        yield from self._move(lambda: self._position(self._bowl) + rim + above, OPEN)
        yield from self._move(lambda: self._position(self._bowl) + rim, OPEN)
        yield from self._hold(CLOSED, NUM_GRIP_STEPS)
        lifted = self._hand() + above
        yield from self._move(lambda: lifted, CLOSED)
        release = np.array([0.0, 0.0, RELEASE_HEIGHT])
        yield from self._move(lambda: self._carrying_to(release + above), CLOSED)
        yield from self._move(lambda: self._carrying_to(release), CLOSED)
        yield from self._hold(OPEN, NUM_GRIP_STEPS)
        retreated = self._hand() + above
        yield from self._move(lambda: retreated, OPEN)
        while True:
            yield from self._hold(OPEN, 1)

    def _move(self, target: Callable[[], np.ndarray], gripper: float) -> Iterator[np.ndarray]:
        for _ in range(MAX_STEPS_A_WAYPOINT):
            way = target() - self._hand()
            if np.linalg.norm(way) < TOLERANCE:
                return
            yield _action(np.clip(way / STEP_LENGTH, -1.0, 1.0), gripper)

    def _hold(self, gripper: float, num_steps: int) -> Iterator[np.ndarray]:
        for _ in range(num_steps):
            yield _action(np.zeros(3), gripper)

    def _carrying_to(self, offset: np.ndarray) -> np.ndarray:
        """Where the hand must be for the bowl to be at `offset` from its destination."""
        return self._position(self._destination) + offset + self._hand() - self._position(self._bowl)

    def _clearer_side(self) -> np.ndarray:
        """The horizontal direction, of the two that the fingers open along, in which less stands beside the bowl."""
        hand = self._env.robots[0].eef_site_id
        along = self._env.sim.data.site_xmat[hand].reshape(3, 3)[:, 0] * np.array([1.0, 1.0, 0.0])
        along /= np.linalg.norm(along)
        bowl = self._position(self._bowl)

        def room(side: np.ndarray) -> float:
            outer_finger = bowl + side * (RIM_RADIUS + FINGER_REACH)
            return min(self._distance_beside(outer_finger, name) for name in self._env.obj_body_id)

        return max((along, -along), key=room)

    def _distance_beside(self, point: np.ndarray, name: str) -> float:
        """Metres from a point to what may stand in the way there; furniture is large, and some is below the bowl."""
        is_below = self._position(self._bowl)[2] - self._position(name)[2] > MAX_HEIGHT_BESIDE
        if name in (self._bowl, self._destination) or is_below:
            return np.inf
        radius = FURNITURE_RADIUS if self._env.is_fixture(name) else 0.0
        return float(np.linalg.norm((point - self._position(name))[:2])) - radius

    def _hand(self) -> np.ndarray:
        return np.array(self._env.sim.data.site_xpos[self._env.robots[0].eef_site_id])

    def _position(self, name: str) -> np.ndarray:
        return np.array(self._env.sim.data.body_xpos[self._env.obj_body_id[name]])


def _action(translation: np.ndarray, gripper: float) -> np.ndarray:
    return np.concatenate([translation, np.zeros(3), [gripper]]).astype(np.float32)
