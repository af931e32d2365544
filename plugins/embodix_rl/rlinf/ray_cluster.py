# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of a run's own, or an existing one by its address.

RLinf attaches to any Ray that runs on the machine, always under the same namespace: two runs end each other. A run's
own cluster has its own folder, ports, token and namespace, and ends with the run however that ends.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from embodix_rl.rlinf.hosts import RayStartError
from embodix_rl.schema import ClusterSettings

# What other clusters leave in the environment; it must reach neither the head process nor this one.
FOREIGN_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_TMPDIR",
    "RAY_NAMESPACE",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RUNTIME_ENV_HOOK",
)
NICENESS = "RAY_worker_niceness"  # a setting of Ray's servers, hence not in capitals
LONGEST_SOCKET_PATH = 107  # bytes, of sockaddr_un
SOCKETS = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@dataclass(frozen=True)
class RunCluster:
    """A cluster that a run uses: its address, the namespace, and what it and its workers need in the environment."""

    address: str
    namespace: str
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None


@contextmanager
def run_cluster(settings: ClusterSettings, extension: str, keep_logs: Path | None = None) -> Iterator[RunCluster]:
    """The cluster of a run, with this process's environment set for it while the block runs.

    Args:
        extension: RLinf's ``RLINF_EXT_MODULE``, loaded by every worker.
        keep_logs: where Ray's logs go when the block fails.

    Raises:
        RayStartError: no start within the time, as often as allowed; the message says what to do.
        ValueError: an address that is no host:port, or a folder whose path is too long.
    """
    shared = {
        "RLINF_EXT_MODULE": extension,
        "OMP_NUM_THREADS": str(settings.threads_per_worker),
        "RAY_DEDUP_LOGS": "0",
    }
    if settings.address is not None:
        with _environment({**shared, "RAY_ADDRESS": _checked_address(settings.address)}):
            yield from _joined(RunCluster(settings.address, _namespace(), shared))
        return
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray's workers are the run itself: at Ray's own niceness of 15 whatever else runs starves them.
    own = {**shared, **token, NICENESS: os.environ.get(NICENESS, "0")}
    with _own_cluster(settings, own, keep_logs) as (address, folder):
        variables = {**own, "RAY_ADDRESS": address}
        with _environment(variables):
            yield RunCluster(address, _namespace(), variables, folder)


def _namespace() -> str:
    return f"embodix_{os.getpid()}_{secrets.token_hex(4)}"


def _joined(cluster: RunCluster) -> Iterator[RunCluster]:
    """An existing cluster.

    Raises:
        RayStartError: it does not answer.
    """
    try:
        yield cluster
    except ConnectionError as error:
        raise RayStartError(
            f"The Ray cluster at cluster.address={cluster.address} does not answer ({str(error).splitlines()[0]}). See "
            "whether it is up (`ray status --address ...`), of this Ray's version, and started with the token of this "
            "process (RAY_AUTH_TOKEN or ~/.ray/auth_token; RAY_AUTH_MODE=disabled on both sides for none)."
        ) from error


def _checked_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"cluster.address is host:port of a running Ray (`ray status` shows it); got {address!r}. Leave it null "
            "for a cluster of the run's own."
        )
    return address


@contextmanager
def _own_cluster(
    settings: ClusterSettings, variables: Mapping[str, str], keep_logs: Path | None
) -> Iterator[tuple[str, Path]]:
    folder = _short_folder(settings.folder)
    try:
        head, address = _start(settings, folder, variables)
        try:
            yield address, folder
        except BaseException:
            if keep_logs is not None:
                _copy_logs(folder, keep_logs)
            raise
        finally:
            stop_head(head)
    finally:
        _remove(folder)


def _remove(folder: Path, attempts: int = 10) -> None:
    """Remove a folder, again while a process that is ending still writes into it."""
    for _ in range(attempts):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.2)


def _short_folder(parent: str | None) -> Path:
    base = Path(parent or tempfile.gettempdir()).absolute()
    longest = len(str(base)) + len("/ebx-xxxxxxxx") + len(SOCKETS)
    if longest > LONGEST_SOCKET_PATH:
        raise ValueError(
            f"Ray's sockets would have paths of {longest} bytes below {base}, and {LONGEST_SOCKET_PATH} is the most; "
            "set cluster.folder to a shorter one, such as /tmp."
        )
    return Path(tempfile.mkdtemp(prefix="ebx-", dir=base))


def _start(settings: ClusterSettings, folder: Path, variables: Mapping[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Start the head process, again if it fails; returns it and the address."""
    reasons: list[str] = []
    for attempt in range(1, settings.start_attempts + 1):
        head = _head_process(settings, folder / f"r{attempt}", variables)
        address, reason = _await_address(head, settings.start_timeout_s, _errors_file(folder / f"r{attempt}"))
        if address is not None:
            return head, address
        stop_head(head)
        reasons.append(f"attempt {attempt}: {reason}")
        print(f"Ray did not start ({reasons[-1]}).", file=sys.stderr)
    raise RayStartError(
        f"Ray did not start in {settings.start_attempts} attempts of {settings.start_timeout_s:g} s. "
        f"{' | '.join(reasons)}. On a busy machine raise cluster.start_attempts and cluster.start_timeout_s (Ray "
        f"itself gives up after 30 s of waiting for its raylet); check that {folder.parent} and /dev/shm have room; or "
        "start Ray yourself (`ray start --head`) and give its address: cluster.address=host:port."
    )


def head_options(settings: ClusterSettings, folder: Path) -> dict[str, Any]:
    """Arguments of ``ray.init`` of the head process."""
    options: dict[str, Any] = {
        "_temp_dir": str(folder),
        "object_store_memory": int(settings.object_store_gb * 1e9),
    }
    if settings.num_cpus is not None:
        options["num_cpus"] = settings.num_cpus
    return options


def _head_process(settings: ClusterSettings, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    with _errors_file(folder).open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "embodix_rl.rlinf.ray_head", json.dumps(head_options(settings, folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment, **variables},
            start_new_session=True,  # Ctrl-C in a terminal is for the run, which then ends its cluster
        )


def _await_address(head: subprocess.Popen[str], timeout_s: float, errors: Path) -> tuple[str | None, str]:
    """The address, or None with the reason."""
    assert head.stdout is not None
    if not select.select([head.stdout], [], [], timeout_s)[0]:
        return None, f"no answer within {timeout_s:g} s"
    line = head.stdout.readline()
    if line:
        return str(json.loads(line)["address"]), ""
    said = errors.read_text().strip().splitlines()[-1:] or ["it said nothing"]
    return None, f"ended with exit code {head.wait(10)}: {said[0]}"


def _errors_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.err")


def stop_head(head: subprocess.Popen[str], patience_s: float = 20.0) -> None:
    """End a head process and everything it started; what does not leave is killed."""
    started = _descendants(head.pid)
    assert head.stdin is not None
    head.stdin.close()
    try:
        head.wait(patience_s)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    if head.stdout is not None:
        head.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        with _gone_is_fine():
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _descendants(pid: int) -> list[psutil.Process]:
    with _gone_is_fine():
        return psutil.Process(pid).children(recursive=True)
    return []


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except psutil.NoSuchProcess:
        return


def _copy_logs(folder: Path, target: Path) -> None:
    for logs in sorted(folder.glob("r*/session_2*/logs")):
        shutil.copytree(logs, target / logs.parts[-3], ignore=shutil.ignore_patterns("old"), dirs_exist_ok=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables and take foreign ones out while the block runs."""
    names = {*variables, *FOREIGN_VARIABLES}
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
