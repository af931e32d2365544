# SPDX-License-Identifier: Apache-2.0
"""Record demonstrations of LIBERO's scripted controller into a LeRobotDataset v3, with a tokenizer beside them.

Images and states go through upstream's own processing of LIBERO observations, so that a policy sees in the data what
it sees in evaluation. The data set is written beside its place and renamed when complete.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from embodix.data.recorded_dataset import (
    RecordedDataset,
    finish_dataset,
    no_bar_per_episode,
    require_place,
    reuse_dataset,
    write_exact_quantiles,
)
from embodix.data.tokenizer import require_vocab_size
from embodix.simulation.rendering import select_gl_backend
from embodix_libero import RENDERINGS
from embodix_libero.setup import activate_libero

if TYPE_CHECKING:
    from embodix_libero.simulator import LiberoScene

FPS = 20  # robosuite's control frequency in LIBERO
NUM_STATES = 50
ACTION_NAMES = ("delta_x", "delta_y", "delta_z", "delta_rx", "delta_ry", "delta_rz", "gripper")
STATE_NAMES = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "left_finger", "right_finger")
_HOW_AND_NOT_WHAT = ("root", "progress")


@dataclass(frozen=True)
class LiberoRecordSettings:
    """What to record with `record_libero`.

    Attributes:
        root: the folder of the data set.
        task_ids: tasks of `suite`, each with `episodes_per_task` episodes.
        first_state: the first of the task's 50 initial states that is recorded; the others follow. Evaluation begins
            at state 0.
        image_size: height and width of both cameras' images, pixels.
        rendering: "upstream", or "fast" for no shadows, reflections and multisampling.
        noise: standard deviation of what is added to the executed translation, which lies in [-1, 1]; the recorded
            action is the controller's own (DART, https://arxiv.org/abs/1703.09327).
        seed: of the noise.
        storage: how images are stored, "image" (lossless) or "video" (`video_codec`).
    """

    root: str
    suite: str = "libero_spatial"
    task_ids: tuple[int, ...] = (0, 1)
    episodes_per_task: int = 5
    first_state: int = 25
    image_size: int = 128
    rendering: str = "upstream"
    noise: float = 0.2
    seed: int = 0
    storage: str = "image"
    video_codec: str = "libsvtav1"
    repo_id: str = "embodix/libero"
    vocab_size: int = 1024
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_ids", tuple(self.task_ids))
        if not self.task_ids or len(set(self.task_ids)) != len(self.task_ids):
            raise ValueError(f"`task_ids` must be different numbers of tasks, got {list(self.task_ids)}.")
        if self.storage not in ("image", "video"):
            raise ValueError(f"`storage` must be 'image' or 'video', got {self.storage!r}.")
        if self.rendering not in RENDERINGS:
            raise ValueError(f"`rendering` must be one of {list(RENDERINGS)}, got {self.rendering!r}.")
        for name in ("episodes_per_task", "image_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("noise", "first_state", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")

    def dataset_settings(self) -> dict[str, Any]:
        """What decides the content of the data set, as JSON types."""
        settings = asdict(self) | {"task_ids": list(self.task_ids)}
        return {name: value for name, value in settings.items() if name not in _HOW_AND_NOT_WHAT}


@dataclass(frozen=True)
class LiberoDemonstration:
    """A successful episode; each frame has `images` and ``observation.state`` as a policy gets them, and the action."""

    frames: list[dict[str, np.ndarray]]
    state_number: int
    num_failed: int


def record_libero(settings: LiberoRecordSettings) -> RecordedDataset:
    """Record or reuse the data set of `settings`, and print what there is.

    Raises:
        ValueError: LIBERO is not set up, a task that the controller does not know, or `root` holds something else.
        RuntimeError: nothing renders on this machine, or the controller fails in every initial state.
    """
    require_place(Path(settings.root))
    require_vocab_size(settings.vocab_size)
    activate_libero()
    select_gl_backend()
    root = Path(settings.root)
    recorded = reuse_dataset(root, settings.dataset_settings())
    if recorded is None:
        unfinished = root.with_name(root.name + ".recording")
        shutil.rmtree(unfinished, ignore_errors=True)
        recorded = finish_dataset(unfinished, root, _write_dataset(unfinished, settings), settings.vocab_size)
    Console(quiet=not settings.progress).print(recorded.sentence)
    return recorded


def _write_dataset(folder: Path, settings: LiberoRecordSettings) -> dict[str, Any]:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create(
        repo_id=settings.repo_id,
        fps=FPS,
        features=_features(settings),
        root=folder,
        robot_type="panda",
        use_videos=settings.storage == "video",
        vcodec=settings.video_codec,
    )
    episodes: list[dict[str, Any]] = []
    low_dimensional: dict[str, list[np.ndarray]] = {"observation.state": [], "action": []}
    total = len(settings.task_ids) * settings.episodes_per_task
    with no_bar_per_episode(), Progress(console=Console(quiet=not settings.progress)) as progress:
        for facts, demonstration in progress.track(_demonstrations(settings), total, description="Recording"):
            for frame in demonstration.frames:
                dataset.add_frame(frame | {"task": facts["instruction"]})
                for key, values in low_dimensional.items():
                    values.append(frame[key])
            dataset.save_episode()
            episodes.append({"episode_index": len(episodes), **facts})
    dataset.finalize()
    write_exact_quantiles(folder, {key: np.stack(values) for key, values in low_dimensional.items()})
    return {"settings": settings.dataset_settings(), "episodes": episodes}


def _features(settings: LiberoRecordSettings) -> dict[str, dict[str, Any]]:
    shape = (settings.image_size, settings.image_size, 3)
    image = {"dtype": settings.storage, "shape": shape, "names": ["height", "width", "channels"]}
    return {
        "observation.images.image": image,
        "observation.images.image2": dict(image),
        "observation.state": {"dtype": "float32", "shape": (len(STATE_NAMES),), "names": list(STATE_NAMES)},
        "action": {"dtype": "float32", "shape": (len(ACTION_NAMES),), "names": list(ACTION_NAMES)},
    }


def _demonstrations(settings: LiberoRecordSettings) -> Iterator[tuple[dict[str, Any], LiberoDemonstration]]:
    from embodix_libero.simulator import LiberoScene, task_numbers

    size = {"observation_height": settings.image_size, "observation_width": settings.image_size}
    for number in task_numbers(settings.suite, settings.task_ids):
        scene = LiberoScene(settings.suite, number, settings.rendering, obs_type="pixels_agent_pos", **size)
        state_number = settings.first_state
        for _ in range(settings.episodes_per_task):
            demonstration = _demonstrate(scene, settings, number, state_number)
            state_number = demonstration.state_number + 1
            facts = {
                "task": f"{settings.suite}/{number}",
                "instruction": scene.instruction,
                "scene_seed": demonstration.state_number,
                "num_frames": len(demonstration.frames),
                "num_failed": demonstration.num_failed,
            }
            yield facts, demonstration
        scene.close()


def _demonstrate(
    scene: "LiberoScene", settings: LiberoRecordSettings, number: int, first_state: int
) -> LiberoDemonstration:
    """The first successful episode from an initial state on."""
    for num_failed in range(NUM_STATES):
        rng = np.random.default_rng([settings.seed, number, first_state + num_failed])
        frames = _attempt(scene, first_state + num_failed, settings.noise, rng)
        if frames is not None:
            return LiberoDemonstration(frames, first_state + num_failed, num_failed)
    raise RuntimeError(
        f"The scripted controller failed in every initial state of '{scene.instruction}'. Choose another task, or "
        f"less noise (noise={settings.noise})."
    )


def _attempt(
    scene: "LiberoScene", state_number: int, noise: float, rng: np.random.Generator
) -> list[dict[str, np.ndarray]] | None:
    from embodix_libero.expert import LiberoExpert

    scene.reset(state_number)
    expert = LiberoExpert(scene.robosuite_env)
    frames = []
    for _ in range(scene.max_steps):
        action = expert.action()
        frames.append(policy_observation(scene.observation()) | {"action": action})
        executed = action.copy()
        executed[:3] += noise * rng.standard_normal(3, dtype=np.float32)
        _, success = scene.step(np.clip(executed, -1.0, 1.0))
        if success:
            return frames
    return None


def policy_observation(observation: dict[str, Any]) -> dict[str, np.ndarray]:
    """What upstream's processing makes of an observation: upright images uint8 (H, W, 3) and a state (8,).

    The state is the hand's position, its rotation as axis times angle, and both fingers; upstream's
    `LiberoProcessorStep`.
    """
    from lerobot.envs.utils import preprocess_observation
    from lerobot.processor.env_processor import LiberoProcessorStep

    processed = LiberoProcessorStep().observation(preprocess_observation(_batch_of_one(observation)))
    images = {key: value[0] for key, value in processed.items() if key.startswith("observation.images.")}
    return {
        **{key: (value * 255).round().byte().permute(1, 2, 0).numpy() for key, value in images.items()},
        "observation.state": processed["observation.state"][0].numpy(),
    }


def _batch_of_one(observation: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _batch_of_one(value) if isinstance(value, dict) else value[np.newaxis]
        for key, value in observation.items()
    }
