# SPDX-License-Identifier: Apache-2.0
"""A distribution of somebody else's adds a packer and an attention backend without a line of embodix changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

THIRD_PARTY = Path(__file__).parent
CHOICES = ["packing=bucketed", "attention=padded_sdpa", "policy=pi05_small"]

CHECK_PACKER = """
import torch
from embodix.plugins import resolve

packer = resolve("packers", "bucketed")(multiple=8)
valid_BS = torch.zeros(3, 10, dtype=torch.bool)
valid_BS[0, :7] = valid_BS[1, 2:5] = valid_BS[2, :1] = True
layout = packer.layout(valid_BS)
exact = resolve("packers", "padding_free")().layout(valid_BS)
assert layout.num_computed == 16 and exact.num_computed == 11
assert layout.lengths == exact.lengths
assert torch.equal(layout.rows_N[layout.valid_rows_V], exact.rows_N)
assert torch.equal(layout.positions_N[layout.valid_rows_V], exact.positions_N)
assert torch.equal(layout.rows_N, layout.rows_N.sort().values)
"""

CHECK_BACKEND = """
import torch
from embodix.attention.select import reference_attention
from embodix.attention.segments import Segments
from embodix.plugins import resolve

torch.manual_seed(0)
backend = resolve("attention_backends", "padded_sdpa")()
for lengths_q, lengths_k in [((5, 1, 9), (7, 4, 9)), ((3, 8), (3, 2))]:
    segments = Segments.from_lengths(lengths_q, lengths_k)
    q, k, v = torch.randn(sum(lengths_q), 4, 16), torch.randn(sum(lengths_k), 2, 16), torch.randn(sum(lengths_k), 2, 16)
    for causal in (False, True):
        wanted = reference_attention(q, k, v, segments, causal=causal)
        torch.testing.assert_close(backend(q, k, v, segments, causal=causal), wanted, rtol=1e-5, atol=1e-6)
        other = reference_attention(q, k, v, segments, causal=not causal)
        assert (wanted - other).abs().max() > 1e-3
"""


@pytest.fixture(scope="module")
def environment(new_environment: Callable, wheel: Path):
    """embodix from its wheel, and the example plugin."""
    environment = new_environment("third_party")
    environment.install(wheel, THIRD_PARTY / "embodix_example_plugin")
    return environment


def test_its_yaml_is_found_and_composed(environment):
    result = environment.run("lerobot", "train", *CHOICES, "packing.options.multiple=32", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "packing:\n  name: bucketed\n  options:\n    multiple: 32\n" in result.stdout
    assert "attention:\n  name: padded_sdpa\n" in result.stdout


def test_its_choices_stand_beside_the_plugin_choice(environment):
    result = environment.run("lerobot", "train", "+plugin=embodix", "packing=bucketed", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "name: bucketed" in result.stdout and "attention:\n  name: auto\n" in result.stdout


def test_a_misspelt_choice_lists_it_among_the_options(environment):
    result = environment.run("lerobot", "train", "packing=buketed")
    assert result.returncode == 1
    assert "did you mean bucketed" in result.stderr.lower(), result.stderr


def test_doctor_shows_it_and_finds_nothing_missing(environment):
    result = environment.run("embodix", "doctor", *CHOICES, "--json")
    diagnosis = json.loads(result.stdout)
    assert {"example", "builtin"} <= {plugin["name"] for plugin in diagnosis["plugins"]}
    mine = [found for found in diagnosis["implementations"] if found["plugin"] == "example"]
    assert {(found["kind"], found["name"]) for found in mine} == {
        ("packers", "bucketed"),
        ("packers", "length_sorted"),
        ("attention_backends", "padded_sdpa"),
    }
    assert all(found["problem"] is None for found in mine), mine
    assert (result.returncode, diagnosis["needs"]) == (0, [])


def test_its_packer_keeps_what_padding_free_keeps(environment):
    environment.run_python(CHECK_PACKER)


def test_its_backend_agrees_with_the_reference(environment):
    environment.run_python(CHECK_BACKEND)


def test_listing_it_imports_no_torch(environment):
    script = "from embodix.plugins import registry; print(registry().names('packers'))\nimport sys"
    printed = environment.run_python(script + "\nprint('torch' in sys.modules)").split("\n")
    assert printed[:2] == [
        "['bucketed', 'length_sorted', 'none', 'padding_free', 'sequence_length', 'token_budget']",
        "False",
    ]


def test_it_trains_through_upstream_with_the_losses_of_the_exact_run(environment, demonstrations, tmp_path):
    multiple, num_steps = 16, 2
    choices = ["packing=bucketed", f"packing.options.multiple={multiple}", "attention=padded_sdpa"]
    folders = [f"train.output_dir={tmp_path}/theirs", f"hydra.run.dir={tmp_path}/hydra"]
    overrides = small_run(demonstrations, *choices, *folders, f"train.steps={num_steps}")
    result = environment.run("lerobot", "train", *overrides)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    all_theirs = read_steps(tmp_path / "theirs" / "steps.jsonl")

    exact = ["+plugin=embodix", f"train.steps={num_steps}", f"train.output_dir={tmp_path}/ours"]
    all_ours = train_here(small_run(demonstrations, *exact)).records
    assert len(all_theirs) == len(all_ours) == num_steps
    for theirs, ours in zip(all_theirs, all_ours, strict=True):
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-4)
        assert theirs.tokens.valid == ours.tokens.valid == ours.tokens.computed
        # The packer decides on the prefix; the action steps are computed beside it.
        assert (theirs.tokens.computed - theirs.action_total) % multiple == 0
    assert any(record.tokens.computed > record.tokens.valid for record in all_theirs)
    manifest = (tmp_path / "theirs" / "manifest.json").read_text()
    assert "padded_sdpa" in manifest and "bucketed" in manifest


def test_its_composer_decides_which_samples_share_a_batch(environment, demonstrations, tmp_path):
    choices = ["packing=length_sorted", "packing.options.window=1000", "attention=padded_sdpa"]
    folders = [f"train.output_dir={tmp_path}/run", f"hydra.run.dir={tmp_path}/hydra"]
    result = environment.run("lerobot", "train", *small_run(demonstrations, *choices, *folders, "train.steps=3"))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    records = read_steps(tmp_path / "run" / "steps.jsonl")
    assert [record.num_samples for record in records] == [3, 3, 3]
    valid = [record.tokens.valid for record in records]
    assert valid == sorted(valid), "the window is larger than the data set, so its shortest samples come first"
    state = json.loads((tmp_path / "run/checkpoints/last/training_state/embodix_stream.json").read_text())
    assert state["stream"]["position"]["num_bins"] == 3
