# SPDX-License-Identifier: Apache-2.0
"""Give each sample of a GR00T-N1.5 batch its own instruction, its own cameras and its whole state.

Shape suffixes: B samples, D dimensions, V cameras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_groot_samples",
    target="lerobot.policies.groot.processor_groot: GrootPackInputsStep.__call__, GrootEagleEncodeStep.__call__",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="every sample of a batch gets the first sample's instruction, and a camera that `camera_is_pad` marks "
    "absent is encoded as a real image; dimensions of state and action above max_state_dim and max_action_dim are cut "
    "off, and a state that is not finite is encoded, without a word.",
    upstream="none known: both steps take lang[0], and camera_is_pad is embodix's own key",
    why_safe="upstream's steps run unchanged, one sample at a time; for a batch of one sample nothing changes",
    remove_when="both steps keep the instructions apart, and absent cameras have a key upstream",
)

CAMERA_PAD_KEY = "camera_is_pad"  # [B, V], a column for each camera in the batch's order
VIDEO_PAD_KEY = "video_is_pad"  # the same in the order in which upstream stacks the cameras; gone after encoding
LANGUAGES = ("per_sample", "upstream")


def apply(*, language: str = "per_sample") -> Callable[[], None]:
    """Wrap upstream's steps; returns the undo.

    Args:
        language: ``per_sample``, or ``upstream`` to leave every sample the first one's instruction.

    Raises:
        ValueError: another ``language``.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}.")
    from lerobot.policies.groot.processor_groot import GrootEagleEncodeStep, GrootPackInputsStep

    pack = _packing(GrootPackInputsStep.__call__, own_instructions=language == "per_sample")
    undo_pack = replace_attribute(GrootPackInputsStep, "__call__", pack)
    undo_encode = replace_attribute(GrootEagleEncodeStep, "__call__", _encoding(GrootEagleEncodeStep.__call__))

    def undo() -> None:
        undo_encode()
        undo_pack()

    return undo


def _packing(upstream: Callable[..., Any], own_instructions: bool) -> Callable[..., Any]:
    from lerobot.types import TransitionKey

    def instruction(step: Any, task: str) -> str:
        """Upstream's default and formalisation of one task; without observations it does little else."""
        alone = {TransitionKey.OBSERVATION: {}, TransitionKey.COMPLEMENTARY_DATA: {step.language_key: task}}
        return str(upstream(step, alone)[TransitionKey.COMPLEMENTARY_DATA]["language"])

    def __call__(self: Any, transition: Any) -> Any:  # noqa: N807
        tasks = (transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get(self.language_key)
        absent_BV = _absent_cameras(transition)
        _require_whole(self, transition)
        packed = upstream(self, transition)
        data = packed[TransitionKey.COMPLEMENTARY_DATA]
        if own_instructions and isinstance(tasks, list) and tasks:
            data["language"] = [instruction(self, task) for task in tasks]
        if absent_BV is not None:
            data[VIDEO_PAD_KEY] = absent_BV
        return packed

    return __call__


def _require_whole(step: Any, transition: Any) -> None:
    """Refuse a state or an action that upstream would cut, and a state that is not finite."""
    import torch
    from lerobot.types import TransitionKey
    from lerobot.utils.constants import ACTION, OBS_STATE

    from embodix.data.preprocessing import require_finite_state

    state = (transition.get(TransitionKey.OBSERVATION) or {}).get(OBS_STATE)
    limits = {OBS_STATE: (state, "max_state_dim"), ACTION: (transition.get(TransitionKey.ACTION), "max_action_dim")}
    for key, (values, field) in limits.items():
        if isinstance(values, torch.Tensor) and values.shape[-1] > getattr(step, field):
            raise ValueError(
                f"{key} has {values.shape[-1]} dimensions and policy.{field} is {getattr(step, field)}: the others "
                f"would be cut off. Set policy.{field}={values.shape[-1]} for a policy trained from scratch, or choose "
                "a data set of fewer dimensions."
            )
    if isinstance(state, torch.Tensor):
        require_finite_state(OBS_STATE, state, transition.get(TransitionKey.COMPLEMENTARY_DATA) or {})


def _absent_cameras(transition: Any) -> Any:
    """``[B, V]`` on the host in the order in which upstream stacks the cameras, None where no mark is given."""
    from lerobot.types import TransitionKey
    from lerobot.utils.constants import OBS_IMAGES

    mask = (transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get(CAMERA_PAD_KEY)
    if mask is None:
        return None
    cameras = [key for key in transition.get(TransitionKey.OBSERVATION) or {} if key.startswith(OBS_IMAGES)]
    mask_BV = mask.detach().cpu().bool()
    if mask_BV.ndim != 2 or mask_BV.shape[1] != len(cameras):
        raise ValueError(
            f"{CAMERA_PAD_KEY} needs one column a camera; got shape {tuple(mask_BV.shape)} for "
            f"{len(cameras)} cameras: {', '.join(cameras) or 'none'}."
        )
    blind = mask_BV.all(dim=1).nonzero().flatten().tolist()
    if blind:
        raise ValueError(
            f"Every sample needs one camera at least; {CAMERA_PAD_KEY} marks all cameras absent for samples {blind} "
            "of the batch. Remove those frames from the dataset."
        )
    return mask_BV[:, [cameras.index(key) for key in sorted(cameras)]]


def _encoding(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from lerobot.types import TransitionKey

    def __call__(self: Any, transition: Any) -> Any:  # noqa: N807
        data = transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}
        video = (transition.get(TransitionKey.OBSERVATION) or {}).get("video")
        absent_BV = data.pop(VIDEO_PAD_KEY, None)
        if video is None:
            return upstream(self, transition)
        instructions = _one_a_sample(data.get("language"), len(video))
        contents = []
        for index, instruction in enumerate(instructions):
            shown = slice(None) if absent_BV is None else (~absent_BV[index]).numpy()
            alone = {
                TransitionKey.OBSERVATION: {"video": video[index : index + 1][:, :, shown]},
                TransitionKey.COMPLEMENTARY_DATA: {"language": instruction},
            }
            contents += upstream(self, alone)[TransitionKey.COMPLEMENTARY_DATA]["eagle_content"]
        data["eagle_content"] = contents
        transition[TransitionKey.COMPLEMENTARY_DATA] = data
        return transition

    return __call__


def _one_a_sample(language: Any, batch_size: int) -> list[Any]:
    if not isinstance(language, list):
        return [language] * batch_size
    if len(language) != batch_size:
        raise ValueError(
            f"A batch has one task for each sample; got {len(language)} tasks for {batch_size} samples. "
            "Give `task` as a list of that length, or language=upstream to use the first for all."
        )
    return language
