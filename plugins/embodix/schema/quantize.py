# SPDX-License-Identifier: Apache-2.0
"""Schema of ``lerobot quantize``: what ``hydra_conf/quantize.yaml`` may hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from embodix.config.train_schema import NamedChoice, TokenizerSettings
from embodix.schema.gate import AccuracyGateSettings


@dataclass
class GateChoice(AccuracyGateSettings):
    """The accuracy gate's settings, and whether it is passed before anything is written (``--gate``)."""

    enabled: bool = False


@dataclass
class QuantizeApp:
    """Root of the ``lerobot quantize`` config.

    Attributes:
        checkpoint: a run, checkpoint or model folder, or a model on the hub.
        output: the folder that is written; it must not exist.
        overwrite: replace ``output`` where it is an earlier result of ``lerobot quantize``.
        unused_heads: vocabulary heads that the policy never reads: ``keep`` them in high precision, ``quantize`` them
            (the action expert's stays), or ``drop`` them from the file.
        rest_dtype: of the weights that are not quantized: ``keep``, ``bfloat16`` or ``float32``.
        export_language_model: also write the language model alone, as transformers loads it: a folder, or true for
            ``<output>/language_model``.
        sizes: ``also``, or ``only`` for the table of sizes alone, of the checkpoint or of ``policy``.
        policy: with ``sizes=only``, the policy whose sizes are counted; its ``device`` is where the gate runs.
        architecture: sizes of a small ``policy``.
        patches: unused; what a policy's group sets.
        gate: comparison on held-out samples before anything is written.
    """

    checkpoint: str | None = None
    output: str | None = None
    overwrite: bool = False
    quantization: NamedChoice = field(default_factory=NamedChoice)
    unused_heads: str = "keep"
    rest_dtype: str = "keep"
    export_language_model: Any = False
    sizes: str = "also"
    policy: Any = field(default_factory=dict)
    architecture: Any = None
    patches: Any = field(default_factory=dict)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    gate: GateChoice = field(default_factory=GateChoice)
    strict_plugins: bool = True


def register() -> None:
    """Make the schema known to Hydra as ``schema/quantize``."""
    ConfigStore.instance().store(group="schema", name="quantize", node=QuantizeApp, package="_global_")
