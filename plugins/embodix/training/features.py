# SPDX-License-Identifier: Apache-2.0
"""Which features a config selects, and their installation on a host policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lerobot.configs.train import TrainPipelineConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.attention.select import choose_backend
from embodix.config.compose import options_of
from embodix.config.train_schema import NamedChoice
from embodix.contracts import (
    BatchComposer,
    Installation,
    LowPrecision,
    PrecisionInstallation,
    Quantizer,
    RunTraits,
    ShapePadder,
    StoredWeight,
    TrainingPrecision,
)
from embodix.data.mixture_spec import is_mixture
from embodix.policies.adapters import bare_policy
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix.training.step_forward import StepCount, over_ranks

UNCHANGED = "none"  # the quantization and the precision of the policy as it is


@dataclass(frozen=True)
class FeatureSelection:
    """The named implementations a run asks for."""

    packing: NamedChoice
    attention: NamedChoice
    vision_tokens: str
    action_pad: str
    flow_samples: int = 1
    mixture: bool = False
    quantization: NamedChoice = field(default_factory=lambda: NamedChoice(UNCHANGED))
    precision: NamedChoice = field(default_factory=lambda: NamedChoice(UNCHANGED))

    @property
    def is_upstream(self) -> bool:
        """True when nothing but upstream's own computation is asked for, in whatever precision: no wrapper is needed.

        Never for a mixture: upstream would train on blank cameras and padded action dimensions as if they were real,
        so that the baseline, too, is the exact computation, on padded rows.
        """
        return (
            self.packing.name == "none"
            and self.attention.name == "upstream"
            and self.vision_tokens == "upstream"
            and self.action_pad == "host"
            and self.flow_samples == 1
            and not self.mixture
        )


@dataclass
class InstalledFeatures:
    """What is in force on a policy.

    Attributes:
        installation: the wrapper's, None for pure upstream.
        attention_backend: its name.
        wrapper: the policy's wrapper, None for pure upstream.
        composer: the packer where it composes the batches.
        step_count: what a composed step's losses are divided by.
        quantization: the quantizer's, None for weights in the policy's own precision.
        precision: that of the training precision, None for matrix products in the policy's own.
    """

    installation: Installation | None
    attention_backend: str
    wrapper: Any = None
    composer: BatchComposer | None = None
    step_count: StepCount | None = None
    quantization: LowPrecision | None = None
    precision: PrecisionInstallation | None = None

    def describe(self) -> dict[str, Any]:
        """What differs from upstream, for reports; empty for pure upstream."""
        low_precision = {"quantization": self.quantization, "precision": self.precision}
        described = {} if self.installation is None else self.installation.describe()
        return described | {name: part.describe() for name, part in low_precision.items() if part is not None}

    def uninstall(self) -> None:
        """Give the policy back its own methods and weights."""
        for part in (self.quantization, self.precision, self.installation):
            if part is not None:
                part.uninstall()


def composes_batches(selection: FeatureSelection) -> bool:
    """Whether the packer composes the batches."""
    packing = selection.packing
    return packing.name != "none" and isinstance(plugins.build("packers", packing.name, packing.options), BatchComposer)


def run_traits(cfg: DictConfig, host_cfg: TrainPipelineConfig, selection: FeatureSelection) -> RunTraits:
    """What of a run a parallel strategy is asked about."""
    policy, optimizer = host_cfg.policy, host_cfg.optimizer or host_cfg.policy.get_optimizer_preset()
    packing = selection.packing
    packer = None if packing.name == "none" else plugins.build("packers", packing.name, packing.options)
    return RunTraits(
        support=support_of(policy.type),
        packed=not selection.is_upstream,
        packing=selection.packing.name,
        composes=isinstance(packer, BatchComposer),
        precision=selection.precision.name,
        adapters=host_cfg.peft is not None,
        mixture=selection.mixture,
        streaming=host_cfg.dataset.streaming,
        device=policy.device,
        batch_size=host_cfg.batch_size,
        evaluates_in_loop=cfg.evaluation.name == "upstream" and host_cfg.env is not None and host_cfg.eval_freq > 0,
        clips_nothing=optimizer.grad_clip_norm == 0,
        bins_per_step=packer.bins_per_step if isinstance(packer, BatchComposer) else 1,
        num_shapes=getattr(packer, "num_shapes", None) if isinstance(packer, ShapePadder) else None,
        checkpoint_format=cfg.checkpoint.format if host_cfg.save_checkpoint else None,
        publishes=_publication(host_cfg),
        patches=tuple(cfg.patches),
    )


def _publication(host_cfg: TrainPipelineConfig) -> str | None:
    if getattr(host_cfg.policy, "push_to_hub", False):
        return "policy.push_to_hub=true"
    uploads = host_cfg.wandb.enable and not host_cfg.wandb.disable_artifact and host_cfg.save_checkpoint
    return "logging.options.disable_artifact=false" if uploads else None


def select_features(cfg: DictConfig) -> FeatureSelection:
    """Read the feature groups and check that every name is registered.

    Raises:
        embodix.plugins.PluginError: an unknown packer, attention backend, quantizer or precision, or a broken plugin
            under strict_plugins.
        ValueError: an unknown ``vision_tokens`` or ``action_pad``, or ``flow_samples`` below 1.
    """
    if cfg.strict_plugins:
        plugins.registry().require_healthy()
    selection = FeatureSelection(
        packing=named_choice(cfg.packing),
        attention=named_choice(cfg.attention),
        vision_tokens=cfg.vision_tokens.name,
        action_pad=cfg.action_pad.name,
        flow_samples=cfg.flow_samples,
        mixture=is_mixture(cfg.dataset),
        quantization=named_choice(cfg.quantization),
        precision=named_choice(cfg.precision),
    )
    require_known(selection)
    return selection


def require_known(selection: FeatureSelection) -> None:
    """Check that every name of a selection is registered.

    Raises:
        embodix.plugins.PluginError: an unknown packer, attention backend, quantizer or precision.
        embodix.arguments.ArgumentError: an option that one of them does not take, or a value that is none of its type.
        ValueError: an unknown ``vision_tokens`` or ``action_pad``, or ``flow_samples`` below 1.
    """
    plugins.build("packers", selection.packing.name, selection.packing.options)
    for kind, choice in (("quantizers", selection.quantization), ("precisions", selection.precision)):
        if choice.name != UNCHANGED:
            plugins.registry().arguments(kind, choice.name, choice.options)
    if selection.attention.name not in ("upstream", "auto"):
        plugins.registry().arguments("attention_backends", selection.attention.name, selection.attention.options)
    _require_one_of("vision_tokens", selection.vision_tokens, ("upstream", "valid"))
    _require_one_of("action_pad", selection.action_pad, ("host", "mask"))
    if selection.flow_samples < 1:
        raise ValueError(f"flow_samples must be at least 1; got {selection.flow_samples}.")


def select_training_features(cfg: DictConfig) -> FeatureSelection:
    """``select_features`` for a run that trains.

    Raises:
        embodix.plugins.PluginError: as there.
        ValueError: as there, or quantized weights, which have no gradient.
    """
    selection = select_features(cfg)
    if selection.quantization.name != UNCHANGED:
        precisions = [option for option in options_of("precision") if option != UNCHANGED]
        instead = f"; precision={precisions[0]} trains with low-precision matrix products" if precisions else ""
        raise ValueError(
            f"quantization={selection.quantization.name} is for evaluation and rollout: its weights have no gradient, "
            f"and upstream's checkpoints, of adapters too, stand on unquantized ones. Set quantization=none{instead}."
        )
    return selection


def install_features(
    policy: PreTrainedPolicy,
    selection: FeatureSelection,
    accelerator: Accelerator,
    *,
    stored_weights: Mapping[str, StoredWeight] | None = None,
    keep_originals: bool = True,
    gemm_table: Path | None = None,
) -> InstalledFeatures:
    """Make ``policy`` compute as selected, below a model of PEFT around it; call before the accelerator wraps it.

    Args:
        stored_weights: module path -> weight of a quantized checkpoint, which the quantizer takes as it is.
        keep_originals: keep what the quantizer replaces, so that ``uninstall`` can put it back.
        gemm_table: where a resumed run has kept the timings that its precision decided by, if it has.

    Raises:
        embodix.plugins.PluginError: no wrapper for this policy type.
        ValueError: the attention backend, the quantizer or the precision cannot run here.
    """
    policy = bare_policy(policy)
    installed = _install_wrapper(policy, selection, accelerator)
    policy_type = policy.config.type
    try:
        if selection.quantization.name != UNCHANGED:
            chosen = selection.quantization
            quantizer: Quantizer = plugins.build("quantizers", chosen.name, chosen.options)
            installed.quantization = quantizer.install(
                policy, policy_type, stored=stored_weights, keep_originals=keep_originals
            )
        if selection.precision.name != UNCHANGED:
            installed.precision = _install_precision(policy, selection.precision, accelerator, gemm_table)
    except BaseException:
        installed.uninstall()
        raise
    return installed


def _install_precision(
    policy: PreTrainedPolicy, choice: NamedChoice, accelerator: Accelerator, gemm_table: Path | None
) -> PrecisionInstallation:
    """Matrix products in low precision; a resumed run decides by its own timings unless it names others."""
    if accelerator.mixed_precision == "fp16":
        raise ValueError(
            f"precision={choice.name} refuses float16, whose range the gradients of low-precision products leave; "
            "accelerate was started with mixed_precision=fp16. Take bf16 or no."
        )
    known = gemm_table if gemm_table is not None and gemm_table.is_file() else None
    precision: TrainingPrecision = plugins.build("precisions", choice.name, choice.options)
    return precision.install(policy, policy.config.type, accelerator.device, gemm_table=known)


def _install_wrapper(
    policy: PreTrainedPolicy, selection: FeatureSelection, accelerator: Accelerator
) -> InstalledFeatures:
    """The packed computation, where anything but upstream's is asked for."""
    if selection.is_upstream:
        return InstalledFeatures(None, "upstream dense eager")
    wrapper = support_of(policy.config.type).wrapper()
    settings = packed_settings(policy, selection, accelerator.device, accelerator.mixed_precision)
    composer = settings.packer if isinstance(settings.packer, BatchComposer) else None
    step_count = StepCount() if composer is not None else None
    settings = replace(
        settings, reduce_count=step_count or _mean_over_ranks(accelerator), uneven_batches=composer is not None
    )
    backend = settings.attention.name if settings.attention is not None else "upstream dense eager"
    return InstalledFeatures(wrapper.install(policy, settings), backend, wrapper, composer, step_count)


def packed_settings(
    policy: PreTrainedPolicy, selection: FeatureSelection, device: torch.device | str, mixed_precision: str = "no"
) -> FastPathSettings:
    """The packed computation of a selection in one process, as far as the choice of features decides it.

    Args:
        mixed_precision: accelerate's name of the dtype that autocast computes in.

    Raises:
        ValueError: the attention backend cannot run here.
    """
    attention = None
    if selection.attention.name != "upstream":
        attention = choose_backend(
            selection.attention.name,
            device=device,
            dtype=_attention_dtype(policy, mixed_precision),
            head_dim=support_of(policy.config.type).wrapper().head_dim(policy),
            candidates=_attention_candidates(selection.attention),
        )
    return FastPathSettings(
        packer=plugins.build("packers", selection.packing.name, selection.packing.options),
        attention=attention,
        vision_tokens=selection.vision_tokens,  # type: ignore[arg-type]  # checked by require_known
        action_pad=selection.action_pad,  # type: ignore[arg-type]
        flow_samples=selection.flow_samples,
    )


def _attention_candidates(choice: NamedChoice) -> dict[str, Callable[[], Any]]:
    """Registered backends by name; the chosen one gets its options."""
    candidates: dict[str, Callable[[], Any]] = {}
    for name in plugins.registry().names("attention_backends"):
        options = choice.options if name == choice.name else {}
        candidates[name] = _constructor(name, options)
    return candidates


def _constructor(name: str, options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: plugins.build("attention_backends", name, options)


def _attention_dtype(policy: PreTrainedPolicy, mixed_precision: str) -> torch.dtype:
    """The dtype attention will see: autocast's under mixed precision, else that of the policy's parameters."""
    own = support_of(policy.config.type).own_autocast(policy.config)
    if own is not None:
        dtype: torch.dtype = getattr(torch, own)
        return dtype
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    if mixed is not None:
        return mixed
    return {"bfloat16": torch.bfloat16}.get(getattr(policy.config, "dtype", "float32"), torch.float32)


def _mean_over_ranks(accelerator: Accelerator) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if accelerator.num_processes == 1:
        return None
    return lambda count: over_ranks(count, accelerator, "mean")


def named_choice(node: Any) -> NamedChoice:
    """The choice that a config's node holds."""
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return NamedChoice(name=str(plain["name"]), options=dict(plain.get("options") or {}))


def _require_one_of(group: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"{group} must be one of {', '.join(known)}; got {name!r}.")
