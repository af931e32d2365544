# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize``: from a composed config to a quantized model folder and the record of what was done."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.checkpoints.finished_folder import finished_folder
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.checkpoints.processor_files import require_whole_processors
from embodix.checkpoints.quantized_weights import WEIGHT
from embodix.checkpoints.skeleton import policy_skeleton, unfed_config
from embodix.config.compose import merge_overrides
from embodix.contracts import CheckpointQuantizer, ExportsLanguageModel, StoredWeight
from embodix.policies.quantizers import checkpoint_quantizers
from embodix.policies.support import require_offered, support_of, types_offering
from embodix.quantization.accuracy import EXACT
from embodix.quantization.accuracy_gate import gate_checkpoint
from embodix.quantization.conversion import PlannedConversion, plan_conversion, write_weights
from embodix.quantization.quantized_folder import (
    RECORD_FILE,
    copy_model_files,
    require_place,
)
from embodix.quantization.selection import ModuleChoice
from embodix.report.manifest import collect_provenance, write_text_atomically
from embodix.report.quantization_page import render_quantization
from embodix.report.words import memory
from embodix.schema.gate import AccuracyGateSettings
from embodix.tensor_file import TensorFiles
from embodix.training.features import UNCHANGED

REST_DTYPES = {"keep": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
LANGUAGE_MODEL_FOLDER = "language_model"
PAGE_FILE = "quantize.html"
HEADS_OPTION = "unused_heads"  # of a quantizer that can convert the vocabulary heads that nothing reads
UNUSED_HEADS = ("keep", "quantize", "drop")


class GateFailedError(ValueError):
    """The quantized policy acts too differently from the original."""


@dataclass(frozen=True)
class QuantizeChoices:
    """What a command asks for, checked.

    Attributes:
        name: of the quantizer.
        quantizer: with ``options``.
        options: as in the config; ``unused_heads`` among them follows the command's.
        unused_heads: vocabulary heads that nothing reads: kept in high precision, quantized, or left out.
        rest_dtype: of the other weights; None keeps the file's.
        overrides: of the command.
    """

    name: str
    quantizer: CheckpointQuantizer
    options: dict[str, Any]
    unused_heads: str
    rest_dtype: torch.dtype | None
    overrides: list[str]

    @classmethod
    def of(cls, cfg: DictConfig, overrides: Sequence[str]) -> QuantizeChoices:
        """
        Raises:
            ValueError: a quantizer without a file format, or a choice that does not exist; fp16 is none.
        """
        _require_one_of("rest_dtype", cfg.rest_dtype, REST_DTYPES)
        _require_one_of("unused_heads", cfg.unused_heads, UNUSED_HEADS)
        _require_one_of("sizes", cfg.sizes, ("also", "only"))
        name = cfg.quantization.name
        _require_files(name)
        written: Any = OmegaConf.to_container(cfg.quantization.options, resolve=True)
        options = plugins.registry().arguments("quantizers", name, written)
        heads = _unused_heads(name, options, cfg.unused_heads)
        if HEADS_OPTION in options:
            options[HEADS_OPTION] = heads == "quantize"
        quantizer = _quantizer(name, options)
        if cfg.export_language_model and not isinstance(quantizer, ExportsLanguageModel):
            raise ValueError(
                f"quantization={name} does not export the language model alone. Leave export_language_model out."
            )
        return cls(name, quantizer, options, heads, REST_DTYPES[cfg.rest_dtype], list(overrides))

    def plan(self, policy: Any, policy_type: str, tensors: TensorFiles | None = None) -> PlannedConversion:
        """The conversion of a policy's skeleton; without ``tensors``, of a policy that has no file."""
        return plan_conversion(
            policy,
            policy_type,
            self.quantizer,
            None if tensors is None else tensors.specs,
            drop_unused_heads=self.unused_heads == "drop",
            rest_dtype=self.rest_dtype,
        )

    def evaluated_with(self, planned: PlannedConversion) -> list[str]:
        """Hydra overrides that choose the modules that the file has quantized."""
        named = [override for override in self.overrides if override.startswith("quantization.options.")]
        if HEADS_OPTION in self.options:
            has_head = any(choice.kind == "unused_head" for choice in planned.converted)
            named = merge_overrides(named, [f"quantization.options.{HEADS_OPTION}={str(has_head).lower()}"])
        return [f"quantization={self.name}", *named]


def _require_files(name: str) -> None:
    if name == UNCHANGED:
        raise ValueError(f"{_refusal(name)}.")


def _quantizer(name: str, options: Mapping[str, Any]) -> CheckpointQuantizer:
    quantizer = plugins.build("quantizers", name, options)
    if not isinstance(quantizer, CheckpointQuantizer):
        raise ValueError(
            f"{_refusal(name)}, which has no files (embodix.contracts.CheckpointQuantizer): lerobot eval and rollouts "
            "take it."
        )
    return quantizer


def _refusal(name: str) -> str:
    return f"lerobot quantize writes quantization={' or '.join(checkpoint_quantizers())}; got {name}"


def _unused_heads(name: str, options: Mapping[str, Any], chosen: str) -> str:
    """What becomes of them: the quantizer's own option also asks for their quantization."""
    if options.get(HEADS_OPTION):
        if chosen == "drop":
            raise ValueError("unused_heads=drop and quantization.options.unused_heads=true contradict each other.")
        return "quantize"
    if chosen == "quantize" and HEADS_OPTION not in options:
        raise ValueError(f"quantization={name} has no option {HEADS_OPTION}: set unused_heads=keep or drop.")
    return chosen


def run_quantization(cfg: DictConfig, overrides: Sequence[str], output_dir: Path) -> dict[str, Any]:
    """Quantize as the config says.

    Args:
        cfg: the composed ``quantize`` config.
        overrides: the Hydra overrides of this command.
        output_dir: for ``quantize.json`` and its page ``quantize.html``, also where the gate fails.

    Returns:
        The record, as ``quantize.json`` holds it.

    Raises:
        ValueError: a mistake in the config or the checkpoint, or a gate that fails; nothing is written then.
    """
    choices = QuantizeChoices.of(cfg, overrides)
    unread = [] if cfg.checkpoint is None else [f"policy.{name}" for name in cfg.policy if name != "device"]
    if unread:
        raise ValueError(
            f"A checkpoint is quantized as it is; {', '.join(unread[:3])} would change nothing. Leave the policy out, "
            "but for policy.device of the gate."
        )
    record = _count_policy(cfg, choices) if cfg.checkpoint is None else _Quantization(cfg, choices, output_dir).run()
    _write_results(record, output_dir)
    return record


def _count_policy(cfg: DictConfig, choices: QuantizeChoices) -> dict[str, Any]:
    """Sizes of a policy that a group describes, without weights."""
    fields: Any = OmegaConf.to_container(cfg.policy, resolve=True)
    if cfg.sizes != "only" or "type" not in fields:
        groups = [support_of(policy_type).config_group for policy_type in reversed(types_offering("module_kinds"))]
        policies = " or ".join(f"policy={group} sizes=only" for group in groups)
        raise ValueError(
            "lerobot quantize needs a checkpoint and a folder to write: lerobot quantize outputs/train/.../run OUT. "
            f"For sizes alone, name a policy: {policies}."
        )
    architecture: Any = OmegaConf.to_container(cfg.architecture) if cfg.architecture is not None else None
    policy = policy_skeleton(unfed_config(fields), architecture)
    planned = choices.plan(policy, fields["type"])
    source = "the policy as it is built" + ("" if architecture is not None else ", at its real size")
    return quantization_record(planned, source, choices)


class _Quantization:
    """The conversion of one checkpoint."""

    def __init__(self, cfg: DictConfig, choices: QuantizeChoices, output_dir: Path) -> None:
        self._cfg, self._choices, self._output_dir = cfg, choices, output_dir
        self._source = find_model(cfg.checkpoint).local()
        self._folder, self._output = Path(self._source.model), Path(cfg.output)
        require_whole_processors(self._folder)
        if self._source.quantizer() is not None:
            raise ValueError(f"checkpoint={cfg.checkpoint} is quantized already; give the one that it was made from.")
        self._source.require_policy("quantize")
        self._source.require_whole_mixture()
        known = "lerobot quantize knows the language models of"
        remedy = f"checkpoint={cfg.checkpoint} can't be quantized."
        require_offered(self._source.policy_type(), "module_kinds", known, remedy)
        if cfg.sizes == "also":
            require_place(self._folder, self._output, overwrite=cfg.overwrite)
            if isinstance(cfg.export_language_model, str) and Path(cfg.export_language_model).exists():
                raise ValueError(f"export_language_model={cfg.export_language_model} exists. Give another folder.")

    def run(self) -> dict[str, Any]:
        """Plan, count, pass the gate, write."""
        policy_type = self._source.policy_type()
        run_cfg = self._source.compose_run(policy_type, [])
        with TensorFiles(self._folder) as tensors:
            with prepared_host(self._source, run_cfg, self._cfg.tokenizer.directory):
                policy = policy_skeleton(policy_config(self._source, {}), self._source.architecture)
            planned = self._choices.plan(policy, policy_type, tensors)
            record = quantization_record(planned, str(self._folder), self._choices)
            if self._cfg.gate.enabled:
                self._pass_gate(run_cfg, record)
            if self._cfg.sizes == "also":
                try:
                    self._write(tensors, planned, record)
                except OSError as error:
                    needed = memory(planned.sizes.total.bytes_after)
                    raise ValueError(
                        f"{self._output} could not be written: {error}. Nothing of it was left; it takes {needed}."
                    ) from error
        return record

    def _pass_gate(self, run_cfg: DictConfig, record: dict[str, Any]) -> None:
        """Compare the policy with its quantized self and record it.

        Raises:
            GateFailedError: a rule is broken; the record and its page show what was measured.
        """
        settings: Any = OmegaConf.to_container(self._cfg.gate, resolve=True)
        del settings["enabled"]
        device: Any = {"device": self._cfg.policy.device}
        tokenizer = self._cfg.tokenizer.directory
        quantizer, gate = self._choices.quantizer, AccuracyGateSettings(**settings)
        result = gate_checkpoint(self._source, run_cfg, quantizer, gate, device, tokenizer)
        record["gate"] = result.to_json()
        if not result.passed:
            _write_results(record, self._output_dir)
            failures = "\n".join(f"  {failure}" for failure in result.failures)
            raise GateFailedError(
                f"The accuracy gate failed, so nothing was written:\n{failures}\nAll that was measured: "
                f"{self._output_dir / PAGE_FILE}. gate.thresholds changes a rule."
            )

    def _write(self, tensors: TensorFiles, planned: PlannedConversion, record: dict[str, Any]) -> None:
        recorded = self._source.recorded_overrides(planned.policy_type)
        overrides = merge_overrides(recorded, self._choices.evaluated_with(planned))
        noise: dict[str, float] = {}

        def measure(path: str, weight: torch.Tensor, stored: StoredWeight) -> None:
            noise[path] = stored.sqnr_db(weight)

        with finished_folder(self._output) as folder:
            copy_model_files(self._folder, folder, planned.plan.layout.to_json(), overrides)
            write_weights(tensors, planned.plan, folder, measure)
            _add_sqnr(record, noise)
            record["output"] = str(self._output)
            if self._cfg.export_language_model:
                record["language_model"] = self._export(planned, folder)
            _write_record(record, folder)

    def _export(self, planned: PlannedConversion, folder: Path) -> dict[str, Any]:
        """The language model alone, in a folder of its own."""
        chosen, quantizer = self._cfg.export_language_model, self._choices.quantizer
        assert isinstance(quantizer, ExportsLanguageModel)
        with ExitStack() as stack:
            place = folder / LANGUAGE_MODEL_FOLDER
            if chosen is not True:
                place = stack.enter_context(finished_folder(Path(chosen)))
            exported = quantizer.export_language_model(
                planned.policy, planned.policy_type, folder, place, self._choices.rest_dtype
            )
        return {"folder": str(self._output / LANGUAGE_MODEL_FOLDER if chosen is True else chosen), **exported}


def quantization_record(planned: PlannedConversion, source: str, choices: QuantizeChoices) -> dict[str, Any]:
    """``quantize.json`` before the conversion is carried out: what is converted and what it saves.

    Args:
        planned: what becomes of every tensor.
        source: the checkpoint, or the policy whose sizes were counted.
        choices: of the command.
    """
    converted = planned.converted
    dropped = {name.removesuffix(WEIGHT) for name in planned.plan.drop}
    skipped = [choice for choice in planned.choices if choice not in converted and choice.path not in dropped]
    rest_dtype = str(choices.rest_dtype).removeprefix("torch.") if choices.rest_dtype else "keep"
    return {
        "title": f"{planned.policy_type}: {source}",
        "source": source,
        "policy_type": planned.policy_type,
        "policy_name": support_of(planned.policy_type).display_name,
        "quantization": {
            "name": choices.name,
            "format": dataclasses.asdict(choices.quantizer.words),
            **planned.plan.layout.describe(),
            "options": dict(choices.options),
            "unused_heads": choices.unused_heads,
            "rest_dtype": rest_dtype,
            "converted": [
                {
                    **_module(choice),
                    "bytes_before": planned.before[choice.path + WEIGHT].num_bytes,
                    "bytes_after": planned.quantized_bytes(choice.shape),
                }
                for choice in converted
            ],
            "skipped": [_module(choice) for choice in skipped],
            "dropped": [{"name": name, "shape": list(planned.before[name].shape)} for name in planned.plan.drop],
        },
        "sizes": {
            **planned.sizes.to_json(),
            "definitions": [definition.to_json() for definition in planned.size_definitions],
        },
        "gate": None,
        "provenance": dataclasses.asdict(collect_provenance()),
        "overrides": choices.overrides,
    }


def _module(choice: ModuleChoice) -> dict[str, Any]:
    return {"path": choice.path, "kind": choice.kind, "shape": list(choice.shape), "reason": choice.reason}


def _add_sqnr(record: dict[str, Any], sqnr_db: Mapping[str, float]) -> None:
    """The signal-to-quantization-noise ratio of each converted module's weight, once it was written."""
    for module in record["quantization"]["converted"]:
        ratio = sqnr_db[module["path"]]
        module["sqnr_db"] = EXACT if math.isinf(ratio) else round(ratio, 2)


def _write_results(record: dict[str, Any], output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_record(record, output_dir)
    write_text_atomically(output_dir / PAGE_FILE, render_quantization(record))


def _write_record(record: dict[str, Any], folder: Path) -> None:
    write_text_atomically(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def _require_one_of(name: str, value: str, known: Sequence[str] | dict[str, Any]) -> None:
    if value not in known:
        refused = " fp16 is refused: its range is too small for the activations." if "16" in value else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.{refused}")
