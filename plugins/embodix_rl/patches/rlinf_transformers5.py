# SPDX-License-Identifier: Apache-2.0
"""Let RLinf's actor be imported beside transformers 5."""

from __future__ import annotations

from collections.abc import Callable

from embodix.patching import Patch

PATCH = Patch(
    name="rlinf_transformers5",
    target="transformers.AutoModelForVision2Seq",
    requires={"rlinf": ">=0.3.0,<0.3.1", "transformers": ">=5,<6"},
    symptom="rlinf.hybrid_engines.fsdp imports a class that transformers 5 has renamed, so no actor can be imported.",
    upstream="renamed in RLinf's main branch after 0.3.0",
    why_safe="transformers' own successor of the class under its earlier name; LeRobot's policies never use it",
    remove_when="RLinf imports AutoModelForImageTextToText",
)


def apply() -> Callable[[], None]:
    """Give the class its earlier name as well; returns the undo."""
    import transformers

    name = "AutoModelForVision2Seq"
    setattr(transformers, name, transformers.AutoModelForImageTextToText)
    return lambda: delattr(transformers, name)
