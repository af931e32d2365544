# SPDX-License-Identifier: Apache-2.0
"""`lerobot plan` composes the train config, prints tables or JSON, and needs torch only to count."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pandas
import pytest
from rich.console import Console


@pytest.fixture
def dataset(tmp_path):
    """Metadata of a data set with two cameras and three episodes of two tasks."""
    root = tmp_path / "dataset"
    (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    features = {f"observation.images.{name}": {"dtype": "image", "shape": [56, 56, 3]} for name in ("front", "gripper")}
    totals = {"total_episodes": 3, "total_frames": 200, "total_tasks": 2}
    path = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, "data_path": path, **totals}
    (root / "meta" / "info.json").write_text(json.dumps(info))
    tasks = ["Reach", "Open the door of the cabinet"]
    pandas.DataFrame({"task_index": [0, 1]}, index=tasks).to_parquet(root / "meta" / "tasks.parquet")
    table = {"episode_index": [0, 1, 2], "length": [60, 60, 80], "tasks": [[tasks[0]], [tasks[0]], [tasks[1]]]}
    table |= {"dataset_from_index": [0, 60, 120], "dataset_to_index": [60, 120, 200]}
    table |= {"data/chunk_index": [0, 0, 0], "data/file_index": [0, 0, 0]}
    pandas.DataFrame(table).to_parquet(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    return root


def plan(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the verb in a process of its own, which fails if it loaded torch to show its config."""
    code = (
        "import sys; from embodix.cli.main import dispatch; code = dispatch('lerobot', ['plan', *sys.argv[1:]]);"
        "assert 'torch' not in sys.modules or '--cfg' not in sys.argv, 'torch was imported'; sys.exit(code)"
    )
    environment = os.environ | {"COLUMNS": "140", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_the_tables_name_waste_bounds_memory_and_remedies(tmp_path, dataset):
    done = plan(tmp_path, "policy=pi05", "policy.empty_cameras=1", f"dataset.root={dataset}")
    assert done.returncode == 0, done.stderr
    for text in ("2 cameras, 1 blank", "4.14 G parameters", "waste", "Open the door of the cabinet", "embodix"):
        assert text in done.stdout
    assert "Active: packing=none, attention=upstream" in done.stdout
    assert "+plugin=embodix" in done.stdout
    assert "Fits: a GPU of" in done.stdout
    assert "36.8 % of the loss lies after the end of episodes" in done.stdout
    (path,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    assert json.loads(path.read_text())["num_frames"] == 200


def test_json_is_all_that_is_printed(tmp_path, dataset):
    done = plan(tmp_path, "policy=pi05_small", f"dataset.root={dataset}", "+plugin=embodix", "--json")
    record = json.loads(done.stdout)
    assert record["chosen"] == "embodix"
    assert record["features"]["packing"] == "padding_free"
    assert record["variants"][3]["bound"] > record["variants"][3]["real_bound"] > 1.5


def test_a_policy_that_nobody_registered_is_planned_as_upstream_runs_it(tmp_path, dataset):
    fields = ["policy=upstream", "policy.type=act", "+policy.pretrained_backbone_weights=null"]
    done = plan(
        tmp_path, *fields, "+policy.chunk_size=10", "+policy.n_action_steps=10", f"dataset.root={dataset}", "--json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    (upstream,) = record["variants"]
    assert (upstream["name"], upstream["bound"], upstream["tokens"]) == ("upstream", 1.0, None)
    assert upstream["forward_flops"] > 1e8 and upstream["memory"]["activations"] > 1e6


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_console_cuts_no_digits_and_a_cut_prompt_says_so(width):
    from embodix.cli.plan import print_plan
    from embodix.costs.plan import TrainingPlan, VariantPlan
    from embodix.costs.policy_costs import Computation, MemoryCount
    from embodix.costs.workload import TaskPrompt

    count = MemoryCount(parameters=8.06e9, gradients=8.06e9, optimizer=16.1e9, activations=31.7e9)
    variants = [
        VariantPlan(name, Computation(), 1258.0, 3.0, 0.281, 289e12, 486e12, 12.34, 12.34, 11.79, count, 80)
        for name in ("upstream", "vision_tokens=valid", "packing=padding_free")
    ]
    prompts = [TaskPrompt("Open the door", 1234567, 180, 200, 60, 0.5), TaskPrompt("Reach", 50, 20, 20)]
    facts = (
        "a policy",
        "the real one",
        "data",
        3,
        200,
        ["a"],
        ["b"],
        10**9,
        10**9,
        8,
        "float32",
        False,
        {"plugin": None},
    )
    plan = TrainingPlan(*facts, {"images": 1258.0}, 0.1, prompts, "Counted.", 0.1, variants, "upstream", [])
    printed = io.StringIO()
    print_plan(plan, Console(width=width, file=printed))
    lines = printed.getvalue().splitlines()
    for word in (
        "1258",
        "12.34×",
        "11.79×",
        "289 T",
        "486 T",
        "180-260, cut at 200",
        "1234567",
        "29.5 GiB",
        "gradients",
    ):
        assert any(word in line for line in lines), word
    assert width < 80 or max(map(len, lines)) <= max(width, 80)


def test_the_config_is_shown_without_torch(tmp_path):
    done = plan(tmp_path, "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "packing:" in done.stdout


def test_a_missing_data_set_is_an_error_that_says_what_to_do(tmp_path):
    done = plan(tmp_path, f"dataset.root={tmp_path / 'absent'}")
    assert done.returncode == 1
    assert "lerobot data <source>" in done.stderr
    assert "Traceback" not in done.stderr
