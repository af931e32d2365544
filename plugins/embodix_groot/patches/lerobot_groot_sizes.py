# SPDX-License-Identifier: Apache-2.0
"""Build GR00T-N1.5 in other sizes than that of a base model on disk, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from embodix.patching import Patch, patched, replace_attribute
from embodix_groot.architecture import GAIN, eagle_config, groot_config, validate_architecture

PATCH = Patch(
    name="lerobot_groot_sizes",
    target="lerobot.policies.groot.modeling_groot.GrootPolicy._create_groot_model",
    requires={"lerobot": ">=0.5.1,<0.5.2", "transformers": ">=5.3,<5.4"},
    symptom="a GrootPolicy is only built from a base model's folder, and the public one has 2.4 billion parameters.",
    upstream="no thread: a small GR00T-N1.5 is not something upstream set out to offer",
    why_safe="only sizes change and no file is read; every module, name and formula stays upstream's",
    remove_when="GrootConfig accepts widths and depths",
)


def apply(*, architecture: Mapping[str, Any]) -> Callable[[], None]:
    """Make upstream's ``GrootPolicy`` build in these sizes; returns the undo.

    Args:
        architecture: ``vision``, ``language``, ``vl_self_attention`` and ``action_head`` with their sizes, and
            ``dropout``; optionally ``linear_gain``, with which linear layers start in place of upstream's standard
            deviation of 0.02 at any width, under which narrow layers pass on little; see
            ``embodix_groot.architecture``.

    Raises:
        ValueError: see ``validate_architecture``.
    """
    validate_architecture(architecture)
    from lerobot.policies.groot import groot_n1
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    create_from_file = GrootPolicy._create_groot_model

    def _create_groot_model(self: Any) -> Any:
        """Upstream's own method, its base model made here instead of loaded."""
        with ExitStack() as stack:
            stack.enter_context(patched({"lerobot_groot_runs": {}}))
            for owner, name, replacement in (
                (groot_n1, "ensure_eagle_cache_ready", lambda *_: None),
                (groot_n1, "AutoConfig", _sized_eagle_config(architecture)),
                (groot_n1.GR00TN15, "from_pretrained", _builder(architecture, self.config)),
            ):
                stack.callback(replace_attribute(owner, name, replacement))
            return create_from_file(self)

    return replace_attribute(GrootPolicy, "_create_groot_model", _create_groot_model)


def _sized_eagle_config(architecture: Mapping[str, Any]) -> Any:
    """In the place of ``AutoConfig``: the Eagle config of these sizes."""

    class SizedConfig:
        @staticmethod
        def from_pretrained(folder: str, trust_remote_code: bool) -> Any:
            from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig

            return Eagle25VLConfig(**eagle_config(architecture))

    return SizedConfig


def _builder(architecture: Mapping[str, Any], policy_config: Any) -> Any:
    """In the place of ``GR00TN15.from_pretrained``: the model with random weights, in evaluation mode as there."""

    def from_pretrained(
        cls: Any,
        pretrained_model_name_or_path: str,
        *,
        tune_llm: bool,
        tune_visual: bool,
        tune_projector: bool,
        tune_diffusion_model: bool,
    ) -> Any:
        from lerobot.policies.groot.groot_n1 import GR00TN15Config

        sizes = groot_config(
            architecture,
            max_state_dim=policy_config.max_state_dim,
            max_action_dim=policy_config.max_action_dim,
            chunk_size=policy_config.chunk_size,
            assets=policy_config.tokenizer_assets_repo,
        )
        model = cls(GR00TN15Config(**sizes), local_model_path=pretrained_model_name_or_path)
        model.backbone.set_trainable_parameters(tune_visual=tune_visual, tune_llm=tune_llm)
        model.action_head.set_trainable_parameters(
            tune_projector=tune_projector, tune_diffusion_model=tune_diffusion_model
        )
        if architecture.get(GAIN) is not None:
            _start_linear_layers(model, float(architecture[GAIN]))
        return model.eval()

    return classmethod(from_pretrained)


def _start_linear_layers(model: Any, gain: float) -> None:
    """Draw the weights of every linear layer outside the vision tower with ``gain / sqrt(inputs)``."""
    import torch
    from lerobot.policies.groot.action_head.flow_matching_action_head import CategorySpecificLinear

    for name, module in model.named_modules():
        if isinstance(module, CategorySpecificLinear):
            torch.nn.init.normal_(module.W, std=gain / module.W.shape[1] ** 0.5)
        elif isinstance(module, torch.nn.Linear) and "vision_model" not in name:
            torch.nn.init.normal_(module.weight, std=gain / module.in_features**0.5)
