# SPDX-License-Identifier: Apache-2.0
"""Make a failed or partial load of π0.5 weights an error."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from embodix.patching import Patch

PATCH = Patch(
    name="lerobot_pi05_strict_load",
    target="lerobot.policies.pi05.modeling_pi05.PI05Policy.from_pretrained",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="weights that are missing, unreadable or of another size are reported by a printed line, and training "
    "goes on from random weights.",
    upstream="none known: from_pretrained catches every exception",
    why_safe="upstream's method runs unchanged; its outcome is checked afterwards",
    remove_when="from_pretrained raises by itself",
)


@dataclass(frozen=True)
class LoadReport:
    """What a state dict lacks, has too much, or has in another shape."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


def compare_state(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> LoadReport:
    """Compare two state dicts by name and shape."""
    return LoadReport(
        missing=sorted(set(wanted) - set(given)),
        unexpected=sorted(set(given) - set(wanted)),
        mismatched=[
            f"{name}: checkpoint {tuple(given[name].shape)}, policy {tuple(wanted[name].shape)}"
            for name in sorted(set(wanted) & set(given))
            if given[name].shape != wanted[name].shape
        ],
    )


def apply() -> Callable[[], None]:
    """Check upstream's ``from_pretrained``; returns the undo."""
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    original = PI05Policy.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, pretrained_name_or_path: Any, **kwargs: Any) -> Any:
        printed = io.StringIO()
        with _recorded_loads(cls) as reports, contextlib.redirect_stdout(_Tee(sys.stdout, printed)):
            policy = original.__get__(None, cls)(pretrained_name_or_path, **kwargs)
        _require_complete(str(pretrained_name_or_path), reports, printed.getvalue())
        return policy

    PI05Policy.from_pretrained = classmethod(from_pretrained)

    def undo() -> None:
        PI05Policy.from_pretrained = original

    return undo


@contextlib.contextmanager
def _recorded_loads(cls: Any) -> Any:
    """Compare every state dict that is loaded into the class meanwhile; yields the growing list of reports."""
    reports: list[LoadReport] = []
    own = cls.__dict__.get("load_state_dict")
    inherited = cls.load_state_dict

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        reports.append(compare_state(self.state_dict(), state_dict))
        return inherited(self, state_dict, *args, **kwargs)

    cls.load_state_dict = load_state_dict
    try:
        yield reports
    finally:
        if own is None:
            del cls.load_state_dict
        else:
            cls.load_state_dict = own


def _require_complete(source: str, reports: list[LoadReport], printed: str) -> None:
    from embodix.checkpoints.skeleton import WeightLoadError, listed

    said = "\n".join(line for line in printed.splitlines() if "ould not load" in line)
    if not reports:
        raise WeightLoadError(
            f"No weights were loaded from {source}: its model.safetensors is absent or unreadable.\n{said}\n"
            "Check the path, or train from scratch with policy.pretrained_path=null."
        )
    report = reports[-1]
    if not report.complete:
        parts = {"missing": report.missing, "unexpected": report.unexpected, "other size": report.mismatched}
        raise WeightLoadError(
            f"The checkpoint {source} does not fit this π0.5, so it would train from partly random weights.\n"
            f"{listed(parts)}\nUse the checkpoint's own architecture, or another checkpoint."
        )
    if said:
        raise WeightLoadError(f"Loading {source} failed.\n{said}")


class _Tee(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, *streams: Any) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()
