# SPDX-License-Identifier: Apache-2.0
"""The vision-language backbone on packed rows (upstream: ``EagleBackbone.forward``).

A part that is frozen keeps nothing for a backward pass: none of its inputs ask for a gradient, so autograd records
nothing, and what is computed here instead of upstream's modules records no more than they do.

Shape suffixes: I images, P patches an image, M = I * P image rows, N computed rows, W width of the language model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embodix.policies.functional import ZeroGradient
from embodix_groot.attention import TokenAttention
from embodix_groot.language_model import language_features
from embodix_groot.tokens import TokenPlan


def backbone_features(backbone: Any, plan: TokenPlan, pixels_I3HW: Tensor, attention: TokenAttention) -> Tensor:
    """``[N, W]`` features of images and instruction.

    Raises:
        ValueError: the prompts have more or fewer image tokens than the images give.
    """
    backbone.set_frozen_modules_to_eval_mode()
    eagle = backbone.eagle_model
    images_MW = image_features(eagle, pixels_I3HW).flatten(0, 1)
    num_image_tokens = plan.image_rows_M.numel()
    if num_image_tokens != images_MW.shape[0]:
        raise ValueError(
            f"Every patch of an image needs one image token (id {eagle.image_token_index}) in a prompt; got "
            f"{num_image_tokens} image tokens for {pixels_I3HW.shape[0]} images of "
            f"{images_MW.shape[0] // max(1, pixels_I3HW.shape[0])} patches. Preprocess the batch with the policy's own "
            "processor."
        )
    rows_NW = eagle.language_model.get_input_embeddings()(plan.ids_N)
    rows_NW = rows_NW.index_copy(0, plan.image_rows_M, images_MW.to(rows_NW.dtype))
    features_NW = language_features(eagle.language_model.model, rows_NW, plan.layout.positions_N, attention)
    features_NW = backbone.eagle_linear(features_NW)
    if backbone.training and backbone.tune_visual:
        # Upstream adds 0 * (sum of all vision parameters), which gives those that nothing reads a zero gradient.
        return ZeroGradient.apply(features_NW, *_unread_vision_parameters(eagle))
    return features_NW


def image_features(eagle: Any, pixels_I3HW: Tensor) -> Tensor:
    """``[I, P, W]``: vision tower and connector, without the pooling head that nothing reads."""
    if not _has_plain_connector(eagle):
        features_IPW: Tensor = eagle.extract_feature(pixels_I3HW)
        return features_IPW
    tower = eagle.vision_model.vision_model
    hidden_IPC = tower.encoder(inputs_embeds=tower.embeddings(pixels_I3HW)).last_hidden_state
    return eagle.mlp1(tower.post_layernorm(hidden_IPC))


def _has_plain_connector(eagle: Any) -> bool:
    """The released model's choice; for any other upstream's own ``extract_feature`` is called."""
    return eagle.select_layer == -1 and not eagle.use_pixel_shuffle and not eagle.mlp_checkpoint


def _unread_vision_parameters(eagle: Any) -> list[Tensor]:
    """Parameters that ``image_features`` may not read: the pooling head, or any where upstream's code runs."""
    tower = eagle.vision_model.vision_model
    unread = getattr(tower, "head", None) if _has_plain_connector(eagle) else tower
    return [] if unread is None else list(unread.parameters())
