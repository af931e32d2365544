# SPDX-License-Identifier: Apache-2.0
"""Where a parameter's part lies in the flat tensors that DeepSpeed hands to the optimizer.

ZeRO steps one flat float32 tensor a group, of which each rank has a part; a parameter is a range of it, or several
ranks' ranges. Tensors of the optimizer's state have the same ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one parameter.

    Attributes:
        flat: the tensor that the optimizer steps.
        offset: of the part in it.
        start: of the part in the flattened parameter.
        numel: of the part.
    """

    flat: Tensor
    offset: int
    start: int
    numel: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part in a tensor laid out like ``flat``."""
        return tensor.narrow(0, self.offset, self.numel)


def whole_shape(parameter: Tensor) -> Any:
    """Of a parameter that may be gathered or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def fragment_of(zero: Any, parameter: nn.Parameter) -> Fragment | None:
    """This rank's part of a parameter, None where other ranks hold it all or nobody trains it.

    Args:
        zero: DeepSpeed's optimizer.
    """
    if hasattr(parameter, "ds_id"):
        return _partition(zero, parameter)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
    own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Fragment(flat, own.start, whole.start, own.numel)


def _partition(zero: Any, parameter: Any) -> Fragment | None:
    if not parameter.requires_grad:
        return None
    group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
    size = parameter.partition_numel()
    start = size * dist.get_rank()
    numel = min(size, parameter.ds_numel - start)  # the last parts are filled up, or filling alone
    return Fragment(zero.fp32_partitioned_groups_flat[group], offset, start, numel) if numel > 0 else None


def gathered(parameter: nn.Parameter, fragment: Fragment | None, values: Tensor | None) -> Tensor:
    """A tensor of the parameter's shape from the parts of all ranks; every rank must ask.

    Args:
        fragment: this rank's.
        values: laid out like its ``flat``; None for a rank that has no part.
    """
    device = parameter.device
    whole = Tensor.new_zeros(parameter, whole_shape(parameter)).flatten()
    if fragment is not None and values is not None:
        whole.narrow(0, fragment.start, fragment.numel).copy_(fragment.of(values))
    dist.all_reduce(whole)
    return whole.to(device).reshape(whole_shape(parameter))
