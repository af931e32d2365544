# SPDX-License-Identifier: Apache-2.0
"""LIBERO (https://arxiv.org/abs/2306.03310) for the evaluation engine: upstream's configuration, seeds honoured.

Registered as ``env.type=embodix_libero``. Features, keys and processing are those of LeRobot's own ``libero``, so that
a checkpoint trained for that is evaluated unchanged. Importing this module does not need LIBERO; building a simulator
does.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lerobot.envs.configs import EnvConfig
from lerobot.envs.configs import LiberoEnv as UpstreamLiberoConfig

from embodix.contracts import SimulatorStatus
from embodix.simulation.rendering import select_gl_backend
from embodix_libero import RENDERINGS
from embodix_libero.setup import WHAT_TO_DO, activate_libero, inspect_libero

if TYPE_CHECKING:
    from embodix_libero.simulator import LiberoSimulator

# Fields that upstream's config and its environment call alike.
SIMULATOR_SETTINGS = (
    "episode_length",
    "camera_name",
    "obs_type",
    "observation_width",
    "observation_height",
    "init_states",
    "camera_name_mapping",
    "control_mode",
)
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


@EnvConfig.register_subclass("embodix_libero")
@dataclass
class EmbodixLiberoConfig(UpstreamLiberoConfig):
    """LeRobot's configuration of LIBERO, and how it is rendered.

    `task` is a suite out of `SUITES`, or several with commas between; `task_ids` picks tasks of each by number.
    Images are 256 pixels high and wide: upstream's config says 360, but upstream's `make_env` does not pass that on.
    `render` is "upstream", whose images are upstream's to the bit, or "fast", without shadows, reflections and
    multisampling: scores of the two cannot be compared.

    Raises:
        ValueError: unknown suite or rendering.
    """

    task: str = "libero_spatial"
    observation_height: int = 256
    observation_width: int = 256
    render: str = "upstream"

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.suites) - set(SUITES))
        if unknown or not self.suites:
            raise ValueError(f"`task` must name LIBERO suites out of {list(SUITES)}, got {self.task!r}.")
        if self.render not in RENDERINGS:
            raise ValueError(f"`render` must be one of {list(RENDERINGS)}, got {self.render!r}.")

    @property
    def suites(self) -> tuple[str, ...]:
        """The names in `task`."""
        return tuple(name.strip() for name in self.task.split(",") if name.strip())

    @staticmethod
    def status() -> SimulatorStatus:
        """Which LIBERO is set up, and where its assets are from."""
        state = inspect_libero()
        found = f"hf-libero {state.version}, assets from {state.origin or 'nowhere'}" if state.version else ""
        return SimulatorStatus(found, state.problem and f"{state.problem}. {WHAT_TO_DO}")

    @staticmethod
    def problems(fields: Mapping[str, Any]) -> list[str]:
        """Why LIBERO can't run, whatever the fields."""
        problem = EmbodixLiberoConfig.status().problem
        return [problem] if problem else []

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """What upstream's `make_env` passes to its own environment, which renders in its own way only."""
        if self.render != "upstream":
            raise ValueError(
                f"LeRobot's own LIBERO environment cannot render {self.render!r}; use render=upstream, or run it by "
                "`lerobot eval`."
            )
        return super().gym_kwargs | {
            "observation_height": self.observation_height,
            "observation_width": self.observation_width,
        }

    def simulators(self) -> "LiberoSimulators":
        """The tasks of the configured suites.

        Raises:
            ValueError: LIBERO is not set up, or has no such task.
            RuntimeError: no OpenGL backend renders on this machine.
        """
        activate_libero()
        select_gl_backend()
        from embodix_libero.simulator import task_numbers

        if self.render != "upstream":
            logging.getLogger(__name__).warning(
                "LIBERO is rendered without shadows, reflections and multisampling (render=%s): scores cannot be "
                "compared with those of other renderings, or with published ones.",
                self.render,
            )
        return LiberoSimulators(
            self, tuple(f"{suite}/{number}" for suite in self.suites for number in task_numbers(suite, self.task_ids))
        )


@dataclass(frozen=True)
class LiberoSimulators:
    """Which LIBERO tasks to simulate, named ``suite/number``; goes to worker processes."""

    env_cfg: EmbodixLiberoConfig
    tasks: tuple[str, ...]

    def build(self, task: str) -> "LiberoSimulator":
        """Load a task, which takes seconds.

        Raises:
            ValueError: LIBERO is not set up.
            RuntimeError: no OpenGL backend renders on this machine.
        """
        activate_libero()
        select_gl_backend()
        from embodix_libero.simulator import LiberoSimulator

        suite, _, number = task.rpartition("/")
        cfg = self.env_cfg
        settings = {name: getattr(cfg, name) for name in SIMULATOR_SETTINGS}
        return LiberoSimulator(suite, int(number), cfg.render, cfg.fps, **settings)
