# SPDX-License-Identifier: Apache-2.0
"""Train variants of one config side by side on the same samples, and measure each one's memory by itself.

Each variant is upstream's own ``train()`` in a thread of its own; a turnstile lets exactly one of them run, a step at a
time in turn, and swaps the process-wide random state when the turn changes, so that each sees the stream it would see
alone. Alternating A B A B makes the drift of the machine fall on all alike. Several ranks run the same cycle, so that
what they exchange matches; their group of processes ends after the last variant.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from lerobot.scripts import lerobot_train
from lerobot.utils.random_utils import get_rng_state, set_rng_state
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from embodix.checks.guard import require_sound_data
from embodix.config.compose import compose_train
from embodix.launched_rank import is_first_rank, launched_processes
from embodix.parallel.choice import choose_parallel
from embodix.patching import replace_attribute
from embodix.policies.support import support_of
from embodix.report.steps import StepRecord
from embodix.training.adapters import settle_adapters
from embodix.training.config_checks import say_what_differs, sound_host_config
from embodix.training.features import named_choice, run_traits, select_training_features
from embodix.training.host_config import decode_host_config, fill_missing_preset
from embodix.training.host_context import required_patches
from embodix.training.run_data import require_trainable_dataset
from embodix.training.schedule import fresh_schedule
from embodix.training.session import MANIFEST_FILE, TrainingSession
from embodix.training.variant_ranks import (
    VariantAccelerator,
    rank_launcher,
    require_same_samples,
    without_launcher,
)


class AbandonedError(RuntimeError):
    """Raised in a loop whose neighbour failed, so that it ends too."""


class Turnstile:
    """Lets one of ``num_runners`` threads run at a time, in a fixed cycle.

    The random state of python, numpy and torch belongs to the runner whose turn it is.
    """

    def __init__(self, num_runners: int) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._active = [True] * num_runners
        self._random_states: list[dict[str, object] | None] = [None] * num_runners
        self._failed = False

    def enter(self, runner: int) -> None:
        """Wait for the first turn."""
        with self._condition:
            self._wait_for_turn(runner)

    def pass_on(self, runner: int) -> None:
        """Let the next runner go and wait for the turn to come back."""
        with self._condition:
            self._random_states[runner] = get_rng_state()
            self._advance()
            self._wait_for_turn(runner)

    def leave(self, runner: int, failed: bool) -> None:
        """Take this runner out of the cycle; a failure ends the others at their next turn."""
        with self._condition:
            self._active[runner] = False
            self._failed = self._failed or failed
            if self._turn == runner:
                self._advance()
            self._condition.notify_all()

    def _advance(self) -> None:
        """Give the turn to the next active runner, which is the same one when it is the last."""
        num_runners = len(self._active)
        for offset in range(1, num_runners + 1):
            candidate = (self._turn + offset) % num_runners
            if self._active[candidate]:
                self._turn = candidate
                break
        self._condition.notify_all()

    def _wait_for_turn(self, runner: int) -> None:
        self._condition.wait_for(lambda: self._failed or self._turn == runner)
        if self._failed:
            raise AbandonedError("another variant failed; this one was ended with it")
        state = self._random_states[runner]
        if state is not None:
            set_rng_state(state)


def run_in_turns(loops: Sequence[Callable[[Callable[[], None]], None]]) -> None:
    """Run every loop to its end, one step of each in turn.

    Args:
        loops: each is called with a function that it must call between two of its steps.

    Raises:
        Exception: the first failure of any loop, after all have ended.
    """
    turnstile = Turnstile(len(loops))
    failures: list[BaseException] = []

    def run(index: int) -> None:
        failed = True
        try:
            turnstile.enter(index)
            loops[index](lambda: turnstile.pass_on(index))
            failed = False
        except AbandonedError:
            pass  # the failure that caused it is reported
        except BaseException as error:
            failures.append(error)
        finally:
            turnstile.leave(index, failed)

    threads = [threading.Thread(target=run, args=(i,), name=f"variant-{i}", daemon=True) for i in range(len(loops))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


SHARED_NODES = ("dataset", "sampling", "tokenizer", "architecture", "env")
SHARED_SETTINGS = ("seed", "steps", "batch_size")


@dataclass(frozen=True)
class Variant:
    """A named config of the comparison, composed."""

    name: str
    overrides: list[str]
    cfg: DictConfig


def compose_variants(settings: DictConfig, overrides: list[str], output_dir: Path) -> list[Variant]:
    """Compose each variant's train config.

    Args:
        settings: the ``compare`` node.
        overrides: those of the command line; a variant's own come after them.
        output_dir: run folders are made in ``<output_dir>/variants/<name>``.

    Raises:
        ValueError: fewer than two variants, one that is not there, or variants that differ in data, seed, steps, batch
            size or sizes, so that their steps could not be compared; or a variant that can't be trained.
    """
    common = [o for o in overrides if not o.lstrip("+~").startswith(("compare.", "compare=", "hydra"))]
    variants = []
    for name, own in _chosen(settings).items():
        cfg = compose_train([*common, *own, "step_clock.synchronize=true"])
        cfg.train.output_dir = str(output_dir / "variants" / str(name))
        cfg.train.eval_freq = 0  # evaluated once, after training, on the same seeds
        cfg.step_clock.count_flops_at = 1  # a warm-up step, which no time is taken from
        sound_host_config(cfg)
        variants.append(Variant(str(name), [*common, *own], cfg))
    if len(variants) < 2:
        raise ValueError(f"compare.variants needs at least two variants; got {[v.name for v in variants]}.")
    _require_same_work(variants)
    return variants


def _chosen(settings: DictConfig) -> dict[str, list[str]]:
    names = settings.variants if settings.only is None else settings.only
    unknown = [name for name in names if name not in settings.variants]
    if unknown:
        raise ValueError(
            f"compare.only names variants of compare.variants, which are {', '.join(settings.variants)}; got "
            f"{', '.join(unknown)}. Add one as '+compare.variants.{unknown[0]}=[...]'."
        )
    return {name: settings.variants[name] for name in names}


def _require_same_work(variants: list[Variant]) -> None:
    reference = variants[0]
    for variant in variants[1:]:
        for node in SHARED_NODES:
            if variant.cfg[node] != reference.cfg[node]:
                raise ValueError(_differs(reference, variant, node, reference.cfg[node], variant.cfg[node]))
        for name in SHARED_SETTINGS:
            if variant.cfg.train[name] != reference.cfg.train[name]:
                values = reference.cfg.train[name], variant.cfg.train[name]
                raise ValueError(_differs(reference, variant, f"train.{name}", *values))
        if required_patches(variant.cfg) != required_patches(reference.cfg):
            values = required_patches(reference.cfg), required_patches(variant.cfg)
            raise ValueError(_differs(reference, variant, "patches", *values))


def _differs(reference: Variant, variant: Variant, name: str, wanted: Any, got: Any) -> str:
    return (
        f"Variants are compared step by step on the same samples, so {name} must be the same in all; "
        f"{reference.name!r} has {wanted}, {variant.name!r} has {got}. Compare such runs with `lerobot train -m`."
    )


def train_side_by_side(variants: list[Variant]) -> list[TrainingSession]:
    """Run every variant's upstream loop, one step of each in turn; call inside the host context.

    The sessions are still open on return, so that the trained policies can be evaluated; close each when done. The
    group of the ranks, where there are several, has ended.

    Raises:
        ValueError: a variant that can't be trained on these ranks, or variants that can't be compared on them.
    """
    with _progress(variants) as on_step:
        sessions = [_session(variant, on_step(variant.name)) for variant in variants]
        require_same_samples(sessions)
        for variant, session in zip(variants, sessions, strict=True):
            _prepare_data(variant, session)
        say_what_differs(sessions[0].host_cfg)
        for session in sessions[1:]:
            session.data.announces = False  # one table of the data that all share
        loops = [_loop(session) for session in sessions]
        with ExitStack() as stack:  # several loops share one terminal: one display, and logs to Hydra's file only
            stack.callback(replace_attribute(lerobot_train, "tqdm", _QuietProgress))
            stack.callback(replace_attribute(lerobot_train, "init_logging", _keep_logging))
            stack.callback(_end_group)
            run_in_turns(loops)
    return sessions


def _session(variant: Variant, on_step: Callable[[StepRecord], None]) -> TrainingSession:
    host_cfg = decode_host_config(variant.cfg)
    fill_missing_preset(host_cfg)
    settle_adapters(host_cfg, variant.cfg.peft)
    selection = select_training_features(variant.cfg)
    parallel = named_choice(variant.cfg.parallel)
    traits = run_traits(variant.cfg, host_cfg, selection)
    placed = choose_parallel(parallel.name, parallel.options, traits, launched_processes())
    config: Any = OmegaConf.to_container(variant.cfg, resolve=True)
    return TrainingSession(
        name=variant.name,
        host_cfg=host_cfg,
        selection=selection,
        config=config,
        overrides=variant.overrides,
        synchronize=variant.cfg.step_clock.synchronize,
        count_flops_at=variant.cfg.step_clock.count_flops_at,
        check_reference=placed.layout.num_processes == placed.layout.data,  # upstream's forward needs whole parameters
        on_step=on_step,
        schedule=fresh_schedule(variant.cfg.schedule, host_cfg),
        parallel=placed,
    )


def _prepare_data(variant: Variant, session: TrainingSession) -> None:
    require_trainable_dataset(session.host_cfg, session.config["dataset"])
    require_sound_data(session.host_cfg, session.config)
    support_of(variant.cfg.policy.type).prepare_assets(variant.cfg, session.host_cfg)


def _loop(session: TrainingSession) -> Callable[[Callable[[], None]], None]:
    def loop(pass_on: Callable[[], None]) -> None:
        session.between_steps = pass_on
        session.activate()
        accelerator = VariantAccelerator(session)
        session.host_cfg.output_dir = Path(broadcast_object_list([str(session.output_dir)])[0])
        lerobot_train.train(session.host_cfg, accelerator=accelerator)

    return loop


def _end_group() -> None:
    """Once for all variants, also after one has failed: a rank that waits for this one then fails instead."""
    if launched_processes() > 1 and PartialState._shared_state:
        PartialState().destroy_process_group()


def _keep_logging(**kwargs: Any) -> None:
    """Stands in for upstream's set-up of the root logger: Hydra's is kept."""


class _QuietProgress:
    """Stands in for upstream's tqdm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, num_steps: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def _progress(variants: list[Variant]) -> Iterator[Callable[[str], Callable[[StepRecord], None]]]:
    """A progress bar a variant with its loss and mean CPU time per step."""
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), disable=not is_first_rank()) as progress:
        tasks = {v.name: progress.add_task(v.name, total=v.cfg.train.steps, status="") for v in variants}

        def observer(name: str) -> Callable[[StepRecord], None]:
            def on_step(record: StepRecord) -> None:
                seconds = sum(record.cpu_s.values())
                status = f"loss {record.loss:.4f}  {seconds:.3f} CPU s/step"
                progress.update(tasks[name], advance=1, status=status)

            return on_step

        yield observer


def measure_memory(variants: list[Variant], num_steps: int = 2) -> dict[str, Mapping[str, Any]]:
    """Peak memory of each variant by itself, as its manifest states it: of a process, and of the first where there are
    several. The ranks of this command must be on this machine.

    Raises:
        RuntimeError: a run failed; the message carries the end of its output.
    """
    return {variant.name: _memory_of(variant, num_steps) for variant in variants}


def _memory_of(variant: Variant, num_steps: int) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="embodix-memory-") as folder:
        output_dir = Path(folder) / "run"
        own = (f"train.steps={num_steps}", "train.save_checkpoint=false", f"train.output_dir={output_dir}")
        # Fields, not groups: with another group, fields of env or logging set on the command line would not exist.
        quiet = ("logging.name=none", "train.eval_freq=0", f"hydra.run.dir={folder}/hydra", "train.log_freq=0")
        command = [*rank_launcher(launched_processes()), "-m", "embodix", "train", *variant.overrides, *own, *quiet]
        environment = without_launcher(os.environ)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"Measuring the memory of {variant.name!r} failed:\n{done.stderr[-2000:]}")
        manifest = json.loads((output_dir / MANIFEST_FILE).read_text())
    return {key: manifest[key] for key in ("peak_memory_bytes", "peak_memory_source")}
