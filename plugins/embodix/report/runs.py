# SPDX-License-Identifier: Apache-2.0
"""Read run folders: what `lerobot train` leaves behind, and the variants of a comparison or sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embodix.report.evaluation import Evaluation, read_evaluation
from embodix.report.evaluation_record import RESULTS_FILE
from embodix.report.manifest import Manifest, load_manifest
from embodix.report.steps import StepRecord, read_steps

VARIANTS_FOLDER, EVALUATION_FOLDER = "variants", "evaluation"


@dataclass(frozen=True)
class Run:
    """One trained variant: its name in the report, folder, manifest, steps and (if evaluated) success."""

    name: str
    folder: Path
    manifest: Manifest
    steps: list[StepRecord]
    evaluation: Evaluation | None


def read_run(folder: Path | str, name: str | None = None, results: Path | None = None) -> Run:
    """Read one run folder (``manifest.json``, ``steps.jsonl``).

    Args:
        name: the variant's name in the report; default: the manifest's.
        results: ``results.json`` of its evaluation; there need not be one.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
    """
    folder = Path(folder)
    manifest = load_manifest(folder / "manifest.json")
    steps = read_steps(folder / "steps.jsonl")
    if not steps:
        raise ValueError(f"{folder / 'steps.jsonl'} must hold at least one step; got none. Train the run first.")
    return Run(name or manifest.variant, folder, manifest, steps, read_evaluation(results) if results else None)


def read_variants(folder: Path | str) -> list[Run]:
    """Read every run of a comparison folder (``<folder>/variants/<name>``), in the order they were made.

    The evaluation of each is in ``<folder>/evaluation/<name>/results.json``.

    Raises:
        FileNotFoundError: no such runs.
    """
    runs_folder = Path(folder) / VARIANTS_FOLDER
    names = [path.parent.name for path in runs_folder.glob("*/manifest.json")]
    evaluated = Path(folder) / EVALUATION_FOLDER
    found = [read_run(runs_folder / name, name, evaluated / name / RESULTS_FILE) for name in names]
    if not found:
        raise FileNotFoundError(
            f"A comparison needs run folders in {runs_folder}/<variant>/; got none. "
            "Run `lerobot compare`, which trains the variants and writes them there."
        )
    return sorted(found, key=lambda run: (run.manifest.created_at, run.name))
