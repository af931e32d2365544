# SPDX-License-Identifier: Apache-2.0
"""A model folder with block-scaled FP8 weights: its layout, and reading it with everything checked.

The layout is that of transformers' fine-grained FP8 (transformers/integrations/finegrained_fp8.py: ``FP8Linear``) and
of vLLM's block mode (vllm/model_executor/layers/quantization/fp8.py): ``X.weight`` in float8_e4m3fn ``[N, K]``,
``X.weight_scale_inv`` in float32 ``[ceil(N / 128), ceil(K / 128)]`` (the multiplier, despite its name), and
``quantization_config`` in ``config.json``. LeRobot's own reader of ``config.json`` refuses that key, so that plain
LeRobot stops instead of taking the FP8 values for weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodix_fp8.blocks import BLOCK, FLOAT8, ScaledWeight, scale_shape
from embodix_fp8.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    WEIGHTS_FILE,
    Digests,
    FileFormatError,
    TensorFiles,
    TensorSpec,
    read_header,
)

CONFIG_FILE = "config.json"
CONFIG_KEY = "quantization_config"
DROPPED_KEY = "embodix_dropped"  # of the file's metadata: the tensors that were left out
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
NAN_CODE = 0x7F  # e4m3fn has two codes for NaN, this one with either sign, and none for infinity


@dataclass(frozen=True)
class BlockConfig:
    """``quantization_config`` of a folder.

    Attributes:
        block: rows and columns that share a scale.
        modules_to_not_convert: beginnings or ends of the names of modules in high precision.
    """

    block: tuple[int, int] = BLOCK
    modules_to_not_convert: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As transformers and vLLM read it."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }

    @classmethod
    def from_json(cls, fields: Any, place: str) -> Self:
        """
        Raises:
            FileFormatError: another method than block-scaled FP8 with dynamic activations.
        """
        method, scheme = _field(fields, "quant_method", place), _field(fields, "activation_scheme", place)
        block = _field(fields, "weight_block_size", place)
        if method != "fp8" or scheme != "dynamic":
            raise FileFormatError(
                f"{place} must say quant_method fp8 and activation_scheme dynamic; got {method!r} and {scheme!r}."
            )
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise FileFormatError(f"{place} must give weight_block_size as two whole numbers; got {block!r}.")
        return cls((block[0], block[1]), tuple(fields.get("modules_to_not_convert") or ()))

    def leaves_out(self, module: str) -> bool:
        """Whether the module's name begins or ends with one of those in high precision, as transformers matches."""
        return any(module.startswith(name) or module.endswith(name) for name in self.modules_to_not_convert)

    def leaves_out_any(self, modules: Iterable[str]) -> bool:
        """``leaves_out`` of at least one."""
        return any(map(self.leaves_out, modules))


def _field(fields: Any, name: str, place: str) -> Any:
    if not isinstance(fields, Mapping) or name not in fields:
        raise FileFormatError(f"{place} must be a mapping with {name}; got {fields!r}.")
    return fields[name]


def is_quantized(folder: Path) -> bool:
    """Whether a model folder holds block-scaled FP8 weights: its config says so, or its file has their scales."""
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if config.is_file() and CONFIG_KEY in json.loads(config.read_text()):
        return True
    return weights.is_file() and any(name.endswith(SCALE) for name in read_header(weights).specs)


class QuantizedWeights:
    """The weights of a quantized model folder; a context manager.

    What can be told from config and header is checked at once; values are checked when they are read.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or the files of an index.

    Attributes:
        config: of the folder.
        modules: path -> specification of the FP8 values of every quantized module.
        dropped: name -> specification of the tensors that were left out because nothing reads them.

    Raises:
        FileFormatError: a damaged file, FP8 values without scales or the reverse, wrong dtypes or shapes, or a config
            that the tensors contradict; the message names the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles(folder)
        self.config = _read_config(folder, self._files.metadata)
        self.modules = _quantized_modules(folder, self._files.specs)
        self.dropped = _dropped(folder, self._files.metadata)
        for module, spec in self.modules.items():
            self._require_fitting(module, spec)
        self._digests = Digests.read(folder) if not (folder / INDEX_FILE).is_file() else None
        if self._digests is not None:
            self._digests.require_header(folder / WEIGHTS_FILE, read_header(folder / WEIGHTS_FILE))

    def stored(self) -> dict[str, ScaledWeight]:
        """Every quantized weight by module path, as the file has it.

        Raises:
            FileFormatError: values or scales that changed since they were written, or that are not finite.
        """
        return {module: self.scaled_weight(module) for module in self.modules}

    def scaled_weight(self, module: str) -> ScaledWeight:
        """One quantized weight; raises as ``stored``."""
        values, scale_inv = self._tensor(module + WEIGHT), self._tensor(module + SCALE)
        if bool(((values.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} holds values that are not finite.")
        if not bool((torch.isfinite(scale_inv) & (scale_inv >= 0)).all()):
            raise FileFormatError(
                f"Tensor {module}{SCALE} of {self.folder} holds scales that are negative or not finite."
            )
        return ScaledWeight(values, scale_inv, self.config.block)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the file by name."""
        return self._files.specs

    def state(self, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, Tensor]]:
        """Every wanted tensor of the model by name, in alphabetical order, one in memory at a time.

        Quantized weights are in ``dtype``, others as the file has them, dropped ones zeros that take no memory.
        """
        stored = set(self._files.specs) - {module + SCALE for module in self.modules}
        for name in filter(wanted, sorted(stored | set(self.dropped))):
            module = name.removesuffix(WEIGHT)
            if name in self.dropped:
                spec = self.dropped[name]
                yield name, torch.zeros((), dtype=spec.dtype).expand(spec.shape)
            elif module in self.modules and name.endswith(WEIGHT):
                yield name, self.scaled_weight(module).dequantize(dtype)
            else:
                yield name, self._tensor(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def _tensor(self, name: str) -> Tensor:
        tensor = self._files.tensor(name)
        if self._digests is not None:
            self._digests.require_tensor(self.folder / WEIGHTS_FILE, name, tensor)
        return tensor

    def _require_fitting(self, module: str, spec: TensorSpec) -> None:
        scale = self._files.specs.get(module + SCALE)
        if scale is None:
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} is in FP8 and has no {module}{SCALE}.")
        if len(spec.shape) != 2:
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} must be a matrix; got {spec.shape}.")
        wanted = TensorSpec(torch.float32, scale_shape(spec.shape, self.config.block))
        if scale != wanted:
            raise FileFormatError(
                f"Tensor {module}{SCALE} of {self.folder} must be F32 {wanted.shape} for a weight of {spec.shape} in "
                f"blocks of {self.config.block}; got {DTYPE_NAMES[scale.dtype]} {scale.shape}."
            )
        if self.config.leaves_out(module):
            raise FileFormatError(
                f"{self.folder / CONFIG_FILE} says that {module} is not quantized (modules_to_not_convert), but tensor "
                f"{module}{WEIGHT} is in FP8."
            )


def _read_config(folder: Path, metadata: Mapping[str, str]) -> BlockConfig:
    path = folder / CONFIG_FILE
    fields = json.loads(path.read_text()).get(CONFIG_KEY) if path.is_file() else None
    if fields is None:
        raise FileFormatError(f"{folder} has tensors in FP8, but {CONFIG_FILE} has no {CONFIG_KEY}.")
    config = BlockConfig.from_json(fields, f"{CONFIG_KEY} of {path}")
    recorded = metadata.get(CONFIG_KEY)
    if recorded is not None and recorded != metadata_text(config.to_json()):
        raise FileFormatError(f"{CONFIG_KEY} of {path} is not what the weights were written with: {recorded}.")
    return config


def _quantized_modules(folder: Path, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Module path -> specification of its FP8 values."""
    values = {name: spec for name, spec in specs.items() if spec.dtype == FLOAT8}
    misnamed = [name for name in values if not name.endswith(WEIGHT)]
    if misnamed:
        raise FileFormatError(f"Tensor {misnamed[0]} of {folder} is in FP8; only names that end in {WEIGHT} may be.")
    modules = {name.removesuffix(WEIGHT): spec for name, spec in values.items()}
    for name in specs:
        if name.endswith(SCALE) and name.removesuffix(SCALE) not in modules:
            weight = specs.get(name.removesuffix(SCALE) + WEIGHT)
            found = "is missing" if weight is None else f"is {DTYPE_NAMES[weight.dtype]}"
            raise FileFormatError(
                f"Tensor {name} of {folder} scales FP8 values, but {name.removesuffix(SCALE)}{WEIGHT} {found}."
            )
    if not modules:
        raise FileFormatError(f"{folder / CONFIG_FILE} has a {CONFIG_KEY}, but no tensor is in FP8.")
    return dict(sorted(modules.items()))


def _dropped(folder: Path, metadata: Mapping[str, str]) -> dict[str, TensorSpec]:
    try:
        fields = json.loads(metadata.get(DROPPED_KEY, "{}"))
        return {name: TensorSpec(DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{DROPPED_KEY} in the header of {folder / WEIGHTS_FILE} is damaged: {error}.") from error


def dropped_text(dropped: Mapping[str, TensorSpec]) -> str:
    """``DROPPED_KEY`` of a file's metadata."""
    return metadata_text({name: [DTYPE_NAMES[spec.dtype], list(spec.shape)] for name, spec in dropped.items()})


def metadata_text(value: Any) -> str:
    """A value as the header's metadata holds it."""
    return json.dumps(value, sort_keys=True)
