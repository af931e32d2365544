# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate on a checkpoint: its policy, its processors and samples of its own data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from omegaconf import DictConfig

from embodix.checkpoints.model_folder import ModelFolder
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.quantization.accuracy_gate import GateResult, Quantizer, run_gate
from embodix.quantization.held_out import HeldOutBatches, held_out_batches
from embodix.schema.gate import GateSettings


@dataclass(frozen=True)
class GatedCheckpoint:
    """What the gate measures: a policy, its postprocessor and samples.

    Any number of quantizers can be judged, one after the other.
    """

    policy: Any
    postprocessor: Any
    samples: HeldOutBatches
    settings: GateSettings

    def judge(self, quantizer: Quantizer) -> GateResult:
        """``run_gate`` with this quantizer."""
        policy = self.policy
        return run_gate(policy, policy.config.type, self.postprocessor, self.samples, quantizer, self.settings)


@contextmanager
def gated_checkpoint(
    source: ModelFolder,
    cfg: DictConfig,
    settings: GateSettings,
    policy: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> Iterator[GatedCheckpoint]:
    """Load a checkpoint and its samples; its patches and its tokenizer are in force inside the block.

    Args:
        source: not quantized: the gate compares with the weights that it was trained to.
        cfg: the train config of its run, as ``source.compose_run`` gives it.
        policy: fields of the policy's config that are changed, for example ``device``.
        tokenizer: folder of an offline tokenizer; None for the run's.

    Raises:
        ValueError: a quantized checkpoint, no data set on this machine, or fewer than two episodes.
    """
    source = source.member(cfg)
    if source.is_quantized:
        raise ValueError(
            f"The accuracy gate compares a checkpoint with its quantized self, and {source.model} is quantized "
            "already. Give the one that it was made from."
        )
    with prepared_host(source, cfg, tokenizer):
        config = policy_config(source, policy or {})
        samples = held_out_batches(source, cfg, settings, str(config.device))
        _, postprocessor = make_pre_post_processors(config, source.model)
        loaded = get_policy_class(config.type).from_pretrained(source.model, config=config)
        yield GatedCheckpoint(loaded.to(config.device).eval(), postprocessor, samples, settings)


def gate_checkpoint(
    source: ModelFolder,
    cfg: DictConfig,
    quantizer: Quantizer,
    settings: GateSettings,
    policy: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> GateResult:
    """``gated_checkpoint`` for one quantizer."""
    with gated_checkpoint(source, cfg, settings, policy, tokenizer) as gated:
        return gated.judge(quantizer)
