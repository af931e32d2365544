# SPDX-License-Identifier: Apache-2.0
"""A run starts only if every worker process is embodix's."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from embodix import __version__
from embodix_rl.rlinf import extension
from embodix_rl.rlinf.extension import COMMON_PATCHES, ROLE_PATCHES, WorkerReport, require_reports
from embodix_rl.rlinf.hosts import WorkersDifferError


def _report(role, rank=0, **changes):
    found = WorkerReport(
        group=f"{role}Group",
        rank=rank,
        version=__version__,
        patches=[*COMMON_PATCHES, *ROLE_PATCHES[role]],
        models=["embodix_latency"],
        extension=extension.MODULE,
        host="node",
        pid=1,
        num_threads=1,
        device="cpu",
    )
    return {**asdict(found), **changes}


def test_workers_of_the_same_embodix_are_accepted():
    reports = require_reports({"env": [_report("env"), _report("env", 1)], "actor": [_report("actor")]})
    assert [(report.group, report.rank) for report in reports] == [("envGroup", 0), ("envGroup", 1), ("actorGroup", 0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.0.1"}, rf"envGroup:1 on node has embodix 0.0.1, the run {__version__}"),
        ({"models": []}, r"did not register embodix's models"),
        ({"extension": "mine"}, r"was told to load 'mine'"),
        ({"patches": ["rlinf_cpu_platform"]}, r"lacks the patches rlinf_environment_registry"),
    ],
)
def test_a_worker_that_differs_stops_the_run(changes, message):
    reports = {"env": [_report("env"), _report("env", 1, **changes)], "actor": [_report("actor")]}
    with pytest.raises(WorkersDifferError, match=rf"1 fault\(s\).*{message}.*Install the same embodix"):
        require_reports(reports)


def test_every_fault_is_named():
    faulty = _report("actor", version="9", models=[])
    with pytest.raises(WorkersDifferError, match=r"3 fault\(s\)"):
        require_reports({"actor": [faulty, _report("actor", 1, models=[])]})
