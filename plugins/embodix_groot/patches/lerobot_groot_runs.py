# SPDX-License-Identifier: Apache-2.0
"""Make upstream's GR00T-N1.5 run and load with the transformers it is pinned to, with or without flash-attn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_groot_runs",
    target="lerobot.policies.groot: groot_n1.GR00TN15.__init__, groot_n1.GR00TN15.from_pretrained, "
    "groot_n1.EagleBackbone.__init__, groot_n1.AutoConfig, groot_n1.AutoModel, "
    "modeling_groot.GrootPolicy._create_groot_model, "
    "action_head.flow_matching_action_head.Beta, eagle2_hg_model.modeling_eagle2_5_vl.SiglipVisionModel, "
    "eagle2_hg_model.modeling_eagle2_5_vl.Eagle25VLPreTrainedModel._init_weights, processor_groot.AutoProcessor, "
    "processor_groot.GrootEagleEncodeStep.get_config, processor_groot.GrootEagleCollateStep.get_config",
    requires={
        "lerobot": ">=0.5.1,<0.5.2",
        "transformers": ">=5.3,<5.4",
        "peft": ">=0.18,<1",  # imported by upstream's Eagle files
        "dm-tree": ">=0.1.8,<1",  # imported by groot_n1.py, which goes on without it until the first forward
    },
    symptom="a base model can't be loaded (Beta() on the meta device, no post_init), images can't be processed ('list' "
    "has no 'shape'), SigLIP demands flash-attn; loading draws the connector mlp1 anew and makes "
    "float32 training parameters bfloat16; a checkpoint forgets which tokenizer assets it was trained with, and the "
    "backbone never asks for the policy's.",
    upstream="https://github.com/huggingface/lerobot/pull/3182 repairs the first three after 0.5.1",
    why_safe="the same modules and formulas run; only where tensors are made, which attention kernel computes them, "
    "and which copy of upstream's own Eagle files is imported changes",
    remove_when="an upstream release with GR00T-N1.5 loads its base model without flash-attn and keeps mlp1",
)


_policy_config: ContextVar[Any] = ContextVar("embodix_groot_policy_config", default=None)


def apply() -> Callable[[], None]:
    """Repair upstream's classes; returns the undo."""
    from lerobot.policies.groot import groot_n1, processor_groot
    from lerobot.policies.groot.action_head import flow_matching_action_head
    from lerobot.policies.groot.eagle2_hg_model import modeling_eagle2_5_vl as eagle
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    undo = [
        replace_attribute(flow_matching_action_head, "Beta", _beta_on_cpu(flow_matching_action_head.Beta)),
        replace_attribute(groot_n1.GR00TN15, "__init__", _with_post_init(groot_n1.GR00TN15.__init__)),
        replace_attribute(groot_n1.GR00TN15, "from_pretrained", _in_float32(groot_n1.GR00TN15)),
        replace_attribute(GrootPolicy, "_create_groot_model", naming_the_policy(GrootPolicy._create_groot_model)),
        replace_attribute(groot_n1.EagleBackbone, "__init__", _with_policy_assets(groot_n1.EagleBackbone.__init__)),
        replace_attribute(groot_n1, "AutoConfig", _VendoredConfig),
        replace_attribute(groot_n1, "AutoModel", _VendoredModel),
        replace_attribute(eagle, "SiglipVisionModel", _siglip_without_flash_attention(eagle.SiglipVisionModel)),
        replace_attribute(
            eagle.Eagle25VLPreTrainedModel,
            "_init_weights",
            keeping_loaded_weights(eagle.Eagle25VLPreTrainedModel._init_weights),
        ),
        replace_attribute(processor_groot, "AutoProcessor", _VendoredProcessor),
        replace_attribute(processor_groot.GrootEagleEncodeStep, "get_config", _assets_setting),
        replace_attribute(processor_groot.GrootEagleCollateStep, "get_config", _assets_setting),
    ]

    def undo_all() -> None:
        for restore in reversed(undo):
            restore()

    return undo_all


def _beta_on_cpu(beta: Any) -> Callable[..., Any]:
    """Under ``from_pretrained`` new tensors land on the meta device, and a distribution has no weights to load."""

    def build(*concentrations: float) -> Any:
        import torch

        with torch.device("cpu"):
            return beta(*concentrations)

    return build


def _with_post_init(init: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.post_init()

    return initialise


def _with_policy_assets(init: Callable[..., None]) -> Callable[..., None]:
    """Upstream's backbone takes the assets that the base model names, else the hub's, whatever the policy names."""
    from lerobot.policies.groot.groot_n1 import DEFAULT_TOKENIZER_ASSETS_REPO

    def initialise(self: Any, **backbone_config: Any) -> None:
        config = _policy_config.get()
        if config is not None and config.tokenizer_assets_repo != DEFAULT_TOKENIZER_ASSETS_REPO:
            backbone_config["tokenizer_assets_repo"] = config.tokenizer_assets_repo
        init(self, **backbone_config)

    return initialise


def _in_float32(cls: Any) -> Any:
    """Upstream means float32 parameters and bfloat16 compute; transformers 5 takes the dtype of the file instead."""
    original = cls.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, pretrained_model_name_or_path: str, **kwargs: Any) -> Any:
        import torch

        kwargs.setdefault("dtype", torch.float32)
        return original.__get__(None, cls)(pretrained_model_name_or_path, **kwargs)

    return classmethod(from_pretrained)


def naming_the_policy(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _create_groot_model(self: Any) -> Any:
        token = _policy_config.set(self.config)
        try:
            return create(self)
        finally:
            _policy_config.reset(token)

    return _create_groot_model


def flash_attention_runs() -> bool:
    """Whether the policy that is being built can use flash-attn, which knows neither a CPU nor float32."""
    config = _policy_config.get()
    installed = importlib.util.find_spec("flash_attn") is not None
    return installed and config is not None and config.use_bf16 and str(config.device).startswith("cuda")


def _siglip_without_flash_attention(siglip: Any) -> Any:
    def build(config: Any) -> Any:
        if not flash_attention_runs():
            config._attn_implementation = "sdpa"
        return siglip(config)

    return build


def keeping_loaded_weights(init_weights: Callable[..., None]) -> Callable[..., None]:
    """Upstream writes to ``.data``, past the flags with which transformers 5 protects what has been loaded."""

    def _init_weights(self: Any, module: Any) -> None:
        import torch

        own = list(module.parameters(recurse=False))
        loaded = [(p, p.detach().clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
        init_weights(self, module)
        with torch.no_grad():
            for parameter, value in loaded:
                parameter.copy_(value)

    return _init_weights


def _assets_setting(step: Any) -> dict[str, Any]:
    """What a checkpoint keeps of a step; upstream keeps nothing, and loads the default assets from the hub."""
    return {"tokenizer_assets_repo": step.tokenizer_assets_repo}


class _VendoredConfig:
    """In the place of ``AutoConfig``: upstream's own file, not the copy of it that transformers runs from a cache."""

    @staticmethod
    def from_pretrained(folder: str, trust_remote_code: bool) -> Any:
        from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig

        return Eagle25VLConfig.from_pretrained(folder)


class _VendoredModel:
    """In the place of ``AutoModel``."""

    @staticmethod
    def from_config(config: Any, trust_remote_code: bool) -> Any:
        from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import Eagle25VLForConditionalGeneration

        if not flash_attention_runs():
            config._attn_implementation = config.text_config._attn_implementation = "sdpa"
        return Eagle25VLForConditionalGeneration._from_config(config)


class _VendoredProcessor:
    """In the place of ``AutoProcessor``: the same processor, whose image step returns tensors as its callers expect."""

    @staticmethod
    def from_pretrained(folder: str, trust_remote_code: bool, use_fast: bool) -> Any:
        from lerobot.policies.groot.eagle2_hg_model.image_processing_eagle2_5_vl_fast import (
            Eagle25VLImageProcessorFast,
        )
        from lerobot.policies.groot.eagle2_hg_model.processing_eagle2_5_vl import Eagle25VLProcessor
        from transformers import Qwen2Tokenizer

        class TensorImageProcessor(Eagle25VLImageProcessorFast):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                kwargs.setdefault("return_tensors", "pt")
                return super().__call__(*args, **kwargs)

        settings, _ = Eagle25VLProcessor.get_processor_dict(folder)
        return Eagle25VLProcessor(
            image_processor=TensorImageProcessor.from_pretrained(folder),
            tokenizer=Qwen2Tokenizer.from_pretrained(folder),
            **settings,
        )
