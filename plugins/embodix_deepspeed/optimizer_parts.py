# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state by the parameters' names, out of DeepSpeed's flat tensors and into them, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from embodix.parallel.optimizer_state import SEPARATOR
from embodix_deepspeed.fragments import fragment_of, gathered, whole_shape


def cut(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's chunk of dimension 0, of a tensor that every rank has whole; one of no dimension stays."""
    if whole.dim() == 0:
        return whole.detach().clone()
    part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
    return DTensor.from_local(
        part.to_local().clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


class OptimizerParts:
    """The state of the optimizer that DeepSpeed wraps.

    Args:
        zero: DeepSpeed's optimizer.
        optimizer: the wrapped one.
        parameters: that it trains, by name.
        mesh: of one dimension, which tensors are cut across.
    """

    def __init__(
        self, zero: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh
    ) -> None:
        self._zero, self._optimizer = zero, optimizer
        self._parameters, self._mesh = parameters, mesh

    def named(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """``<parameter>::<key>`` and value of these parameters' state; every rank must ask, and read on."""
        keys, scalars = self._keys()
        for name, parameter in self._parameters.items():
            if name not in names:
                continue
            fragment = fragment_of(self._zero, parameter)
            state = {} if fragment is None else self._optimizer.state[fragment.flat]
            for key in keys:
                yield f"{name}{SEPARATOR}{key}", cut(gathered(parameter, fragment, state.get(key)), self._mesh)
            for key, value in scalars.items():
                yield f"{name}{SEPARATOR}{key}", value.clone()

    def load(self, state: Mapping[str, Any]) -> set[str]:
        """Take a state of ``named``; what it does not name is zeros. Returns the names of parameters with state.

        Raises:
            ValueError: a name that is no parameter which is trained.
        """
        by_name: dict[str, dict[str, Any]] = defaultdict(dict)
        for full, value in state.items():
            name, _, key = full.partition(SEPARATOR)
            if name not in self._parameters:
                raise ValueError(f"The optimizer's state names {name!r}, which is no trained parameter of this policy.")
            by_name[name][key] = value
        self._prepare(by_name)
        for name, values in by_name.items():
            self._fill(self._parameters[name], values)
        return set(by_name)

    def _keys(self) -> tuple[list[str], dict[str, Tensor]]:
        """Keys of tensors like the flat ones, and the counts, which all have in common."""
        for flat in self.flats():
            own = self._optimizer.state.get(flat)
            if own:
                alike = [key for key, value in own.items() if value.shape == flat.shape]
                return alike, {key: value for key, value in own.items() if key not in alike}
        return [], {}

    def flats(self) -> list[Tensor]:
        """The flat tensors that this rank steps."""
        flats: list[Tensor] = getattr(self._zero, "fp32_partitioned_groups_flat", None) or list(
            self._zero.single_partition_of_fp32_groups
        )
        return flats

    def _prepare(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Zeros like the flat tensors, and the counts; those that DeepSpeed has linked stay the objects they are."""
        template: dict[str, Any] = {}
        for name, values in by_name.items():
            for key, value in values.items():
                alike = value.shape == whole_shape(self._parameters[name])
                template[key] = None if alike and value.dim() else value
        for flat in self.flats():
            own = self._optimizer.state[flat]
            for key, value in template.items():
                if value is not None:
                    own[key] = value.detach().clone()
                elif key in own:
                    own[key].zero_()
                else:
                    own[key] = torch.zeros_like(flat, requires_grad=False)

    def _fill(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> None:
        fragment = fragment_of(self._zero, parameter)
        for key, value in values.items():
            if value.shape != whole_shape(parameter) or not value.dim():
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if fragment is not None:
                part = whole.flatten().narrow(0, fragment.start, fragment.numel)
                fragment.of(self._optimizer.state[fragment.flat][key]).copy_(part)
