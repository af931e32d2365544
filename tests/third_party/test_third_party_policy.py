# SPDX-License-Identifier: Apache-2.0
"""A distribution of somebody else's adds a policy, and every verb takes it, without a line of embodix changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodix.report.steps import read_steps

pytestmark = pytest.mark.slow
DISTRIBUTION = Path(__file__).parent / "lerobot_policy_prompted"
NUM_STEPS = 3
SIMULATOR = ["env=metaworld", "env.task=[reach-v3]", "env.image_size=28", "env.episode_length=6"]


class Verbs:
    """Commands of an environment in which the policy and embodix's wheel are installed."""

    def __init__(self, environment: Any, folder: Path) -> None:
        self._environment, self.folder = environment, folder

    def __call__(self, verb: str, *words: str) -> str:
        """Run a verb that must succeed and return what it printed."""
        result = self._environment.run("lerobot", verb, *words, timeout=600)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout + result.stderr

    def run_options(self, name: str, *words: str) -> list[str]:
        """Overrides of a run of a few steps on the recording."""
        return [
            "policy=prompted",
            f"dataset.root={self.folder}/recording",
            "train.batch_size=3",
            "train.num_workers=0",
            f"train.steps={NUM_STEPS}",
            "train.eval_freq=0",
            f"hydra.run.dir={self.folder}/{name}",
            *words,
        ]


@pytest.fixture(scope="module")
def lerobot(new_environment: Callable, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Verbs:
    """embodix from its wheel, the policy, and a recording made there, whose tokenizer is the policy's too."""
    environment = new_environment("third_party_policy")
    environment.install(wheel, DISTRIBUTION)
    verbs = Verbs(environment, tmp_path_factory.mktemp("prompted"))
    cameras = "cameras=[front,gripper]"
    sizes = ["image_size=28", "episodes_per_task=2", "drift_fraction=0", "num_workers=1", "progress=false", cameras]
    verbs("data", "metaworld", f"root={verbs.folder}/recording", "tasks=[reach-v3]", "~episodes", *sizes)
    return verbs


@pytest.fixture(scope="module")
def run_folder(lerobot: Verbs) -> Path:
    """A packed run with a checkpoint, in the simulator it is to be evaluated in."""
    lerobot("train", *lerobot.run_options("packed", "+plugin=embodix", *SIMULATOR))
    return lerobot.folder / "packed" / "run"


def test_training_packed_is_training_as_published(lerobot: Verbs, run_folder: Path) -> None:
    lerobot("train", *lerobot.run_options("published", "train.save_checkpoint=false", *SIMULATOR))
    published, packed = (
        read_steps(folder / "steps.jsonl") for folder in (lerobot.folder / "published" / "run", run_folder)
    )
    assert len(published) == len(packed) == NUM_STEPS
    assert [step.loss for step in packed] == pytest.approx([step.loss for step in published], rel=1e-5)
    assert all(step.tokens.computed == step.tokens.valid < step.tokens.upstream for step in packed)


def test_compare_trains_evaluates_and_bounds(lerobot: Verbs) -> None:
    options = ["compare.measure_memory=false", "compare.videos=0", "eval.n_episodes=1", "eval.batch_size=1", *SIMULATOR]
    lerobot("compare", *lerobot.run_options("compare", *options))
    report = json.loads((lerobot.folder / "compare" / "report.json").read_text())
    assert [variant["name"] for variant in report["variants"]] == ["upstream", "embodix"]
    assert all(variant["evaluation"]["success"]["num_episodes"] == 1 for variant in report["variants"])


def test_eval_acts_with_its_checkpoint(lerobot: Verbs, run_folder: Path) -> None:
    folder = lerobot.folder / "eval"
    options = ["eval.n_episodes=2", "eval.num_workers=0", "eval.videos=0", f"hydra.run.dir={folder}"]
    lerobot("eval", f"checkpoint={run_folder}", *options)
    record = json.loads((folder / "results.json").read_text())
    assert record["policy"]["type"] == "prompted"
    assert record["policy"]["features"]["packing"] == "padding_free"
    assert len(record["episodes"]) == 2


def test_plan_counts_it(lerobot: Verbs) -> None:
    lerobot("plan", *lerobot.run_options("plan"))
    plan = json.loads((lerobot.folder / "plan" / "plan.json").read_text())
    by_name = {variant["name"]: variant for variant in plan["variants"]}
    assert by_name["upstream"]["forward_flops"] > by_name["embodix"]["forward_flops"] > 0
    assert by_name["embodix"]["bound"] > 1


def test_quantize_writes_it_through_the_gate(lerobot: Verbs, run_folder: Path) -> None:
    output, folder = lerobot.folder / "small", lerobot.folder / "quantize"
    loose = ["gate.num_samples=6", "gate.dataset_root=" + str(lerobot.folder / "recording")]
    lerobot("quantize", str(run_folder), str(output), "--gate", *loose, f"hydra.run.dir={folder}")
    record = json.loads((output / "quantize.json").read_text())
    assert len(record["quantization"]["converted"]) == 12
    assert record["gate"]["passed"]
    lerobot(
        "eval",
        f"checkpoint={output}",
        "eval.n_episodes=1",
        "eval.num_workers=0",
        "eval.videos=0",
        (f"hydra.run.dir={lerobot.folder}/eval_small"),
    )


def test_a_mixture_trains_packed_as_padded(lerobot: Verbs) -> None:
    root = lerobot.folder / "recording"
    members = (
        f"dataset.members={{two: {{repo_id: embodix/metaworld, root: {root}, weight: 0.5, cameras: "
        f"{{front: base, gripper: wrist}}}}, one: {{repo_id: embodix/metaworld, root: {root}, weight: 0.5, cameras: "
        "{front: base, gripper: null}}}"
    )
    losses = {}
    for plugin in ("none", "embodix"):
        options = lerobot.run_options(f"mixture_{plugin}", "dataset=mixture", members, f"+plugin={plugin}")
        own = [option for option in options if not option.startswith("dataset.root")]
        lerobot("train", *own, f"tokenizer.directory={root}/tokenizer", "train.save_checkpoint=false")
        steps = read_steps(lerobot.folder / f"mixture_{plugin}" / "run" / "steps.jsonl")
        losses[plugin] = [step.loss for step in steps]
        assert any(step.tokens.images_computed < step.tokens.images_upstream for step in steps)
    assert losses["embodix"] == pytest.approx(losses["none"], rel=1e-5)
