# SPDX-License-Identifier: Apache-2.0
"""A model folder with quantized weights: what every format's has in common, read with everything checked.

``model.safetensors`` holds the tensors of every quantized module under the module's path, ``tensor_digests.json`` a
digest of each, and ``config.json`` says ``quantization_config``. LeRobot's own reader of ``config.json`` refuses that
key, so that plain LeRobot stops instead of taking quantized values for weights.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodix.contracts import StoredWeight, WeightLayout
from embodix.policies.quantizers import CONFIG_FILE, CONFIG_KEY, quantization_config
from embodix.tensor_file import (
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

DROPPED_KEY = "embodix_dropped"  # of the file's metadata: the tensors that were left out
WEIGHT = ".weight"


class QuantizedWeights[Layout: WeightLayout, Stored: StoredWeight](ABC):
    """The weights of a quantized model folder; a context manager.

    What can be told from config and header is checked at once; values are checked when they are read.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or the files of an index.

    Attributes:
        layout: that the config tells.
        modules: path -> specification of the quantized values of every quantized module.
        dropped: name -> specification of the tensors that were left out because nothing reads them.

    Raises:
        FileFormatError: a damaged file, or a config that the tensors contradict; the message names the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles(folder)
        self.layout = self._read_layout()
        self.modules = self.quantized_modules()
        self.dropped = _dropped(folder, self._files.metadata)
        self._digests = Digests.read(folder) if not (folder / INDEX_FILE).is_file() else None
        if self._digests is not None:
            self._digests.require_header(folder / WEIGHTS_FILE, read_header(folder / WEIGHTS_FILE))

    @abstractmethod
    def parse_layout(self, fields: Any, place: str) -> Layout:
        """The layout that ``quantization_config`` tells.

        Raises:
            FileFormatError: another format; ``place`` says where it stands.
        """

    @abstractmethod
    def quantized_modules(self) -> dict[str, TensorSpec]:
        """``modules`` in alphabetical order, with their tensors checked.

        Raises:
            FileFormatError: tensors that do not fit each other or the layout; names one.
        """

    @abstractmethod
    def stored_weight(self, module: str) -> Stored:
        """One quantized weight; raises as ``stored``."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it holds, as in "21 weights in int8"."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the file by name."""
        return self._files.specs

    def stored(self) -> dict[str, Stored]:
        """Every quantized weight by module path, as the file has it.

        Raises:
            FileFormatError: tensors that changed since they were written, or values that no weight has.
        """
        return {module: self.stored_weight(module) for module in self.modules}

    def tensor(self, name: str) -> Tensor:
        """One tensor of the file.

        Raises:
            FileFormatError: its bytes are not those that were written.
        """
        tensor = self._files.tensor(name)
        if self._digests is not None:
            self._digests.require_tensor(self.folder / WEIGHTS_FILE, name, tensor)
        return tensor

    def state(self, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, Tensor]]:
        """Every wanted tensor of the model by name, in alphabetical order, one in memory at a time.

        Quantized weights are in ``dtype``, others as the file has them, dropped ones zeros that take no memory.
        """
        scales = {
            module + ending
            for module, spec in self.modules.items()
            for ending in self.layout.specs(spec.shape)
            if ending != WEIGHT
        }
        for name in filter(wanted, sorted(set(self.specs) - scales | set(self.dropped))):
            module = name.removesuffix(WEIGHT)
            if name in self.dropped:
                spec = self.dropped[name]
                yield name, torch.zeros((), dtype=spec.dtype).expand(spec.shape)
            elif module in self.modules and name.endswith(WEIGHT):
                yield name, self.stored_weight(module).dequantize(dtype)
            else:
                yield name, self.tensor(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def _read_layout(self) -> Layout:
        path, fields = self.folder / CONFIG_FILE, quantization_config(self.folder)
        if fields is None:
            raise FileFormatError(f"{self.folder} has quantized tensors, but {CONFIG_FILE} has no {CONFIG_KEY}.")
        layout = self.parse_layout(fields, f"{CONFIG_KEY} of {path}")
        recorded = self._files.metadata.get(CONFIG_KEY)
        if recorded is not None and recorded != metadata_text(layout.to_json()):
            raise FileFormatError(f"{CONFIG_KEY} of {path} is not what the weights were written with: {recorded}.")
        return layout


def _dropped(folder: Path, metadata: Mapping[str, str]) -> dict[str, TensorSpec]:
    try:
        fields = json.loads(metadata.get(DROPPED_KEY, "{}"))
        return {name: TensorSpec(DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{DROPPED_KEY} in the header of {folder / WEIGHTS_FILE} is damaged: {error}.") from error


def file_metadata(layout: WeightLayout, dropped: Mapping[str, TensorSpec]) -> dict[str, str]:
    """What the header of a quantized file says beside its tensors."""
    left_out = {name: [DTYPE_NAMES[spec.dtype], list(spec.shape)] for name, spec in dropped.items()}
    return {"format": "pt", CONFIG_KEY: metadata_text(layout.to_json()), DROPPED_KEY: metadata_text(left_out)}


def metadata_text(value: Any) -> str:
    """A value as the header's metadata holds it."""
    return json.dumps(value, sort_keys=True)
