# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize``: from a composed config to a quantized model folder and the record of what was done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.checkpoints.model_folder import ModelFolder, find_model
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.checkpoints.skeleton import policy_skeleton, unfed_config
from embodix.config.compose import merge_overrides
from embodix.policies.support import require_offered
from embodix.quantization.gate_checkpoint import gate_checkpoint
from embodix.quantization.quantization_record import add_sqnr, quantization_record
from embodix.quantization.quantized_folder import (
    RECORD_FILE,
    copy_model_files,
    finished_folder,
    require_place,
    require_whole_model,
)
from embodix.report.manifest import write_text_atomically
from embodix.report.quantization_page import render_quantization
from embodix.report.words import memory
from embodix.schema.gate import GateSettings
from embodix_fp8.blocks import ScaledWeight
from embodix_fp8.conversion import sqnr_of_weight_db, write_weights
from embodix_fp8.file_format import QuantizedWeights
from embodix_fp8.language_model_export import export_language_model
from embodix_fp8.planned_conversion import PlannedConversion, Recipe, UnusedHeads, plan_conversion
from embodix_fp8.tensor_file import TensorFiles

QUANTIZER = "fp8_block"
REST_DTYPES = {"keep": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
LANGUAGE_MODEL_FOLDER = "language_model"
PAGE_FILE = "quantize.html"
UNUSED_HEADS: tuple[UnusedHeads, ...] = ("keep", "quantize", "drop")


class GateFailedError(ValueError):
    """The quantized policy acts too differently from the original."""


@dataclass(frozen=True)
class QuantizeChoices:
    """What a command asks for, checked.

    Attributes:
        recipe: what is converted.
        options: of the quantizer.
        overrides: of the command.
    """

    recipe: Recipe
    options: dict[str, Any]
    overrides: list[str]

    @classmethod
    def of(cls, cfg: DictConfig, overrides: Sequence[str]) -> QuantizeChoices:
        """
        Raises:
            ValueError: another format than block-scaled FP8, or a choice that does not exist; fp16 is none.
        """
        if cfg.quantization.name != QUANTIZER:
            raise ValueError(f"lerobot quantize writes quantization={QUANTIZER}; got {cfg.quantization.name}.")
        _require_one_of("rest_dtype", cfg.rest_dtype, REST_DTYPES)
        _require_one_of("unused_heads", cfg.unused_heads, UNUSED_HEADS)
        _require_one_of("sizes", cfg.sizes, ("also", "only"))
        options: Any = OmegaConf.to_container(cfg.quantization.options, resolve=True)
        if options["unused_heads"] and cfg.unused_heads == "drop":
            raise ValueError("unused_heads=drop and quantization.options.unused_heads=true contradict each other.")
        heads: UnusedHeads = "quantize" if options["unused_heads"] else cfg.unused_heads
        options["unused_heads"] = heads == "quantize"
        recipe = Recipe(bool(options["embeddings"]), heads, REST_DTYPES[cfg.rest_dtype])
        return cls(recipe, options, list(overrides))

    def evaluated_with(self, planned: PlannedConversion) -> list[str]:
        """Hydra overrides that choose the modules that the file has in FP8."""
        has_head = any(choice.kind == "unused_head" for choice in planned.converted)
        heads = f"quantization.options.unused_heads={str(has_head).lower()}"
        named = [override for override in self.overrides if override.startswith("quantization.options.")]
        return [f"quantization={QUANTIZER}", *merge_overrides(named, [heads])]

    def to_json(self) -> dict[str, Any]:
        """The choices for the file, for the record."""
        dtype = str(self.recipe.rest_dtype).removeprefix("torch.") if self.recipe.rest_dtype else "keep"
        return {"unused_heads": self.recipe.unused_heads, "rest_dtype": dtype}


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
    record = _count_policy(cfg, choices) if cfg.checkpoint is None else _Quantization(cfg, choices, output_dir).run()
    _write_results(record, output_dir)
    return record


def _count_policy(cfg: DictConfig, choices: QuantizeChoices) -> dict[str, Any]:
    """Sizes of a policy that a group describes, without weights."""
    fields: Any = OmegaConf.to_container(cfg.policy, resolve=True)
    if cfg.sizes != "only" or "type" not in fields:
        raise ValueError(
            "lerobot quantize needs a checkpoint and a folder to write: lerobot quantize outputs/train/.../run OUT. "
            "For sizes alone, name a policy: policy=pi05 sizes=only."
        )
    architecture: Any = OmegaConf.to_container(cfg.architecture) if cfg.architecture is not None else None
    policy = policy_skeleton(unfed_config(fields), architecture)
    planned = plan_conversion(policy, fields["type"], choices.recipe)
    source = "the policy as it is built" + ("" if architecture is not None else ", at its real size")
    return _record(planned, source, choices)


def _record(planned: PlannedConversion, source: str, choices: QuantizeChoices) -> dict[str, Any]:
    record = quantization_record(planned, source, choices.to_json(), choices.options)
    return {**record, "overrides": choices.overrides}


class _Quantization:
    """The conversion of one checkpoint."""

    def __init__(self, cfg: DictConfig, choices: QuantizeChoices, output_dir: Path) -> None:
        self._cfg, self._choices, self._output_dir = cfg, choices, output_dir
        self._source = _local(find_model(cfg.checkpoint))
        self._folder, self._output = Path(self._source.model), Path(cfg.output)
        if self._source.is_quantized:
            raise ValueError(f"checkpoint={cfg.checkpoint} is quantized already; give the one that it was made from.")
        require_whole_model(self._folder)
        known, remedy = (
            "lerobot quantize knows the language models of",
            f"checkpoint={cfg.checkpoint} can't be quantized.",
        )
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
            planned = plan_conversion(policy, policy_type, self._choices.recipe, tensors.specs)
            record = _record(planned, str(self._folder), self._choices)
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
        quantizer = plugins.build("quantizers", QUANTIZER, self._choices.options)
        device: Any = {"device": self._cfg.policy.device}
        tokenizer = self._cfg.tokenizer.directory
        result = gate_checkpoint(self._source, run_cfg, quantizer, GateSettings(**settings), device, tokenizer)
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

        def measure(path: str, weight: torch.Tensor, scaled: ScaledWeight) -> None:
            noise[path] = sqnr_of_weight_db(weight, scaled)

        with finished_folder(self._output) as folder:
            copy_model_files(self._folder, folder, planned.plan.config.to_json(), overrides)
            write_weights(tensors, planned.plan, folder, measure)
            add_sqnr(record, noise)
            record["output"] = str(self._output)
            if self._cfg.export_language_model:
                record["language_model"] = self._export(planned, folder)
            _write_record(record, folder)

    def _export(self, planned: PlannedConversion, folder: Path) -> dict[str, Any]:
        """The language model alone, in a folder of its own."""
        chosen, dtype = self._cfg.export_language_model, self._choices.recipe.rest_dtype
        with ExitStack() as stack:
            weights = stack.enter_context(QuantizedWeights(folder))
            place = folder / LANGUAGE_MODEL_FOLDER
            if chosen is not True:
                place = stack.enter_context(finished_folder(Path(chosen)))
            exported = export_language_model(planned.policy, planned.policy_type, weights, place, dtype)
        return {
            "folder": str(self._output / LANGUAGE_MODEL_FOLDER if chosen is True else chosen),
            "architecture": exported.architecture,
            "num_quantized": exported.num_quantized,
            "in_high_precision": exported.ragged,
            "dtype": str(exported.dtype).removeprefix("torch."),
        }


def _local(source: ModelFolder) -> ModelFolder:
    """The same model in a folder on this machine."""
    if Path(source.model).is_dir():
        return source
    folder = Path(snapshot_download(source.model))
    return ModelFolder(str(folder), folder)


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
