# SPDX-License-Identifier: Apache-2.0
"""Which rows of a padded prompt are computed, and which of them stand for image patches.

Shape suffixes: B samples, L prompt tokens (padded), N computed rows, M rows of image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodix.contracts import Packer
from embodix.packing.layout import PackedLayout


@dataclass(frozen=True)
class TokenPlan:
    """What to embed and where. Tensors are on the model's device.

    Attributes:
        layout: the packer's decision.
        ids_N: language ids of the computed rows.
        image_rows_M: the computed rows that image patches go to, in the order of the images.
    """

    layout: PackedLayout
    ids_N: Tensor
    image_rows_M: Tensor


def plan_tokens(ids_BL: Tensor, mask_BL: Tensor, image_token: int, packer: Packer, device: torch.device) -> TokenPlan:
    """Decide on the host what is computed on ``device``; one transfer of the prompt, no other wait for the device."""
    host_ids_BL = ids_BL.detach().to("cpu")
    valid_BL = mask_BL.detach().to("cpu", torch.bool)
    layout = packer.layout(valid_BL)
    is_image_BL = (host_ids_BL == image_token) & valid_BL
    image_rows_M = is_image_BL.flatten()[layout.rows_N].nonzero().squeeze(1)
    on_device = layout.to(device)
    return TokenPlan(on_device, ids_BL.to(device).flatten()[on_device.rows_N], image_rows_M.to(device))
