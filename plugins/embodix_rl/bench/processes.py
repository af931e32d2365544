# SPDX-License-Identifier: Apache-2.0
"""Run variants one after another, each by `lerobot rl` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from embodix.report.manifest import load_manifest, write_text_atomically
from embodix_rl.bench.variants import BenchVariant, same_config
from embodix_rl.report.rl_bench import VariantEntry, read_variant

COMMAND = (sys.executable, "-m", "embodix", "rl")
OUTPUT_FILE, FINISHED_FILE = "output.log", "finished.json"
NUM_LAST_LINES = 15
GRACE_S = 90.0  # for a run that was told to end to take its cluster down


@dataclass(frozen=True)
class Outcome:
    """How a variant ended.

    Attributes:
        seconds: that its process took.
        failure: in a sentence; None where it finished.
        last_lines: of its output, where it failed.
        reused: an earlier bench had finished it.
    """

    seconds: float
    failure: str | None = None
    last_lines: list[str] = field(default_factory=list)
    reused: bool = False


def finished_before(variant: BenchVariant) -> Outcome | None:
    """The outcome of an earlier bench's run with the same config, if it finished."""
    marker = variant.folder / FINISHED_FILE
    if not marker.is_file() or not same_config(variant, load_manifest(variant.folder / "manifest.json").config):
        return None
    return Outcome(float(json.loads(marker.read_text())["seconds"]), reused=True)


def run_variants(
    variants: Sequence[BenchVariant],
    timeout_s: float,
    tell: Callable[[str], None],
    command: Sequence[str] = COMMAND,
) -> Iterator[tuple[BenchVariant, Outcome]]:
    """Run what is not finished yet; one that fails does not keep the others from running.

    Args:
        timeout_s: the longest that one may take.
        tell: gets a line for each begin and end.
        command: takes the overrides of `lerobot rl`.
    """
    for number, variant in enumerate(variants, 1):
        place = f"[{number}/{len(variants)}] {variant.name}"
        outcome = finished_before(variant)
        if outcome is not None:
            tell(f"{place}: finished before with the same config ({outcome.seconds:.0f} s); not run again.")
        else:
            tell(f"{place}: runs; its output is in {variant.folder / OUTPUT_FILE}")
            outcome = _run(variant, timeout_s, command)
            tell(f"{place}: {outcome.failure or f'finished in {outcome.seconds:.0f} s'}")
        yield variant, outcome


def _run(variant: BenchVariant, timeout_s: float, command: Sequence[str]) -> Outcome:
    if variant.folder.exists():
        shutil.rmtree(variant.folder)  # of a run that was cut off: its records would be continued
    variant.folder.mkdir(parents=True)
    output, begun = variant.folder / OUTPUT_FILE, time.perf_counter()
    words = [*command, *variant.overrides, f"hydra.run.dir={variant.folder}"]
    with output.open("w") as file:
        code = _wait(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True), timeout_s)
    seconds = time.perf_counter() - begun
    failure = _failure(variant, code, timeout_s)
    if failure is not None:
        return Outcome(seconds, failure, output.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:])
    write_text_atomically(variant.folder / FINISHED_FILE, json.dumps({"seconds": seconds}) + "\n")
    return Outcome(seconds)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Its exit code, or None where it took too long and was ended. Whatever ends this process ends that one first."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()


def _failure(variant: BenchVariant, code: int | None, timeout_s: float) -> str | None:
    if code is None:
        return f"took longer than bench.timeout_s={timeout_s:g} s and was ended"
    if code != 0:
        return f"ended with exit code {code}"
    try:
        read_variant(VariantEntry(variant.name, variant.folder, variant.overrides))
    except (ValueError, FileNotFoundError) as error:
        return f"left records that say nothing of it: {error}"
    return None
