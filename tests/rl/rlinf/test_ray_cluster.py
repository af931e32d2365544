# SPDX-License-Identifier: Apache-2.0
"""A run's own Ray, with stand-ins for Ray's head process: what is started, what is tried again, what is left behind."""

from __future__ import annotations

import json
import os
import sys
import time

import psutil
import pytest

from embodix_rl.rlinf import ray_cluster
from embodix_rl.rlinf.hosts import RayStartError
from embodix_rl.rlinf.ray_cluster import head_options, run_cluster
from embodix_rl.schema import ClusterSettings

QUICK = ClusterSettings(start_timeout_s=20.0, start_attempts=2)
ANSWERS = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"address": f"127.0.0.1:{child.pid}"}), flush=True)
sys.stdin.read()
"""
FAILS = "import sys; sys.exit('the raylet timed out')"
SILENT = "import time; time.sleep(600)"
FAILS_ONCE = (
    "import os, sys\n"
    "seen = os.path.join(os.path.dirname(os.environ['EBX_FOLDER']), 'seen')\n"
    "if not os.path.exists(seen):\n    open(seen, 'w'); sys.exit('busy')\n" + ANSWERS
)


@pytest.fixture
def stand_in(monkeypatch):
    """Replaces the head process by a script."""
    real = ray_cluster.subprocess.Popen

    def install(script):
        def popen(command, **options):
            folder = json.loads(command[-1])["_temp_dir"]
            environment = {**options.pop("env"), "EBX_FOLDER": folder}
            return real([sys.executable, "-c", script], env=environment, **options)

        monkeypatch.setattr(ray_cluster.subprocess, "Popen", popen)

    return install


def test_cluster_lives_as_long_as_the_block_and_takes_its_children_along(stand_in, monkeypatch):
    stand_in(ANSWERS)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with run_cluster(QUICK, "some.extension") as cluster:
        child = psutil.Process(int(cluster.address.rpartition(":")[2]))
        assert child.is_running()
        assert os.environ["RAY_ADDRESS"] == cluster.address
        assert os.environ["RLINF_EXT_MODULE"] == "some.extension"
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
        assert cluster.folder.is_dir()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RLINF_EXT_MODULE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ
    assert not cluster.folder.exists()


def test_two_clusters_share_nothing(stand_in):
    stand_in(ANSWERS)
    with run_cluster(QUICK, "x") as one:
        token = os.environ["RAY_AUTH_TOKEN"]
        with run_cluster(QUICK, "x") as other:
            assert len({one.address, other.address}) == len({one.namespace, other.namespace}) == 2
            assert one.folder != other.folder and os.environ["RAY_AUTH_TOKEN"] != token
        assert os.environ["RAY_ADDRESS"] == one.address


def test_foreign_variables_do_not_reach_the_head(monkeypatch):
    seen = {}

    class Recorded:
        pid = 1

        def __init__(self, command, env, **options):
            seen.update(env)
            raise KeyboardInterrupt

    for name in ray_cluster.FOREIGN_VARIABLES:
        monkeypatch.setenv(name, "foreign")
    monkeypatch.setattr(ray_cluster.subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt), run_cluster(QUICK, "x"):
        pass
    assert not set(ray_cluster.FOREIGN_VARIABLES) & set(seen)
    assert seen["OMP_NUM_THREADS"] == "1"
    assert all(os.environ[name] == "foreign" for name in ray_cluster.FOREIGN_VARIABLES)


def test_a_failed_start_is_tried_again(stand_in, capsys):
    stand_in(FAILS_ONCE)
    with run_cluster(QUICK, "x") as cluster:
        assert cluster.address.startswith("127.0.0.1:")
    assert "Ray did not start (attempt 1: ended with exit code 1: busy)" in capsys.readouterr().err


def test_starts_that_fail_say_why_and_what_to_do(stand_in):
    stand_in(FAILS)
    with (
        pytest.raises(RayStartError, match=r"in 2 attempts.*attempt 1: .*raylet timed out.*attempt 2.*start_timeout_s"),
        run_cluster(QUICK, "x"),
    ):
        pass


def test_a_silent_start_is_given_up_after_its_time(stand_in):
    stand_in(SILENT)
    begun = time.monotonic()
    with (
        pytest.raises(RayStartError, match=r"no answer within 0.5 s"),
        run_cluster(ClusterSettings(start_timeout_s=0.5, start_attempts=1), "x"),
    ):
        pass
    assert time.monotonic() - begun < 60


def test_a_failed_run_keeps_the_logs_and_ends_the_cluster(stand_in, tmp_path):
    stand_in(
        "import os\n"
        "logs = os.path.join(os.environ['EBX_FOLDER'], 'session_2026', 'logs')\n"
        "os.makedirs(logs); open(os.path.join(logs, 'raylet.out'), 'w').write('why')\n" + ANSWERS
    )
    with pytest.raises(ZeroDivisionError), run_cluster(QUICK, "x", keep_logs=tmp_path / "kept") as cluster:
        raise ZeroDivisionError
    assert (tmp_path / "kept" / "r1" / "raylet.out").read_text() == "why"
    assert not cluster.folder.exists()


def test_an_existing_cluster_is_joined_and_left_alone(monkeypatch):
    monkeypatch.setattr(ray_cluster.subprocess, "Popen", None)  # nothing may be started
    with run_cluster(ClusterSettings(address="10.1.2.3:6379"), "x") as cluster:
        assert (os.environ["RAY_ADDRESS"], cluster.address, cluster.folder) == ("10.1.2.3:6379", "10.1.2.3:6379", None)
        assert cluster.namespace.startswith("embodix_")
    with pytest.raises(ValueError, match=r"host:port"), run_cluster(ClusterSettings(address="ray://here"), "x"):
        pass


def test_an_existing_cluster_that_does_not_answer_is_named():
    with (
        pytest.raises(RayStartError, match=r"10.1.2.3:6379 does not answer \(No route\).*RAY_AUTH_TOKEN"),
        run_cluster(ClusterSettings(address="10.1.2.3:6379"), "x"),
    ):
        raise ConnectionError("No route\nand more")


def test_a_folder_whose_sockets_would_not_fit_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match=r"and 107 is the most; set cluster.folder"),
        run_cluster(ClusterSettings(folder=str(tmp_path / ("x" * 60))), "x"),
    ):
        pass


def test_head_gets_what_is_configured(tmp_path):
    options = head_options(ClusterSettings(num_cpus=3, object_store_gb=0.25), tmp_path)
    assert options == {"_temp_dir": str(tmp_path), "object_store_memory": 250_000_000, "num_cpus": 3}
    assert "num_cpus" not in head_options(ClusterSettings(), tmp_path)
