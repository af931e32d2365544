# SPDX-License-Identifier: Apache-2.0
"""What a check finds: each finding has a kind of the catalogue, a place, a figure and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from embodix.report.words import count

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Location:
    """Where it is; None for what does not apply.

    Attributes:
        episode, frame: numbers in the data set.
        dimension: of the key's vector.
        file: relative to the data set's folder.
    """

    episode: int | None = None
    frame: int | None = None
    dimension: int | None = None
    file: str | None = None

    def __str__(self) -> str:
        named = (("episode", self.episode), ("frame", self.frame), ("dimension", self.dimension), ("file", self.file))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a look.

    Attributes:
        kind: its name in the catalogue.
        severity: ``error`` where training on it is wrong.
        key: feature of the data set, or the metadata file.
        figure: what was got, in words.
        remedy: what to do; a command line where there is one.
        place: the first of its places.
        dataset: member of a mixture; "" for a single data set.
    """

    kind: str
    severity: Severity
    key: str
    figure: str
    remedy: str
    place: Location = field(default_factory=Location)
    dataset: str = ""

    @property
    def sentence(self) -> str:
        """For a log or an error: kind, key, figure, place and remedy."""
        owner = f"{self.dataset}: " if self.dataset else ""
        where = f" ({self.place})" if str(self.place) else ""
        return f"{owner}{self.key}: {self.figure}{where} [{self.kind}]. {self.remedy}"


@dataclass(frozen=True)
class KeyFigures:
    """What one key's data are, for the table: widths and ranges as they are, and as the policy is given them.

    Attributes:
        key: feature of the data set.
        width: dimensions.
        dtype: of its column.
        normalisation: how the policy's processor scales it, "" for not at all.
        outside: largest share of a dimension's values outside the recorded q01 to q99; None where they are not known.
        largest: largest absolute value after normalisation; None where nothing is normalised.
        dataset: member of a mixture; "" for a single data set.
    """

    key: str
    width: int
    dtype: str
    normalisation: str = ""
    outside: float | None = None
    largest: float | None = None
    dataset: str = ""


@dataclass(frozen=True)
class CheckReport:
    """What was looked at and what was found.

    Attributes:
        dataset: names of the data sets.
        num_episodes, num_frames: that were read.
        keys: one row a key.
        findings: errors first.
        images: what of the images was looked at, in words.
        seconds: process CPU time of the reading; 0 where it was known from an earlier check.
    """

    dataset: str
    num_episodes: int
    num_frames: int
    keys: Sequence[KeyFigures]
    findings: Sequence[Finding]
    images: str = ""
    seconds: float = 0.0

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def verdict(self) -> str:
        """One sentence."""
        counted = f"{count(self.num_episodes, 'episode')}, {count(self.num_frames, 'frame')}"
        if not self.findings:
            remark = "nothing to remark" if self.num_frames else self.images
            return f"{self.dataset}: {counted}; {remark}."
        return f"{self.dataset}: {counted}; {count(len(self.errors), 'error')}, {count(len(self.warnings), 'warning')}."


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, each severity in the order it was found."""
    return sorted(findings, key=lambda finding: finding.severity != "error")


def merged(reports: Sequence[tuple[str, CheckReport]]) -> CheckReport:
    """One report of several data sets, each finding with the name of its own."""
    return CheckReport(
        dataset=", ".join(name for name, _ in reports),
        num_episodes=sum(report.num_episodes for _, report in reports),
        num_frames=sum(report.num_frames for _, report in reports),
        keys=[replace(row, dataset=name) for name, report in reports for row in report.keys],
        findings=sorted_findings(replace(f, dataset=name) for name, report in reports for f in report.findings),
        images="; ".join(f"{name}: {report.images}" for name, report in reports if report.images),
        seconds=sum(report.seconds for _, report in reports),
    )


def relative_to(root: Path, file: Path) -> str:
    """A file's name inside a data set."""
    return file.relative_to(root).as_posix()


def finding_fields(finding: Finding) -> dict[str, Any]:
    """As plain values, for JSON."""
    return {**vars(finding), "place": vars(finding.place)}


def finding_of(fields: dict[str, Any]) -> Finding:
    """From the plain values of ``finding_fields``."""
    return Finding(**{**fields, "place": Location(**fields["place"])})
