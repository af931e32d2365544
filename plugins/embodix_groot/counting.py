# SPDX-License-Identifier: Apache-2.0
"""What counting a step of GR00T-N1.5 needs: the layout of a sample, a batch, and the text of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodix.contracts import SampleLayout, SampleShape
from embodix_groot.action_head import num_action_tokens
from embodix_groot.assets import GROOT_FOLDER


def sample_layout(policy: Any) -> SampleLayout:
    model = policy._groot_model
    return SampleLayout(model.backbone.eagle_model.num_image_token, num_action_tokens(model.action_head, 1))


def sample_batch(policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
    """In the form that upstream's processors give it: prompts padded on the left, images in the samples' order."""
    eagle, head = policy._groot_model.backbone.eagle_model, policy._groot_model.action_head.config
    text_id = (eagle.image_token_index + 1) % eagle.config.text_config.vocab_size
    ids_L = torch.full((shape.padding + shape.images * eagle.num_image_token + shape.prompt,), text_id)
    ids_L[shape.padding : len(ids_L) - shape.prompt] = eagle.image_token_index
    size, num_images = eagle.config.vision_config.image_size, batch_size * shape.images
    steps = (batch_size, head.action_horizon, head.action_dim)
    return {
        "eagle_input_ids": ids_L.repeat(batch_size, 1),
        "eagle_attention_mask": (torch.arange(len(ids_L)) >= shape.padding).long().repeat(batch_size, 1),
        "eagle_pixel_values": torch.empty(num_images, 3, size, size),
        "eagle_image_sizes": torch.full((num_images, 2), size),
        "state": torch.empty(batch_size, 1, head.max_state_dim),
        "state_mask": torch.ones(batch_size, 1, head.max_state_dim, dtype=torch.bool),
        "action": torch.empty(steps),
        "action_mask": torch.ones(steps, dtype=torch.bool),
        "embodiment_id": torch.zeros(batch_size, dtype=torch.int64),
    }


def prompt_text(task: str, images: int) -> str:
    """What the Eagle processor tokenises, without the tokens of the images themselves."""
    seen = "".join(f"<image {number + 1}><img></img>" for number in range(images))
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    return f"{system}<|im_start|>user\n{seen}{[task]}<|im_end|>\n<|im_start|>assistant\n"


def tokenizer_file(config: Mapping[str, Any]) -> Path | None:
    """Of the folder that the config names, else of the assets that a run left beside its data set."""
    dataset = config["dataset"]
    nodes = [dataset, *(dataset.get("members") or {}).values()]
    roots = [Path(node["root"]) / GROOT_FOLDER for node in nodes if node.get("root")]
    named = config["policy"].get("tokenizer_assets_repo")
    files = [path for root in [Path(named)] * bool(named) + roots for path in root.glob("**/tokenizer.json")]
    return max(files, key=lambda path: path.stat().st_mtime) if files else None
