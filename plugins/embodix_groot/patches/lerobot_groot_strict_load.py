# SPDX-License-Identifier: Apache-2.0
"""Check after loading that every tensor of a GR00T-N1.5 equals the file it came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_groot_strict_load",
    target="lerobot.policies.groot: groot_n1.GR00TN15.from_pretrained, modeling_groot.GrootPolicy._load_as_safetensor",
    requires={"lerobot": ">=0.5.1,<0.5.2", "transformers": ">=5.3,<5.4"},
    symptom="tensors that a file lacks, or that change after they were loaded (the connector mlp1 does), are at most "
    "a line in a log, and training goes on from random weights.",
    upstream="none known",
    why_safe="upstream's loading runs unchanged; its outcome is compared with the file afterwards",
    remove_when="upstream's loading raises by itself when a tensor is not the file's",
)

# Upstream computes vocabulary logits and drops them (groot_n1.py, forward_eagle takes hidden states only). Where the
# tensor is tied to the token embeddings, files leave it out, and upstream loads a model whose own is random.
UNUSED = ("language_model.lm_head.weight",)


@dataclass
class TensorDifferences:
    """Names of tensors that differ between a file and a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.missing or self.unexpected or self.different)


def compare_with_files(state: Mapping[str, Any], files: list[Path]) -> TensorDifferences:
    """Compare a state dict with safetensors files, value by value; the two may have different float types.

    A name that no file has counts as present where it shares its memory with one that a file has (tied weights).
    """
    found = TensorDifferences()
    names_in_files: set[str] = set()
    for name, tensor in _tensors(files):
        names_in_files.add(name)
        if name.endswith(UNUSED):
            continue
        if name not in state:
            found.unexpected.append(name)
        elif not _equal(state[name], tensor):
            found.different.append(name)
    stored = {state[name].data_ptr() for name in names_in_files & state.keys()}
    found.missing = sorted(
        name
        for name, tensor in state.items()
        if name not in names_in_files and not name.endswith(UNUSED) and tensor.data_ptr() not in stored
    )
    found.unexpected.sort()
    found.different.sort()
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a base model: those its index names, else ``model.safetensors``."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / "model.safetensors"]


def apply() -> Callable[[], None]:
    """Check upstream's two ways of loading; returns the undo."""
    from lerobot.policies.groot.groot_n1 import GR00TN15
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    load_base = GR00TN15.from_pretrained.__func__
    load_checkpoint = GrootPolicy._load_as_safetensor.__func__

    def from_pretrained(cls: Any, pretrained_model_name_or_path: str, **kwargs: Any) -> Any:
        model = load_base(cls, pretrained_model_name_or_path, **kwargs)
        folder = Path(model.local_model_path)
        _require_equal(str(folder), model.state_dict(), weight_files(folder))
        return model

    def _load_as_safetensor(cls: Any, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        loaded = load_checkpoint(cls, model, model_file, map_location, strict)
        _require_equal(model_file, loaded.state_dict(), [Path(model_file)])
        return loaded

    undo_base = replace_attribute(GR00TN15, "from_pretrained", classmethod(from_pretrained))
    undo_checkpoint = replace_attribute(GrootPolicy, "_load_as_safetensor", classmethod(_load_as_safetensor))

    def undo() -> None:
        undo_checkpoint()
        undo_base()

    return undo


def _require_equal(source: str, state: Mapping[str, Any], files: list[Path]) -> None:
    from embodix.checkpoints.skeleton import WeightLoadError, listed

    found = compare_with_files(state, files)
    if not found.equal:
        parts = {
            "missing in the file": found.missing,
            "unexpected in the file": found.unexpected,
            "different from the file": found.different,
        }
        raise WeightLoadError(
            f"This GR00T-N1.5 is not what {source} holds, so it would train from partly random weights.\n"
            f"{listed(parts)}\nUse the checkpoint's own architecture, or another checkpoint."
        )


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Each tensor by name, one in memory at a time; of a quantized checkpoint, as its policy gets them."""
    import torch
    from safetensors import safe_open

    from embodix.policies.quantizers import quantizer_of

    quantizer = quantizer_of(files[0].parent)
    if quantizer is not None:
        with quantizer.open(files[0].parent) as weights:
            yield from weights.state(torch.float32)
        return
    for path in files:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  the handle is no mapping
                yield name, stored.get_tensor(name)


def _equal(loaded: Any, stored: Any) -> bool:
    import torch

    wide = torch.promote_types(loaded.dtype, stored.dtype)
    return torch.equal(loaded.detach().cpu().to(wide), stored.to(wide))
