# SPDX-License-Identifier: Apache-2.0
"""What a page of results is: one self-contained HTML file of findings, figures and tables, with what they rest on.

Every family of reports fills a `Page` and adds the sections of its own in a template that extends ``page.html.j2``. A
page has no script and no outside address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from markupsafe import Markup

from embodix.report import words
from embodix.report.runs import Run

HTML_NAME = "report.html"
FILTERS: Mapping[str, Callable[..., str]] = {
    "ratio": words.ratio,
    "percent": words.percent,
    "quantity": words.quantity,
    "memory": words.memory,
    "success": words.success_words,
}
TERMS = {
    "Wilson interval": "The range in which the true success rate lies with 95 % confidence, given the number of "
    "episodes.",
    "McNemar test": "Compares two policies on the same episodes; only episodes that one solves and the other does not "
    "count. A p-value near 1 means that they cannot be told apart.",
    "blind control": "A fixed action sequence that never looks. What it solves needs no vision.",
    "blank-image control": "The trained policy with every camera blanked. What it loses is what it used vision for.",
}


@dataclass(frozen=True)
class Card:
    """One finding: a short label, the figure, and the sentence that qualifies it.

    Attributes:
        kind: colours it: good, bad or plain.
    """

    label: str
    figure: str
    sentence: str
    kind: str


@dataclass(frozen=True)
class Page:
    """What every page of results has.

    Attributes:
        title: also of the window.
        paragraph: what was run, for a reader who was not there.
        provenance: code and machine, as label and text.
        cards: the findings, most important first.
        warnings: what a reader must mind.
        warnings_title: over them.
        figures: drawings by the name that the template has for them; None where there is nothing to draw.
        details: what unfolds, as summary and text: configurations, settings.
        glossary: the terms used.
    """

    title: str
    paragraph: str
    provenance: Sequence[tuple[str, str]]
    cards: Sequence[Card] = ()
    warnings: Sequence[str] = ()
    warnings_title: str = "Mind"
    figures: Mapping[str, str | None] = field(default_factory=dict)
    details: Sequence[tuple[str, str]] = ()
    glossary: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        template: str,
        *,
        package: str = "embodix.report",
        filters: Mapping[str, Callable[..., str]] | None = None,
        **sections: Any,
    ) -> str:
        """The page as text.

        Args:
            template: of the family; it sees ``page``, ``figures`` and ``sections``.
            package: whose ``templates`` folder holds it.
            filters: ways to say a figure that only this family has.
            sections: what the family's own sections show.
        """
        packages = dict.fromkeys((package, "embodix.report"))
        environment = jinja2.Environment(
            loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in packages]),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {**FILTERS, **(filters or {})}
        figures = {name: None if svg is None else Markup(svg) for name, svg in self.figures.items()}
        return environment.get_template(template).render(page=self, figures=figures, **sections)


def colour(holds: bool) -> str:
    """The kind of a card whose finding is good or bad."""
    return "good" if holds else "bad"


def provenance_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Code and machine as label and text; where runs differ, each value with its run."""
    rows: dict[str, dict[str, str]] = {}
    for run in runs:
        texts = _provenance_texts(dataclasses.asdict(run.manifest.provenance))
        texts["seed"] = "" if run.manifest.seed is None else str(run.manifest.seed)
        texts["created at"] = run.manifest.created_at
        texts["patches of upstream"] = ", ".join(run.manifest.patches) or "none"
        for label, text in texts.items():
            rows.setdefault(label, {})[run.name] = text
    return [(label, _merged(values)) for label, values in rows.items() if any(values.values())]


def known_provenance(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A recorded provenance as label and text, without what is not known."""
    return [(label, text) for label, text in _provenance_texts(provenance).items() if text]


def _provenance_texts(provenance: Mapping[str, Any]) -> dict[str, str]:
    """A provenance as label and text; "" for what is not known."""
    fields = dict(provenance)
    if fields.pop("dirty", None):
        fields["commit"] += " with uncommitted changes"
    fields["versions"] = [f"{name} {version}" for name, version in fields.get("versions", {}).items()]
    return {name.replace("_", " "): _text(value) for name, value in fields.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _merged(values: dict[str, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {value or 'none'}" for name, value in values.items())
