# SPDX-License-Identifier: Apache-2.0
"""Settings of LIBERO recordings. Imports no torch."""

from dataclasses import asdict, dataclass
from typing import Any

RENDERINGS = ("upstream", "fast")
_HOW_AND_NOT_WHAT = ("root", "progress")


@dataclass(frozen=True)
class LiberoRecordSettings:
    """What to record with `embodix_libero.recorder.record_libero`.

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
        if self.noise < 0.0 or self.first_state < 0:
            raise ValueError(f"`noise` and `first_state` must not be negative, got {self.noise}, {self.first_state}.")

    def dataset_settings(self) -> dict[str, Any]:
        """What decides the content of the data set, as JSON types."""
        settings = asdict(self) | {"task_ids": list(self.task_ids)}
        return {name: value for name, value in settings.items() if name not in _HOW_AND_NOT_WHAT}
