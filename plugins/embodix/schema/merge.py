# SPDX-License-Identifier: Apache-2.0
"""Schema of ``lerobot merge``: what ``hydra_conf/merge.yaml`` may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from embodix.config.train_schema import TokenizerSettings


@dataclass
class MergeApp:
    """Root of the ``lerobot merge`` config.

    Attributes:
        checkpoint: a run, checkpoint or model folder with adapters, or a model on the hub.
        output: the folder that is written; it must not exist.
        base: the model that the adapters stand beside, where it is not where they were trained.
        tokenizer: an offline tokenizer, where it is not where the run had it.
    """

    checkpoint: str = MISSING
    output: str = MISSING
    base: str | None = None
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    strict_plugins: bool = True


def register() -> None:
    """Make the schema known to Hydra as ``schema/merge``."""
    ConfigStore.instance().store(group="schema", name="merge", node=MergeApp, package="_global_")
