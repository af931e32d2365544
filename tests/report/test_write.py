# SPDX-License-Identifier: Apache-2.0
"""Reports are self-contained files, and the terminal shows the same figures."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree

import pytest
from rich.console import Console
from run_folders import write_run

from embodix.report import plots
from embodix.report.compare import SpeedBound, compare_runs
from embodix.report.comparison_page import write_comparison, write_report
from embodix.report.comparison_table import print_comparison, print_sweep
from embodix.report.runs import read_run, read_sweep, read_variants

BOUND = SpeedBound(2.1, 1.77, "π0.5 (4.1 B parameters)", "Two cameras.")


def printed(report) -> str:
    stream = io.StringIO()
    print_comparison(report, Console(file=stream, width=140))
    return stream.getvalue()


def test_the_page_is_self_contained(comparison):
    write_comparison(comparison, bounds={"embodix": BOUND})
    page = (comparison / "report.html").read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    # XML namespace names are never fetched
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in page
    assert "src=" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r"url\(#([^)]+)\)", page):
        assert reference in ids


def test_the_page_says_what_matters(comparison):
    write_comparison(comparison, bounds={"embodix": BOUND}, title="Packed <against> padded")
    page = (comparison / "report.html").read_text()
    assert "Packed &lt;against&gt; padded" in page
    for text in ("must not stand for", "29/30 = 97 %", "McNemar", "blank-image control", "617", "1018", "22.5 %"):
        assert text in page
    assert page.count("<svg") == 6


def test_figures_follow_the_theme_of_the_page(comparison):
    report = compare_runs(read_variants(comparison))
    for draw in (plots.loss_curves, plots.phase_times, plots.tokens_per_sample, plots.success_rates):
        svg = draw(report)
        xml.etree.ElementTree.fromstring(svg)
        assert "var(--ink)" in svg or "var(--muted)" in svg
        assert not re.search(r"#01[abcd]0", svg)  # no placeholder colour is left


def test_the_record_is_strict_json(comparison, tmp_path):
    write_run(comparison / "variants" / "diverged", "diverged", loss_shift=math.nan, created_at="2026-03")
    write_comparison(comparison)

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    record = json.loads((comparison / "report.json").read_text(), parse_constant=refuse)
    assert [variant["name"] for variant in record["variants"]] == ["upstream", "embodix", "diverged"]
    assert record["loss"]["diverged"]["60"] is None
    assert record["pairs"][0]["step_ratio"]["count"] == 55


def test_runs_without_counts_or_evaluation_are_reported_as_such(tmp_path):
    for index, name in enumerate(("upstream", "embodix")):
        folder = write_run(tmp_path / "variants" / name, name, num_steps=2, created_at=f"2026-0{index + 1}",
                           flops_per_step=None, peak_memory_bytes=None, num_parameters=None)  # fmt: skip
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        rows = [json.dumps({**line, "tokens": None, "action_total": None, "action_valid": None}) for line in lines]
        (folder / "steps.jsonl").write_text("\n".join(rows) + "\n")
    report = write_comparison(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "not counted" in page
    assert "Does it solve the task?" not in page
    assert page.count("<svg") == 4
    assert "not measured" in printed(report)


def test_the_terminal_shows_ratio_bound_and_success(comparison):
    text = printed(compare_runs(read_variants(comparison), bounds={"embodix": BOUND}))
    assert "2.10× (real size 1.77×)" in text
    assert "29/30 = 97 %" in text
    assert "same function: yes" in text


def test_many_variants_become_rows(tmp_path):
    runs = [read_run(write_run(tmp_path / name, name, num_steps=8)) for name in ("upstream", "a", "b", "c", "d")]
    report = compare_runs(runs)
    write_report(report, tmp_path)
    assert "Verdict, each variant against upstream" in (tmp_path / "report.html").read_text()
    assert re.search(r"│ c +│ +\d\.\d\d×", printed(report))


def test_a_sweep_ends_in_one_table_named_by_what_was_swept(tmp_path):
    for job, plugin in enumerate(("none", "embodix", "embodix")):
        variant = "upstream" if plugin == "none" else "embodix"
        write_run(tmp_path / str(job) / "run", variant, num_steps=4)
        (tmp_path / str(job) / ".hydra").mkdir()
        overrides = f"- train.steps=4\n- +plugin={plugin}\n" + ("- attention=flex\n" if job == 2 else "")
        (tmp_path / str(job) / ".hydra" / "overrides.yaml").write_text(overrides)
    stream = io.StringIO()
    report = print_sweep(tmp_path, Console(file=stream, width=160))
    names = ["+plugin=none", "+plugin=embodix", "+plugin=embodix attention=flex"]
    assert [variant.name for variant in report.variants] == names
    assert report.baseline == "+plugin=none"
    assert all(name in stream.getvalue() for name in names)
    assert (tmp_path / "report.html").is_file()


def test_sweep_jobs_are_ordered_by_number_and_never_share_a_name(tmp_path):
    for job in (10, 9):
        write_run(tmp_path / str(job) / "run", "embodix", num_steps=4)
    assert [run.name for run in read_sweep(tmp_path)] == ["embodix (9)", "embodix (10)"]


def test_a_sweep_of_one_run_says_that_there_is_nothing_to_compare(tmp_path):
    write_run(tmp_path / "0" / "run", "embodix", num_steps=4)
    stream = io.StringIO()
    assert print_sweep(tmp_path, Console(file=stream, width=300)) is None
    assert "holds 1 finished" in stream.getvalue()


@pytest.mark.parametrize("episodes", [[], [{"seed": 1}], [{"seed": 1, "success": True}] * 2])
def test_a_damaged_evaluation_is_refused(tmp_path, episodes):
    folder = write_run(tmp_path / "run", "embodix", num_steps=2)
    named = [{"task": "a", **episode} for episode in episodes]
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"episodes": named, "controls": {}}))
    with pytest.raises(ValueError, match="at least one episode for the policy and each control"):
        read_run(folder, results=results)
