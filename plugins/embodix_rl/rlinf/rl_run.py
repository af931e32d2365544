# SPDX-License-Identifier: Apache-2.0
"""`lerobot rl`: one run in RLinf, from a composed config to its folder."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix.patching import patched
from embodix.report.manifest import collect_manifest
from embodix_rl.report.rl_steps import RlRates, RlStep, rates, read_rl_steps
from embodix_rl.rlinf import extension
from embodix_rl.rlinf.hosts import WorkerFailedError, require_hosts
from embodix_rl.rlinf.ray_cluster import RunCluster, run_cluster
from embodix_rl.rlinf.run_plan import RunPlan, plan_run
from embodix_rl.rlinf.task_config import is_latency
from embodix_rl.rlinf.training_records import StepRecorder

METRICS_FILE, MANIFEST_FILE, HOST_CONFIG_FILE = "metrics.jsonl", "manifest.json", "rlinf.yaml"
LATENCY_NOTE = (
    "Times of environment, inference and training were declared (env=latency): rates are those of a schedule, not of a "
    "simulator or a machine."
)


@dataclass(frozen=True)
class RlOutcome:
    """A finished run: its folder, steps and rates after warm-up (None where no step came after it)."""

    folder: Path
    steps: list[RlStep]
    rates: RlRates | None


def run_rl(cfg: DictConfig, overrides: Sequence[str], folder: Path) -> RlOutcome:
    """Train once.

    Args:
        cfg: of ``hydra_conf/rl.yaml``.
        overrides: of the command line, for the record.
        folder: of the run; it gets ``metrics.jsonl``, ``manifest.json``, ``rlinf.yaml``, ``timeline/`` and
            ``checkpoints/``.

    Raises:
        ValueError: a config that can't run, or RLinf or Ray missing.
        WorkerFailedError: a worker process failed.
        embodix_rl.rlinf.hosts.RayStartError: no cluster.
        embodix_rl.rlinf.hosts.WorkersDifferError: a worker does not run this embodix.
    """
    plan = plan_run(cfg, folder)
    require_hosts()
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(plan.host, folder / HOST_CONFIG_FILE)
    patches = (*extension.COMMON_PATCHES, *extension.ROLE_PATCHES["driver"])
    with (
        _ended_in_order(),
        run_cluster(plan.cluster, extension.MODULE, keep_logs=folder / "ray_logs") as cluster,
        patched(dict.fromkeys(patches)),
    ):
        _train(cfg, plan, cluster, folder)
    steps = read_rl_steps(folder / METRICS_FILE)
    counted = rates(steps, cfg.rl.warmup_steps) if len(steps) > cfg.rl.warmup_steps else None
    return RlOutcome(folder, steps, counted)


def _train(cfg: DictConfig, plan: RunPlan, cluster: RunCluster, folder: Path) -> None:
    extension.register_models()
    with _host(plan, cluster) as (host_cluster, host_cfg), _worker_failures():
        groups = _launch(plan, host_cluster, host_cfg)
        reports = extension.require_reports({role: group.embodix_report().wait() for role, group in groups.items()})
        _write_manifest(cfg, plan, reports, folder)
        runner = plan.runner.runner_class()(cfg=host_cfg, **groups)
        recorder = StepRecorder(
            folder / METRICS_FILE, lambda: merged_consumption(groups["actor"]), declared=is_latency(cfg)
        )
        runner.metric_logger.logger["embodix"] = recorder
        try:
            runner.init_workers()
            runner.run()
        finally:
            recorder.finish()


def merged_consumption(actor: Any) -> dict[str, Any]:
    """What all training processes trained on since the last call."""
    from embodix_rl.rlinf.training_records import merge

    return merge(actor.pop_consumption().wait())


def _end(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that nothing of it stays behind."""

    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _host(plan: RunPlan, cluster: RunCluster) -> Iterator[tuple[Any, DictConfig]]:
    """RLinf attached to the run's cluster, with its own checks of the config done; detached at the end."""
    import ray
    import torch.multiprocessing
    from rlinf.config import validate_cfg
    from rlinf.scheduler import Cluster

    torch.multiprocessing.set_start_method("spawn", force=True)  # as RLinf's own scripts do
    Cluster.NAMESPACE = cluster.namespace
    try:
        checked = validate_cfg(plan.host)  # it attaches to RAY_ADDRESS
        signal.signal(signal.SIGTERM, _end)  # Ray has put a handler of its own there, which aborts the process
        yield Cluster(cluster_cfg=checked.cluster, distributed_log_dir=None), checked
    finally:
        # Threads that wait for workers send the signal as soon as these are gone, some later than this function.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ray.shutdown()
        if Cluster.has_initialized():
            del Cluster._instance  # RLinf keeps one for the process
        Cluster.NAMESPACE = Cluster.SYS_NAME


@contextmanager
def _worker_failures() -> Iterator[None]:
    """Turn RLinf's signal for a failed worker, which would end this process, into an exception; the first one."""

    def fail(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise WorkerFailedError("A worker process failed; its error is printed above, and Ray's logs are in ray_logs.")

    signal.signal(signal.SIGUSR1, fail)  # after RLinf has set its own
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _launch(plan: RunPlan, host_cluster: Any, host_cfg: DictConfig) -> dict[str, Any]:
    from rlinf.utils.placement import HybridComponentPlacement

    placement = HybridComponentPlacement(host_cfg, host_cluster)
    classes = plan.runner.workers()
    groups = {
        role: getattr(classes, role)
        .create_group(host_cfg)
        .launch(host_cluster, name=host_cfg[role].group_name, placement_strategy=placement.get_strategy(role))
        for role in ("actor", "rollout", "env")
    }
    for role in ("actor", "rollout"):
        _tell_steps_in_order(groups[role])
    return groups


def _tell_steps_in_order(group: Any) -> None:
    """Have the group's ``set_global_step`` return when it is done.

    Ray may begin the calls of an actor that has coroutines in any order. RLinf's synchronous runner does not wait for
    this one (rlinf/runners/embodied_runner.py; its asynchronous runner does), so weights were sent now and then under
    the number of the step before.
    """
    tell = group.set_global_step

    def tell_and_wait(step: int) -> Any:
        told = tell(step)
        told.wait()
        return told

    group.set_global_step = tell_and_wait


def _write_manifest(cfg: DictConfig, plan: RunPlan, reports: Sequence[Any], folder: Path) -> None:
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    patches = sorted({name for report in reports for name in report.patches})
    settings: Mapping[str, Any] = {
        "runner": cfg.runner.name,
        "sizes": vars(plan.sizes),
        "component_placement": plan.placement.component_placement,
        "workers": [vars(report) for report in reports],
    }
    manifest = collect_manifest(
        cfg.runner.name,
        seed=cfg.rl.seed,
        config=config,
        settings=settings,
        patches=patches,
        notes=[LATENCY_NOTE] if is_latency(cfg) else [],
    )
    manifest.save(folder / MANIFEST_FILE)
    print(f"{len(reports)} workers run embodix {reports[0].version}.", file=sys.stderr)
