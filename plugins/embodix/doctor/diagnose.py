# SPDX-License-Identifier: Apache-2.0
"""The whole examination, with or without a config."""

from __future__ import annotations

from omegaconf import DictConfig

from embodix.doctor.findings import Diagnosis, find_implementations, find_patches, find_plugins, find_versions
from embodix.doctor.machine import default_target, inspect_machine
from embodix.doctor.needs import attention_target, unmet_needs
from embodix.plugins import PluginRegistry


def diagnose(registry: PluginRegistry, config: DictConfig | None = None) -> Diagnosis:
    """Examine this installation; with a config, also list in ``needs`` what that config lacks.

    Attention backends are tried on the config's device, dtype and head size; without a config, for this
    machine's default device.
    """
    target = default_target() if config is None else attention_target(config)
    diagnosis = Diagnosis(
        plugins=find_plugins(registry),
        implementations=find_implementations(registry, target),
        patches=find_patches(),
        versions=find_versions(),
        machine=inspect_machine(),
    )
    if config is not None:
        diagnosis.needs = unmet_needs(config, registry, diagnosis)
    return diagnosis
