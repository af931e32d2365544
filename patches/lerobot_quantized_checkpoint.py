# SPDX-License-Identifier: Apache-2.0
"""Let upstream load a checkpoint that ``lerobot quantize`` has written: its weights are dequantized as read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodix.contracts import CheckpointQuantizer
from embodix.patching import Patch, replace_attribute
from embodix.policies.support import require_offered

PATCH = Patch(
    name="lerobot_quantized_checkpoint",
    target="lerobot.configs.policies.PreTrainedConfig.from_pretrained",
    requires={"lerobot": ">=0.5.1,<0.5.2", "safetensors": ">=0.5,<1"},
    symptom="upstream refuses the config of a quantized checkpoint; started from one with another config, it may print "
    "a line and go on with quantized values taken for weights.",
    upstream="no thread: upstream has no quantized checkpoints",
    why_safe="applied for a quantized checkpoint only; upstream's methods, the policy's reader of weights among them, "
    "run unchanged on the config without quantization_config and on the dequantized weights",
    remove_when="upstream reads checkpoints of registered quantizers",
)


def apply(*, policy_type: str) -> Callable[[], None]:
    """Patch upstream's reading of configs, and of weights for one policy type; returns the undo.

    Raises:
        PatchError: a policy type that is not quantized.
    """
    from lerobot.configs.policies import PreTrainedConfig

    undo_weights = _patch_weights(policy_type)
    read_config = PreTrainedConfig.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, pretrained_name_or_path: Any, **kwargs: Any) -> Any:
        with _plain_config(Path(pretrained_name_or_path)) as folder:
            return read_config.__get__(None, cls)(folder or pretrained_name_or_path, **kwargs)

    undo_config = replace_attribute(PreTrainedConfig, "from_pretrained", classmethod(from_pretrained))

    def undo() -> None:
        undo_config()
        undo_weights()

    return undo


def _patch_weights(policy_type: str) -> Callable[[], None]:
    remedy = "Give the checkpoint that it was made from."
    support = require_offered(policy_type, "weights_reader", f"{PATCH.name} reads quantized checkpoints of", remedy)
    return _reading_quantized(*support.weights_reader())


def _reading_quantized(owner: Any, method: str) -> Callable[[], None]:
    """Upstream's class method, with files of quantized weights dequantized while it runs."""
    original = getattr(owner, method).__func__

    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        errors: list[Exception] = []
        with _dequantized_files(errors):
            try:
                loaded = original(cls, *args, **kwargs)
            except Exception:
                if not errors:
                    raise
        if errors:  # upstream may catch them
            raise errors[0]
        return loaded

    return replace_attribute(owner, method, classmethod(load))


@contextmanager
def _dequantized_files(errors: list[Exception]) -> Iterator[None]:
    """``safetensors.torch.load_file``, through which upstream reads weights, gives a quantized file's dequantized."""
    import safetensors.torch

    from embodix.policies.quantizers import quantizer_of

    load_plain = safetensors.torch.load_file

    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> dict[str, Any]:
        folder = Path(filename).parent
        try:
            quantizer = quantizer_of(folder)
            if quantizer is not None:
                return _dequantize(quantizer, folder, device)
        except Exception as error:
            errors.append(error)
            raise
        return load_plain(filename, device=device, **options)

    undo = replace_attribute(safetensors.torch, "load_file", load_file)
    try:
        yield
    finally:
        undo()


def _dequantize(quantizer: CheckpointQuantizer, folder: Path, device: Any) -> dict[str, Any]:
    import torch

    with quantizer.open(folder) as weights:
        print(f"{folder} holds {weights.summary}; the policy gets them dequantized, in its own precision.")
        if weights.dropped:
            print(f"Filled with zeros, as nothing reads them and the file left them out: {', '.join(weights.dropped)}.")
        return {name: tensor.to(device) for name, tensor in weights.state(torch.float32)}


@contextmanager
def _plain_config(folder: Path) -> Iterator[Path | None]:
    """A folder with the config that upstream knows; None where the folder's own is that."""
    from embodix.policies.quantizers import CONFIG_FILE, CONFIG_KEY

    path = folder / CONFIG_FILE
    config = json.loads(path.read_text()) if path.is_file() else {}
    if CONFIG_KEY not in config:
        yield None
        return
    with tempfile.TemporaryDirectory() as plain:
        del config[CONFIG_KEY]
        (Path(plain) / CONFIG_FILE).write_text(json.dumps(config))
        yield Path(plain)
