# SPDX-License-Identifier: Apache-2.0
"""`lerobot bench rl`: what its variants are, how they are run, and what the report says of recorded runs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from embodix.cli.main import dispatch
from embodix.config.compose import compose
from embodix_rl import bench_verb as bench_command
from embodix_rl.bench import processes
from embodix_rl.bench.prediction import predicted_frames_per_s
from embodix_rl.bench.variants import compose_variants
from embodix_rl.report.rl_bench import VariantEntry, read_bench
from embodix_rl.report.rl_bench_page import bench_record, render_bench
from embodix_rl.report.spans import NOBODY, Span, pieces, shares
from embodix_rl.rlinf import hosts
from embodix_rl.testing import recorded_rl_runs as recorded_runs

EXPERIMENTS = ("rl_runners", "rl_vla3_table1", "rl_vla3_ablation")
FAKE = (sys.executable, "-m", "embodix_rl.testing.recorded_rl_runs")


def variants_of(experiment, folder, *overrides):
    cfg = compose("bench_rl", [f"experiment={experiment}", *overrides])
    return compose_variants(cfg.bench, experiment, overrides, folder)


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """All variants of each experiment."""
    return {name: variants_of(name, tmp_path_factory.mktemp(name)) for name in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_variant_of_the_experiments_is_legal_and_named_rightly(composed, experiment):
    variants = composed[experiment]
    assert variants[0].name == "sync" and variants[0].baseline is None
    work = {(one.plan.sizes.chunks_per_step, one.plan.sizes.num_envs, one.plan.sizes.chunk) for one in variants}
    assert len(work) == 1  # the same rollouts for everybody
    cfg = compose("bench_rl", [f"experiment={experiment}"])
    assert set(cfg.bench.paper) <= {one.name for one in variants}
    assert set(cfg.bench.against) <= {one.name for one in variants}


def test_the_tables_have_the_papers_proportions(composed):
    sync = composed["rl_vla3_table1"][0]
    env, policy, sizes = sync.config["env"], sync.config["policy"], sync.plan.sizes
    env_s = env["step_s_per_env"] * sizes.num_envs / sizes.env_workers
    slope = (policy["inference_s"][8] - policy["inference_s"][1]) / 7
    infer_s = policy["inference_s"][8] + slope * (sizes.num_envs - 8)
    training_slope = (policy["training_s"][8] - policy["training_s"][1]) / 7
    train_s = (policy["training_s"][8] + training_slope * 8) * sizes.chunks_per_step / sizes.micro_batch
    rollout_s = (env_s + infer_s) * sizes.steps_per_epoch / sizes.chunk * sizes.rollout_epochs
    assert env_s / (env_s + infer_s) == pytest.approx(0.54, abs=0.002)
    assert train_s / rollout_s == pytest.approx(0.41, abs=0.002)


def test_the_model_predicts_what_the_tables_are_to_show(composed):
    wanted = {"sync", "rl_vla3", "rlinf_async"}
    variants = [one for one in composed["rl_vla3_table1"] if one.name in wanted]
    predicted = {one.name: predicted_frames_per_s(one) for one in variants}
    assert predicted["rl_vla3"] > 2.27 * predicted["sync"]
    assert predicted["rl_vla3"] > 1.5 * predicted["rlinf_async"]
    pipeline = next(one for one in composed["rl_runners"] if one.name == "pipeline")
    assert predicted_frames_per_s(pipeline) is None  # no model of it


def test_stragglers_are_compared_with_their_own_baseline(tmp_path, composed):
    baselines = {one.name: one.baseline for one in composed["rl_vla3_table1"]}
    assert baselines["sync_stragglers"] is None
    assert (baselines["rl_vla3"], baselines["rl_vla3_stragglers"]) == ("sync", "sync_stragglers")
    few = variants_of("rl_vla3_table1", tmp_path, "bench.only=[rl_vla3_stragglers,rl_vla3]")
    assert {one.name: one.baseline for one in few} == {"rl_vla3": None, "rl_vla3_stragglers": None}


def test_overrides_of_the_command_line_come_after_a_variants_own(tmp_path):
    overrides = ["rl.steps=4", "bench.only=[sync,rlinf_async]", "hydra.run.dir=elsewhere"]
    variants = variants_of("rl_runners", tmp_path, *overrides)
    assert [one.config["rl"]["steps"] for one in variants] == [4, 4]
    assert variants[1].overrides == ["experiment=rl_runners", "runner=rlinf_async", "rl.steps=12", "rl.steps=4"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.num_envs=9", "bench.only=[sync,pipeline]"],
            r"Nothing was started(.|\n)*sync: .*nearest: 8 or 10(.|\n)*\npipeline: ",
        ),
        (
            ["rl.steps=2", "bench.only=[sync]"],
            r"sync: a rate needs steps after warm-up; got rl.steps=2 and rl.warmup_steps=2",
        ),
        (["bench.only=[sync,fast]"], r"No variant is called fast; there are sync, pipeline"),
        (["bench.only=[]"], r"A bench needs variants"),
        (["+bench.variants={a b: []}"], r"also a folder's.*got a b"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        variants_of("rl_runners", tmp_path, *overrides)


def run_all(folder, *overrides):
    lines = []
    variants = variants_of("rl_runners", folder, *overrides)
    return list(processes.run_variants(variants, 60, lines.append, FAKE)), lines


def test_variants_run_in_processes_one_fails_and_an_interrupted_bench_goes_on(tmp_path):
    overrides = ["bench.only=[sync,rl_vla3,broken]", "+bench.variants.broken=['rl.seed=13']"]
    outcomes, lines = run_all(tmp_path, *overrides)
    assert [(variant.name, outcome.failure) for variant, outcome in outcomes] == [
        ("sync", None),
        ("rl_vla3", None),
        ("broken", "ended with exit code 3"),
    ]
    assert outcomes[2][1].last_lines == ["began", "the simulator is on fire"]
    assert "[3/3] broken: ended with exit code 3" in lines
    (tmp_path / "variants" / "rl_vla3" / processes.FINISHED_FILE).unlink()  # cut off before its end
    again, lines = run_all(tmp_path, *overrides)
    assert [outcome.reused for _, outcome in again] == [True, False, False]
    assert any(line.startswith("[1/3] sync: finished before with the same config") for line in lines)
    metrics = tmp_path / "variants" / "rl_vla3" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == recorded_runs.NUM_STEPS  # begun anew
    changed = variants_of("rl_runners", tmp_path, "optim.lr=0.5", "bench.only=[sync]")[0]
    assert processes.finished_before(changed) is None


def test_a_variant_that_takes_too_long_is_ended(tmp_path, composed):
    variant = replace(composed["rl_runners"][0], folder=tmp_path / "run")
    sleeping = (sys.executable, "-c", "import time; time.sleep(60)")
    ((_, outcome),) = processes.run_variants([variant], 0.5, lambda line: None, sleeping)
    assert outcome.failure == "took longer than bench.timeout_s=0.5 s and was ended" and outcome.seconds < 30


def test_a_run_without_records_is_a_failure(tmp_path, composed):
    variant = replace(composed["rl_runners"][0], folder=tmp_path / "run")
    ((_, outcome),) = processes.run_variants([variant], 60, lambda line: None, (sys.executable, "-c", ""))
    assert outcome.failure is not None and "manifest" in outcome.failure


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A synchronous run, one with training beside generation, one that uses everything twice, and a failure."""
    folder = tmp_path_factory.mktemp("bench")
    config = OmegaConf.to_container(compose("rl", ["rl.warmup_steps=2"]), resolve=True)
    recorded_runs.record_run(folder / "sync", config, overlapped=False)
    recorded_runs.record_run(folder / "beside", config, overlapped=True)
    recorded_runs.record_run(folder / "twice", config, overlapped=False, reuse=2, wasted_rounds=2)
    entries = [
        VariantEntry("sync", folder / "sync", ["runner=sync"], predicted_frames_per_s=10.0),
        VariantEntry("beside", folder / "beside", [], "sync", 25.0, paper_ratio=1.5),
        VariantEntry("twice", folder / "twice", [], "sync", reused=True),
        VariantEntry("lost", folder / "lost", [], "sync", failure="ended with exit code 3", last_lines=["<on fire>"]),
    ]
    return read_bench("Schedules", entries, paper_source="somewhere")


def test_rates_parts_and_bound_are_those_of_the_schedule(report):
    sync, beside, twice = report.results
    rollout_s = recorded_runs.ROUNDS * (recorded_runs.STEP_S + recorded_runs.INFER_S)
    serial_s = rollout_s + recorded_runs.TRAIN_S + recorded_runs.WEIGHTS_S
    assert sync.rates.fresh_frames_per_s == pytest.approx(recorded_runs.FRAMES / serial_s)
    assert beside.ratio == pytest.approx(serial_s / rollout_s)
    assert sync.ratio is None and beside.predicted_ratio == 2.5
    assert sync.parts_s == pytest.approx({"environments": 2 / 80, "inference": 1 / 80, "training": 2 / 80})
    assert sync.bound_frames_per_s == pytest.approx(40.0) and beside.bound_share == pytest.approx(2 / 3)
    assert (twice.rates.reuse, twice.rates.staleness) == (2.0, {0: 0.5, 1: 0.5})
    assert twice.discarded_share == pytest.approx(0.5) and sync.discarded_share == beside.discarded_share == 0


def test_who_waits_for_whom_follows_from_what_was_under_way(report):
    components = report.results[0].components
    waits = {"waits for inference": 1.0, "waits for training": 2.0, "waits for weights": 0.25}
    of_a_step = {"step": 2.0, **waits}
    assert components["environments"] == pytest.approx({name: s / 5.25 for name, s in of_a_step.items()})
    assert components["training"]["waits for environments"] == pytest.approx(2 / 5.25)
    assert all(sum(own.values()) == pytest.approx(1) for own in components.values())


def test_recorded_waits_are_no_work_and_silence_is_nobodys():
    spans = [
        Span("EnvGroup:0", "step", 0.0, 2.0),
        Span("RolloutGroup:0", "wait", 0.0, 3.0),
        Span("RolloutGroup:0", "infer", 3.0, 4.0),
        Span("RolloutGroup:0", "weights", 3.5, 4.0),
    ]
    timed = shares(pieces(spans, 0.0, 4.0))
    assert timed["RolloutGroup:0"] == {"infer": 0.25, "waits for environments": 0.5, f"waits for {NOBODY}": 0.25}
    assert timed["EnvGroup:0"] == {"step": 0.5, f"waits for {NOBODY}": 0.25, "waits for inference": 0.25}


def test_the_page_stands_alone_and_says_what_was_declared_and_what_failed(report):
    page = render_bench(report)
    assert page.index("Rates are those of a schedule") < page.index("Throughput")
    assert "lost ended with exit code 3" in page and "&lt;on fire&gt;" in page
    assert "paper, its hardware" in page and "somewhere" in page
    assert page.count('class="timeline"') == 3
    assert "environment 1  stepping" in page and "inference 0  waits" in page
    assert not re.search(r'(src|href)="(?!#)', page) and "<script" not in page
    assert "success (" not in page  # the latency environment knows none
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_page_of_failures_alone(report):
    assert "No variant finished." in render_bench(replace(report, results=[]))


def test_the_record_is_strict_json(report):
    record = json.loads(json.dumps(bench_record(report), allow_nan=False))
    assert record["variants"]["beside"]["ratio"] == pytest.approx(1.75)
    assert record["variants"]["sync"]["progress"]["return (while training)"][-1] == {
        "fresh_frames": 400, "seconds": pytest.approx(26.25), "value": 4.0
    }  # fmt: skip
    assert record["failures"]["lost"]["last_lines"] == ["<on fire>"]


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
    """``lerobot bench rl`` with runs that take no time; its exit code and output."""
    monkeypatch.setattr(hosts, "missing", list)
    run_variants = processes.run_variants
    monkeypatch.setattr(processes, "run_variants", lambda *args: run_variants(*args, FAKE))

    def run(*overrides):
        monkeypatch.setattr(sys, "argv", ["lerobot"])
        code = dispatch("lerobot", ["bench", "rl", *overrides])
        return code, capsys.readouterr()

    return run


def test_the_command_reports_and_goes_on_where_it_was_left(tmp_path, run_command):
    folder = tmp_path / "bench"
    words = ["bench.only=[sync,broken]", "+bench.variants.broken=['rl.seed=13']", f"hydra.run.dir={folder}"]
    code, printed = run_command(*words)
    assert code == 1 and "broken ended with exit code 3" in " ".join(printed.out.split())
    assert json.loads((folder / "results.json").read_text())["failures"].keys() == {"broken"}
    assert (folder / "report.html").is_file()
    code, printed = run_command(f"bench.resume={folder}", f"hydra.run.dir={tmp_path / 'again'}")
    assert code == 1 and "sync: finished before" in printed.out
    code, printed = run_command(f"bench.resume={folder}", "rl.steps=9", f"hydra.run.dir={tmp_path / 'more'}")
    assert code == 1 and "leave out rl.steps=9" in printed.err
    code, printed = run_command(f"bench.resume={tmp_path}", f"hydra.run.dir={tmp_path / 'more'}")
    assert code == 1 and "is no folder of `lerobot bench rl`" in printed.err


def test_the_command_says_what_it_needs_and_which_benches_there_are(tmp_path, monkeypatch, run_command, capsys):
    monkeypatch.setattr(hosts, "missing", lambda: ["rlinf is not installed"])
    code, printed = run_command("bench.only=[sync]", f"hydra.run.dir={tmp_path}")
    assert code == 1 and "rlinf is not installed" in printed.err and "make rl" in printed.err
    assert bench_command.run([]) == 2 and "rl  " in capsys.readouterr().out
    assert bench_command.run(["--help"]) == 0
