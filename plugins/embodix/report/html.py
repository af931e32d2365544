# SPDX-License-Identifier: Apache-2.0
"""Render a comparison as one self-contained HTML page: no script, no outside address, figures inline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from embodix.report import plots, wording
from embodix.report.compare import CompareReport, PairSummary
from embodix.report.runs import Run
from embodix.report.steps import PHASES
from embodix.report.summary import VariantSummary


def render_html(report: CompareReport) -> str:
    """The page as text. Figures whose data were not recorded are left out."""
    environment = page_environment()
    verdicts = [(pair, wording.verdicts(report, pair)) for pair in report.pairs]
    return environment.get_template("compare.html.j2").render(
        report=report,
        run_paragraph=wording.what_was_run(report),
        verdicts=verdicts,
        verdict_labels=list(dict.fromkeys(item.label for _, items in verdicts for item in items)),
        summary=[_summary_row(report, variant) for variant in report.variants],
        phases=[(wording.PHASE_NAMES[phase], phase) for phase in PHASES],
        work=[_work_row(report, variant) for variant in report.variants],
        bounds=[pair for pair in report.pairs if pair.bound is not None],
        evaluated=[variant for variant in report.variants if variant.evaluation is not None],
        figures=_figures(report),
        provenance=provenance_rows(report.runs),
        configs=[(run.name, json.dumps(run.manifest.config, indent=2)) for run in report.runs],
        glossary=wording.GLOSSARY,
    )


def page_environment(*packages: str) -> jinja2.Environment:
    """The templates of the report pages, and of ``packages`` before them, with the words for figures as filters."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in (*packages, "embodix.report")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ratio": wording.ratio,
        "percent": wording.percent,
        "quantity": wording.quantity,
        "memory": wording.memory,
        "difference": wording.difference,
        "success": wording.success_words,
    }
    return environment


def _figures(report: CompareReport) -> dict[str, Markup | None]:
    drawn = {
        "loss": plots.loss_curves(report),
        "differences": plots.loss_differences(report),
        "phases": plots.phase_times(report),
        "ratios": plots.speed_ratios(report),
        "tokens": plots.tokens_per_sample(report),
        "success": plots.success_rates(report),
    }
    return markup_of(drawn)


def markup_of(drawn: Mapping[str, str | None]) -> dict[str, Markup | None]:
    """Drawings for a template, which must not escape them; None where there is nothing to draw."""
    return {name: None if svg is None else Markup(svg) for name, svg in drawn.items()}


def _pair_of(report: CompareReport, variant: VariantSummary) -> PairSummary | None:
    return next((pair for pair in report.pairs if pair.name == variant.name), None)


def _summary_row(report: CompareReport, variant: VariantSummary) -> dict[str, Any]:
    pair = _pair_of(report, variant)
    return {
        "variant": variant,
        "ratio": pair and pair.step_ratio,
        "samples_per_s": variant.samples_per_cpu_s if report.pairs[0].clock.startswith("process") else
        variant.samples_per_wall_s,
        "pair": pair,
        "loss_difference": wording.loss_difference(pair) if pair else "",
        **wording.variant_row(variant),
    }  # fmt: skip


def _work_row(report: CompareReport, variant: VariantSummary) -> dict[str, Any]:
    pair = _pair_of(report, variant)
    return {"variant": variant, "flop_ratio": pair and pair.flop_ratio, "bound": pair and pair.bound}


def provenance_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Code and machine as label and text; where runs differ, each value with its run."""
    rows: dict[str, dict[str, str]] = {}
    for run in runs:
        texts = provenance_texts(dataclasses.asdict(run.manifest.provenance))
        texts["seed"] = "" if run.manifest.seed is None else str(run.manifest.seed)
        texts["created at"] = run.manifest.created_at
        texts["patches of upstream"] = ", ".join(run.manifest.patches) or "none"
        for label, text in texts.items():
            rows.setdefault(label, {})[run.name] = text
    return [(label, _merged(values)) for label, values in rows.items() if any(values.values())]


def provenance_texts(provenance: Mapping[str, Any]) -> dict[str, str]:
    """A provenance as label and text; "" for what is not known."""
    fields = dict(provenance)
    if fields.pop("dirty", None):
        fields["commit"] += " with uncommitted changes"
    fields["versions"] = [f"{name} {version}" for name, version in fields.get("versions", {}).items()]
    return {
        name.replace("_", " "): ", ".join(map(str, value))
        if isinstance(value, list)
        else ""
        if value is None
        else str(value)
        for name, value in fields.items()
    }


def _merged(values: dict[str, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {value or 'none'}" for name, value in values.items())
