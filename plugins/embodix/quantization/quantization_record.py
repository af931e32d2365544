# SPDX-License-Identifier: Apache-2.0
"""``quantize.json``: what was converted and what it saves, as plain containers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from embodix.policies.support import support_of
from embodix.quantization.accuracy import EXACT
from embodix.quantization.selection import ModuleChoice
from embodix.report.manifest import collect_provenance
from embodix_fp8.blocks import BLOCK
from embodix_fp8.file_format import SCALE, WEIGHT
from embodix_fp8.format_words import FORMAT
from embodix_fp8.planned_conversion import PlannedConversion


def quantization_record(
    planned: PlannedConversion, source: str, recipe: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a conversion before it is carried out.

    Args:
        planned: what becomes of every tensor.
        source: the checkpoint, or the policy whose sizes were counted.
        recipe: this command's choices for the file.
        options: the quantizer's.
    """
    converted = planned.converted
    dropped = {name.removesuffix(WEIGHT) for name in planned.plan.drop}
    skipped = [choice for choice in planned.choices if choice not in converted and choice.path not in dropped]
    return {
        "title": f"{planned.policy_type}: {source}",
        "source": source,
        "policy_type": planned.policy_type,
        "policy_name": support_of(planned.policy_type).display_name,
        "quantization": {
            "name": "fp8_block",
            "format": dict(FORMAT),
            "block": list(BLOCK),
            "options": dict(options),
            **recipe,
            "converted": [_converted(choice, planned) for choice in converted],
            "skipped": [_module(choice) for choice in skipped],
            "dropped": [{"name": name, "shape": list(planned.before[name].shape)} for name in planned.plan.drop],
        },
        "sizes": {
            **planned.sizes.to_json(),
            "definitions": [definition.to_json() for definition in planned.size_definitions],
        },
        "gate": None,
        "provenance": dataclasses.asdict(collect_provenance()),
    }


def add_sqnr(record: dict[str, Any], sqnr_db: Mapping[str, float]) -> None:
    """Add the signal-to-quantization-noise ratio of each converted module's weight, once it was written."""
    for module in record["quantization"]["converted"]:
        ratio = sqnr_db[module["path"]]
        module["sqnr_db"] = EXACT if math.isinf(ratio) else round(ratio, 2)


def _converted(choice: ModuleChoice, planned: PlannedConversion) -> dict[str, Any]:
    after = planned.after[choice.path + WEIGHT].num_bytes + planned.after[choice.path + SCALE].num_bytes
    return {
        **_module(choice),
        "bytes_before": planned.before[choice.path + WEIGHT].num_bytes,
        "bytes_after": after,
    }


def _module(choice: ModuleChoice) -> dict[str, Any]:
    return {"path": choice.path, "kind": choice.kind, "shape": list(choice.shape), "reason": choice.reason}
