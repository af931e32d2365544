# SPDX-License-Identifier: Apache-2.0
"""Manifests say where a run came from; benchmark results are refused where that cannot be said."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import embodix
from embodix.report import manifest as manifest_module
from embodix.report.benchmark import write_benchmark
from embodix.report.manifest import collect_manifest, collect_provenance, load_manifest, write_text_atomically

RESULT = {
    "title": "Packed against padded",
    "claim": "At least 3.3x.",
    "setting": {"batch_size": 4, "dtype": "float32"},
    "scenarios": [{"scenario": "2 cameras", "ratio": 3.3456789}, {"scenario": "1 | 2", "ratio": 5.0, "note": "x"}],
}


def git(folder: Path, *arguments: str) -> str:
    command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A git checkout with a copy of the package marker in the place where embodix keeps it."""
    folder = tmp_path / "checkout"
    package = folder / "plugins" / "embodix"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(embodix, "__file__", str(package / "__init__.py"))
    return folder


def test_a_manifest_round_trips(tmp_path):
    written = collect_manifest("embodix", seed=7, config={"policy": {"type": "pi05"}}, patches=["a"], notes=["b"])
    written.replace(flops_per_step=1e9).save(tmp_path / "run" / "manifest.json")
    read = load_manifest(tmp_path / "run" / "manifest.json")
    assert read == written.replace(flops_per_step=1e9)
    assert read.provenance.versions["embodix"] == embodix.__version__
    assert read.provenance.num_cores >= 1
    assert read.provenance.cpu


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_text_atomically(path, "whole")

    def half(self, text):
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        write_text_atomically(path, "another")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("results.json", "whole")]


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"variant": "x"}')
    with pytest.raises(ValueError, match="not a run manifest"):
        load_manifest(tmp_path / "manifest.json")
    with pytest.raises(FileNotFoundError, match="lerobot train"):
        load_manifest(tmp_path / "absent.json")


def test_a_clean_checkout_is_named_by_its_commit(checkout):
    provenance = collect_provenance()
    assert provenance.commit == git(checkout, "rev-parse", "HEAD")
    assert provenance.dirty is False


@pytest.mark.parametrize("changed", ["pyproject.toml", "plugins/embodix/added.py"])
def test_changed_and_new_files_make_the_tree_dirty(checkout, changed, tmp_path):
    (checkout / changed).write_text("changed")
    assert collect_provenance().dirty is True
    with pytest.raises(ValueError, match="uncommitted changes on top of"):
        write_benchmark(tmp_path / "result", RESULT)
    assert not (tmp_path / "result.json").exists()


def test_earlier_results_do_not_make_the_tree_dirty(checkout):
    results = checkout / manifest_module.RESULTS_FOLDER
    write_benchmark(results / "first", RESULT)
    write_benchmark(results / "second", RESULT)
    assert json.loads((results / "second.json").read_text())["provenance"]["dirty"] is False


def test_a_commit_of_an_enclosing_repository_is_not_taken(checkout, monkeypatch):
    inner = checkout / "venv" / "lib" / "python3.12" / "site-packages" / "embodix"
    inner.mkdir(parents=True)
    monkeypatch.setattr(embodix, "__file__", str(inner / "__init__.py"))
    provenance = collect_provenance()
    assert provenance.commit == f"version {embodix.__version__}"
    assert provenance.dirty is None
    with pytest.raises(ValueError, match="no commit"):
        write_benchmark(checkout / "result", RESULT)


def test_without_git_the_version_stands_in(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None
    assert collect_provenance().commit == f"version {embodix.__version__}"


def test_benchmarks_are_written_as_json_and_markdown(checkout, tmp_path):
    json_path, markdown_path = write_benchmark(tmp_path / "name.with.dots", RESULT)
    assert json_path.name == "name.with.dots.json"
    assert json.loads(json_path.read_text())["scenarios"] == RESULT["scenarios"]
    text = markdown_path.read_text()
    assert text.startswith("# Packed against padded\n")
    assert "| scenario | ratio | note |\n| --- | --- | --- |\n| 2 cameras | 3.346 |  |\n| 1 \\| 2 | 5 | x |" in text
    assert git(checkout, "rev-parse", "HEAD") in text
    assert "Not quotable" not in text


def test_a_dirty_result_that_was_asked_for_says_so(checkout, tmp_path):
    (checkout / "pyproject.toml").write_text("changed")
    json_path, markdown_path = write_benchmark(tmp_path / "result", RESULT, allow_dirty=True)
    assert "not_quotable" in json.loads(json_path.read_text())
    assert "**Not quotable:** uncommitted changes" in markdown_path.read_text()


def test_versions_are_those_of_what_is_installed_for_a_feature_and_of_no_tool():
    versions = collect_provenance().versions
    assert {"embodix", "lerobot", "torch", "numpy", "hydra-core"} <= versions.keys()
    for optional in ("mujoco", "metaworld"):  # named by an extra, and by the host's extra that it asks for
        if importlib.util.find_spec(optional):
            assert optional in versions
    assert not versions.keys() & {"pytest", "ruff", "mypy"}


def test_manifests_need_no_torch_and_records_no_statistics():
    code = (
        "import sys; from embodix.report.manifest import collect_manifest; collect_manifest('x');"
        "from embodix.report import benchmark, comparison_page, evaluation, steps;"
        "sys.exit('torch' in sys.modules or 'scipy.stats' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
