# SPDX-License-Identifier: Apache-2.0
"""Comparisons are paired step by step, judged at the first step, and never hide what changed the algorithm."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from run_folders import write_run

from embodix.report.compare import SpeedBound, compare_runs, relative_difference
from embodix.report.comparison_page import verdict_line, verdicts, what_was_run
from embodix.report.comparison_table import comparison_rows
from embodix.report.runs import read_run, read_variants
from embodix.report.statistics import mcnemar_p_value, paired_difference_interval, quantile, wilson_interval
from embodix.report.steps import append_step, read_steps
from embodix.report.words import percent
from embodix_fp8.format_words import TRAINING_FORMAT

BOUND = SpeedBound(this_size=2.1, real_size=1.77, real_name="π0.5 (4.1 B parameters)", basis="Two cameras.")


def test_speed_ratios_are_paired_and_keep_their_spread(comparison):
    report = compare_runs(read_variants(comparison))
    (pair,) = report.pairs
    assert report.baseline == "upstream"
    assert pair.compute_ratio.low < 3.3 < pair.compute_ratio.high
    assert pair.compute_ratio.median == pytest.approx(3.3, rel=0.05)
    # 668 ms against 38 + 630 / 3.3: what forward and backward gain, the rest of the step dilutes
    assert pair.step_ratio.median == pytest.approx(668 / (38 + 630 / 3.3), rel=0.05)
    assert pair.step_ratio.count == 55  # of 60 steps, 5 are warm-up
    assert pair.clock == "process CPU time"


def make_slow(folder: Path, step: int) -> None:
    """Let the forward pass of one step take 1000 s."""
    path = folder / "steps.jsonl"
    records = read_steps(path)
    path.unlink()
    for record in records:
        slow = {**record.cpu_s, "forward": 1000.0}
        append_step(path, dataclasses.replace(record, cpu_s=slow) if record.step == step else record)


def test_warm_up_and_the_step_with_the_flop_counter_do_not_count(tmp_path):
    config = {"step_clock": {"count_flops_at": 9}}
    folders = [write_run(tmp_path / name, name, num_steps=20, config=config) for name in ("upstream", "embodix")]
    for step in (1, 2, 9):
        make_slow(folders[0], step)
    runs = [read_run(folder) for folder in folders]
    spread = compare_runs(runs).pairs[0].step_ratio
    assert spread.count == 17
    assert spread.high < 2
    assert compare_runs(runs, num_warmup=1).pairs[0].step_ratio.count == 18
    assert compare_runs(runs, num_warmup=1).pairs[0].step_ratio.high > 2
    with pytest.raises(ValueError, match="after the 20 of warm-up; 'upstream' trained 20"):
        compare_runs(runs, num_warmup=20)


def test_runs_of_different_batch_size_are_compared_by_the_sample(tmp_path):
    base, small = (write_run(tmp_path / name, name) for name in ("upstream", "small"))
    records = read_steps(small / "steps.jsonl")
    (small / "steps.jsonl").unlink()
    for record in records:
        append_step(small / "steps.jsonl", dataclasses.replace(record, num_samples=2))
    pair = compare_runs([read_run(base), read_run(small)]).pairs[0]
    assert pair.step_ratio.median == pytest.approx(0.5, rel=0.05)
    assert pair.samples_ratio == pytest.approx(0.5, rel=0.05)


def test_a_gpu_run_is_timed_by_the_wall_clock(tmp_path):
    config = {"policy": {"type": "pi05", "device": "cuda"}}
    runs = [read_run(write_run(tmp_path / name, name, config=config)) for name in ("upstream", "embodix")]
    assert compare_runs(runs).pairs[0].clock == "wall-clock time"


def test_the_same_function_may_drift_but_not_differ_at_the_first_step(tmp_path):
    base = read_run(write_run(tmp_path / "upstream", "upstream"))
    drifting = read_run(write_run(tmp_path / "a", "drifting", loss_shift=1e-5))
    wrong = read_run(write_run(tmp_path / "b", "wrong", first_loss_shift=1e-4))
    report = compare_runs([base, drifting, wrong])
    drifted, differing = report.pairs
    assert drifted.same_function
    assert drifted.largest_loss_difference == pytest.approx(59e-5, rel=1e-6)
    assert drifted.largest_at_step == 60
    assert not differing.same_function
    assert any("wrong does not compute the baseline's loss" in warning for warning in report.warnings)


REFERENCE_CHECK = {
    "reference": "upstream run one sample at a time",
    "cause": "it attends to the padding of shorter prompts",
    "fast_difference": 0.0,
    "host_batch_difference": 4e-3,
}


def test_where_upstreams_batch_is_wrong_the_reference_decides(tmp_path):
    base = read_run(write_run(tmp_path / "upstream", "upstream"))
    right = read_run(write_run(tmp_path / "a", "right", first_loss_shift=4e-3, reference_check=REFERENCE_CHECK))
    wrong_check = {**REFERENCE_CHECK, "fast_difference": 1e-3}
    wrong = read_run(write_run(tmp_path / "b", "wrong", first_loss_shift=4e-3, reference_check=wrong_check))
    report = compare_runs([base, right, wrong])
    assert [pair.same_function for pair in report.pairs] == [True, False]
    sentence = verdicts(report, report.pairs[0])[0].sentence
    assert "Against upstream run one sample at a time the loss differs by 0 (bit-equal)" in sentence
    assert "Upstream's own batch differs from it by 4.0e-03: it attends to the padding" in sentence


def test_a_choice_that_changes_the_algorithm_is_named(tmp_path):
    configs = [{"action_pad": {"name": name}, "policy": {"dtype": "float32"}} for name in ("host", "mask")]
    base = read_run(write_run(tmp_path / "upstream", "upstream", config=configs[0]))
    masked = read_run(write_run(tmp_path / "masked", "masked", config=configs[1], first_loss_shift=0.1))
    report = compare_runs([base, masked])
    assert report.pairs[0].algorithm_changes == ["action_pad.name is mask instead of host"]
    assert "action_pad.name is mask instead of host" in report.warnings[0]
    assert report.config_differences == {"action_pad.name": {"upstream": "host", "masked": "mask"}}


@pytest.mark.parametrize(
    "computing", [{"config": {"policy": {"dtype": "bfloat16"}}}, {"settings": {"own_autocast": "bfloat16"}}]
)
def test_a_bf16_run_is_judged_by_the_rounding_of_bf16(tmp_path, computing):
    base = read_run(write_run(tmp_path / "a", "upstream", **computing))
    near = read_run(write_run(tmp_path / "b", "near", first_loss_shift=1e-3, **computing))
    far = read_run(write_run(tmp_path / "c", "far", first_loss_shift=0.1, **computing))
    assert [pair.same_function for pair in compare_runs([base, near, far]).pairs] == [True, False]


def test_fp8_is_never_the_same_function_as_without(tmp_path):
    """Not even where the losses agree by chance."""
    fp8 = {"format": TRAINING_FORMAT, "kernel": "torchao rowwise, emulated", "converted": [{"path": "layers.0"}],
           "num_language_layers": 2}  # fmt: skip
    base = read_run(write_run(tmp_path / "upstream", "upstream"))
    run = read_run(
        write_run(tmp_path / "embodix", "embodix", settings={"precision": fp8}, fallbacks=["it is emulated"])
    )
    report = compare_runs([base, run])
    (pair,) = report.pairs
    assert pair.first_loss_difference == 0
    assert not pair.same_function
    assert pair.algorithm_changes == [
        "matrix products are computed in FP8: torchao rowwise, emulated (1 of 2 layers) instead of the policy's own"
    ]
    assert verdicts(report, pair)[0].figure == "no"
    assert "embodix: it is emulated" in report.warnings
    assert (
        "matrix products in",
        ["the policy's own", "FP8: torchao rowwise, emulated (1 of 2 layers)"],
    ) in comparison_rows(report)
    both = dataclasses.replace(base, manifest=dataclasses.replace(base.manifest, settings=run.manifest.settings))
    assert compare_runs([both, run]).pairs[0].same_function


def test_tokens_images_pads_and_flops_are_means_a_sample(comparison):
    report = compare_runs(read_variants(comparison))
    base, fast = report.variants
    assert (base.tokens_computed, base.tokens_valid, base.images_computed) == (1018, 617, 3)
    assert base.utilisation == pytest.approx(617 / 1018)
    assert (fast.tokens_computed, fast.images_computed, fast.utilisation) == (617, 2, 1.0)
    assert base.action_pad_share == pytest.approx(180 / 800)
    assert report.pairs[0].flop_ratio == pytest.approx(2.07)


def test_an_unchanged_baseline_takes_its_counts_from_a_variant_on_the_same_samples(comparison):
    path = comparison / "variants" / "upstream" / "steps.jsonl"
    records = read_steps(path)
    path.unlink()
    for record in records:
        append_step(path, dataclasses.replace(record, tokens=None, action_valid=None, action_total=None))
    base = compare_runs(read_variants(comparison)).variants[0]
    assert (base.tokens_computed, base.tokens_valid, base.images_computed) == (1018, 617, 3)
    assert base.utilisation == pytest.approx(617 / 1018)
    assert base.action_pad_share == pytest.approx(180 / 800)
    append_step(path, dataclasses.replace(records[-1], step=61, tokens=None))
    assert compare_runs(read_variants(comparison)).variants[0].tokens_computed is None


def test_the_small_ratio_never_stands_for_the_large_model(comparison):
    report = compare_runs(read_variants(comparison), bounds={"embodix": BOUND})
    figures = {item.label: item for item in verdicts(report, report.pairs[0])}
    assert figures["Bound at real size"].figure == "1.77×"
    assert "must not stand for the large one" in figures["Bound at real size"].sentence
    assert "π0.5 (4.1 B parameters) can gain 1.77×" in figures["Bound at real size"].sentence
    assert "bound at real size: 1.77×" in verdict_line(report, report.pairs[0])


def test_success_is_paired_on_the_same_episodes_with_its_controls(comparison):
    report = compare_runs(read_variants(comparison))
    success = report.pairs[0].success
    assert (success.num_episodes, success.both, success.only_baseline, success.only_variant) == (30, 28, 0, 1)
    sentence = verdicts(report, report.pairs[0])[-1].sentence
    assert "29/30 = 97 % [83 % to 99 %]" in sentence
    assert "Blind control: 67 %. Blank-image control: 20 %." in sentence


def test_waiting_for_data_and_divergence_are_warned_of(tmp_path):
    base = read_run(write_run(tmp_path / "upstream", "upstream"))
    waiting = read_run(write_run(tmp_path / "b", "waiting", speed=3, data_wait_ms=90))
    diverged = read_run(write_run(tmp_path / "c", "diverged", loss_shift=math.nan))
    warnings = " ".join(compare_runs([base, waiting, diverged]).warnings)
    assert "waiting waits for data during 27 % of its wall-clock time" in warnings
    assert "upstream waits" not in warnings
    assert "diverged has diverged" in warnings


@pytest.mark.parametrize("shift", [math.nan, math.inf])
@pytest.mark.parametrize("from_the_first_step", [True, False])
def test_losses_that_are_not_finite_are_no_same_function(tmp_path, shift, from_the_first_step):
    """Neither where both runs break alike nor where only later steps do."""
    shifts = {"first_loss_shift": shift} if from_the_first_step else {"loss_shift": shift}
    base = read_run(write_run(tmp_path / "a", "upstream", **shifts if from_the_first_step else {}))
    report = compare_runs([base, read_run(write_run(tmp_path / "b", "embodix", **shifts))])
    assert not report.pairs[0].same_function
    line = verdict_line(report, report.pairs[0])
    assert "same function: no" in line and "bit-equal" not in line
    assert "is not finite there" in " ".join(report.warnings)
    (row,) = [cells for label, cells in comparison_rows(report) if label == "largest loss difference"]
    assert row[1] == "not finite"


def test_a_mixture_is_named_by_its_members(tmp_path):
    config = {"policy": {"type": "pi05"}, "dataset": {"members": {"arm": {}, "hands": {}}}}
    runs = [read_run(write_run(tmp_path / name, name, config=config)) for name in ("upstream", "embodix")]
    assert "trained on a mixture of arm and hands, in" in what_was_run(compare_runs(runs))


@pytest.mark.parametrize(("num_workers", "warned"), [(0, False), (2, True)])
def test_work_moved_into_other_processes_is_warned_of(tmp_path, num_workers, warned):
    runs = []
    for variant, place in (("upstream", "main"), ("embodix", "workers")):
        config = {"train": {"num_workers": num_workers}, "preprocessing": {"name": place}}
        runs.append(read_run(write_run(tmp_path / variant, variant, config=config)))
    warnings = " ".join(compare_runs(runs).warnings)
    assert ("leaves the loader's workers out, and embodix preprocesses in them" in warnings) is warned


def test_the_share_of_waiting_is_shown(tmp_path):
    runs = [write_run(tmp_path / name, name, data_wait_ms=90) for name in ("upstream", "embodix")]
    report = compare_runs([read_run(run) for run in runs])
    (row,) = [cells for label, cells in comparison_rows(report) if label == "waiting for data, of wall clock"]
    assert row == [percent(variant.data_wait_share, 1) for variant in report.variants]
    assert report.variants[0].data_wait_share == pytest.approx(90 / (90 + 666), rel=0.05)


def test_what_was_run_reads_as_a_sentence(comparison):
    text = what_was_run(compare_runs(read_variants(comparison)))
    assert text.startswith("2 variants of the policy pi05 with 4.3 M parameters trained on the dataset embodix/")
    assert "in float32, 4 samples a step, seed 7" in text


def test_unusable_comparisons_are_refused(tmp_path):
    base = read_run(write_run(tmp_path / "upstream", "upstream", num_steps=3))
    with pytest.raises(ValueError, match="two or more runs with different names; got upstream, upstream"):
        compare_runs([base, base])
    with pytest.raises(ValueError, match="must be one of the runs upstream, b; got 'c'"):
        compare_runs([base, read_run(tmp_path / "upstream", "b")], baseline="c")
    with pytest.raises(FileNotFoundError, match="lerobot compare"):
        read_variants(tmp_path)


def test_statistics_match_known_values():
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(29, 30) == pytest.approx((0.8333, 0.9941), abs=1e-4)
    assert mcnemar_p_value(0, 0) == 1.0
    assert mcnemar_p_value(8, 1) == pytest.approx(0.0390625)
    assert quantile([1, 2, 3, 4], 0.5) == 2.5
    assert relative_difference(math.nan, 1.0) == math.inf
    assert relative_difference(math.nan, math.nan) == math.inf
    assert relative_difference(math.inf, math.inf) == math.inf
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_wilson_interval_refuses_nonsense():
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_the_interval_of_a_paired_difference_matches_published_values():
    """Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8."""
    assert paired_difference_interval(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)  # Bentur et al. 2009
    assert paired_difference_interval(6, 16, 161) == pytest.approx((-0.1240, -0.0054), abs=5e-5)  # Cavo et al. 2012


def test_the_interval_of_a_paired_difference_is_sound_at_the_edges():
    low, high = paired_difference_interval(0, 0, 10)
    assert -low == high == pytest.approx(1.96**2 / (10 + 1.96**2), abs=1e-4)
    assert paired_difference_interval(10, 0, 10) == pytest.approx((0.4449, 1.0), abs=1e-4)
    assert paired_difference_interval(3, 8, 30) == pytest.approx(
        tuple(-bound for bound in reversed(paired_difference_interval(8, 3, 30)))
    )
    for nonsense in ((0, 0, 0), (3, 8, 10), (-1, 0, 5)):
        with pytest.raises(ValueError, match="at least one pair"):
            paired_difference_interval(*nonsense)
