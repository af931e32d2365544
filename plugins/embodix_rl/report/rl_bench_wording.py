# SPDX-License-Identifier: Apache-2.0
"""Say a bench of `lerobot rl` in words."""

from __future__ import annotations

import math
from typing import Any

from embodix.report import wording
from embodix_rl.report.rl_bench import BenchReport, VariantResult
from embodix_rl.report.worker_time import COMPONENTS

DECLARED = (
    "The times of environment steps, inference and training were declared. Rates are those of a schedule, not of a "
    "simulator, a policy or a machine."
)
FEW_STEPS = 3
GLOSSARY = {
    "frame": "An action step of one environment. A frame is fresh the first time that it is trained on; optimizer "
    "steps on frames that were used before are not counted as throughput.",
    "reuse": "Frames trained on for each fresh one. 1 where every frame is trained on once.",
    "discarded": "Of the frames of trajectories that were finished in time, those that no step trained on.",
    "staleness": "Policy versions between the policy that acted and the one that is trained.",
    "bound": "What the slowest component would allow if all others overlapped with it completely: a component's "
    "seconds a frame, the least that any variant with the same baseline needed; the largest of the three.",
    "waits for": "What an idle worker needs next and was under way: environments need actions, then training, which "
    "may hold generation back, then each other; inference needs environments; training needs both. Messages and "
    "scheduling: nothing of these was under way.",
    "scheduling model": "The schedule on a virtual clock with the declared times, without processes: a prediction made "
    "before the run.",
}


def what_was_run(report: BenchReport) -> str:
    """One paragraph for a reader who was not there."""
    if not report.results:
        return "No variant finished."
    config = report.results[0].manifest.config
    sizes = report.results[0].manifest.settings["sizes"]
    frames = sizes["num_envs"] * sizes["rollout_epochs"] * sizes["steps_per_epoch"]
    return (
        f"{wording.count(len(report.results), 'schedule')} of the same work ran one after another, each in processes "
        f"of its own: policy {config['policy'].get('type')}, environment {config['env'].get('type')}, "
        f"{wording.count(sizes['num_envs'], 'environment')} in "
        f"{wording.count(sizes['env_workers'], 'worker')}, {frames} frames a rollout. The first "
        f"{wording.count(report.results[0].warmup_steps, 'training step')} of each run are left out of rates and times."
    )


def warnings(report: BenchReport) -> list[str]:
    """What a reader must know before the figures."""
    found = [DECLARED] if report.declared_latency else []
    found += [f"{entry.name} {entry.failure}; its last lines are below." for entry in report.failures]
    few = [result.name for result in report.results if result.rates.num_steps < FEW_STEPS]
    if few:
        found.append(
            f"Rates of {', '.join(few)} rest on fewer than {FEW_STEPS} training steps; raise rl.steps for figures to "
            "quote."
        )
    reused = [result.name for result in report.results if result.entry.reused]
    if reused:
        found.append(f"Finished by an earlier bench with the same config and not run again: {', '.join(reused)}.")
    commits = {result.manifest.provenance.commit for result in report.results}
    if len(commits) > 1:
        found.append("The variants ran different commits of embodix; see where the figures come from.")
    return found


def cards(report: BenchReport) -> list[dict[str, str]]:
    """The findings: the best variant against each baseline."""
    found = []
    for baseline in (result for result in report.results if result.entry.baseline is None):
        rivals = [result for result in report.results if result.entry.baseline == baseline.name]
        if rivals:
            found += _best_cards(baseline, max(rivals, key=lambda result: result.rates.fresh_frames_per_s))
    return found


def _best_cards(baseline: VariantResult, best: VariantResult) -> list[dict[str, str]]:
    own, other = best.rates.fresh_frames_per_s, baseline.rates.fresh_frames_per_s
    good = "good" if own > other else "bad"
    return [
        {
            "kind": good,
            "label": f"{best.name} against {baseline.name}",
            "figure": wording.ratio(best.ratio),
            "sentence": f"{own:.1f} fresh frames a second, {baseline.name} {other:.1f}; the fastest of its variants.",
        },
        {
            "kind": "good",
            "label": f"{best.name}, of the bound",
            "figure": wording.percent(best.bound_share),
            "sentence": f"The bound of the parts is {best.bound_frames_per_s:.1f} frames a second; "
            f"{baseline.name} reaches {wording.percent(baseline.bound_share)} of it.",
        },
    ]


def table_rows(report: BenchReport) -> list[dict[str, Any]]:
    """One row a variant, with cells as text."""
    return [
        {
            "name": result.name,
            "baseline": result.entry.baseline,
            "fresh": f"{result.rates.fresh_frames_per_s:.1f}",
            "ratio": wording.ratio(result.ratio) if result.ratio else "",
            "predicted": wording.ratio(result.predicted_ratio) if result.predicted_ratio else "",
            "paper": wording.ratio(result.entry.paper_ratio) if result.entry.paper_ratio else "",
            "bound": wording.percent(result.bound_share),
            "trained": f"{result.rates.trained_frames_per_s:.1f}",
            "reuse": f"{result.rates.reuse:.2f}",
            "discarded": wording.percent(result.discarded_share, 1),
            "mean_age": f"{mean_age(result):.2f}",
            "largest_age": str(max(result.rates.staleness, default=0)),
            "num_steps": str(result.rates.num_steps),
            "seconds": f"{result.rates.seconds:.0f}",
        }
        for result in report.results
    ]


def mean_age(result: VariantResult) -> float:
    """In policy versions."""
    return math.fsum(age * share for age, share in result.rates.staleness.items())


def waiting_rows(report: BenchReport) -> list[dict[str, Any]]:
    """One row a variant and component: seconds a frame, its own work, weights, and what it waited for."""
    rows = []
    for result in report.results:
        for place, component in enumerate(COMPONENTS.values()):
            own = result.components.get(component, {})
            waits = {label.removeprefix("waits for "): share for label, share in own.items() if "waits for" in label}
            rows.append(
                {
                    "variant": "" if place else result.name,
                    "component": component,
                    "milliseconds": f"{1000 * result.parts_s[component]:.2f}",
                    "work": wording.percent(1 - sum(waits.values()) - own.get("weights", 0.0)),
                    "weights": wording.percent(own.get("weights", 0.0), 1),
                    "waits": ", ".join(
                        f"{wording.percent(share)} {whom}"
                        for whom, share in sorted(waits.items(), key=lambda item: -item[1])
                        if share >= 0.005
                    ),
                }
            )
    return rows
