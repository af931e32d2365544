# SPDX-License-Identifier: Apache-2.0
"""``train.batch_size=auto``: the most samples whose step fits a given memory, by count, confirmed by one real step.

The step is taken in a process of its own (``trial_step.py``), so that nothing of the run itself is touched: no random
state, no weight, no sample.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from embodix.costs.gpu_sizes import USABLE
from embodix.costs.plan import RunCosts, largest_sample
from embodix.costs.policy_costs import computation_of
from embodix.costs.trial_step import Trial, take_trial
from embodix.launched_rank import launched_processes
from embodix.report.words import memory as in_words
from embodix.training.config_checks import sound_host_config
from embodix.training.features import composes_batches, select_training_features
from embodix.training.host_config import AUTO

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
Try = Callable[[int], Trial]


@dataclass(frozen=True)
class FoundBatchSize:
    """What was chosen, and why.

    Attributes:
        samples: of one step.
        memory: bytes that they were to fit in.
        counted: bytes by the plan's count; on a CPU with what the process holds already.
        trial: the real step; None where none was taken.
    """

    samples: int
    memory: float
    counted: float
    trial: Trial | None

    @property
    def sentence(self) -> str:
        """For the log."""
        measured = "" if self.trial is None else f", measured {in_words(self.trial.peak or 0)} ({self.trial.source})"
        return (
            f"train.batch_size=auto: {self.samples} samples. One step of them, the largest of the data, counted "
            f"{in_words(self.counted)}{measured}, of {in_words(self.memory)}."
        )


def settle_batch_size(cfg: DictConfig, overrides: list[str], confirm: bool = True) -> tuple[DictConfig, list[str]]:
    """The config and the overrides with a number in the place of ``auto``; unchanged where there is one already.

    Args:
        cfg: the composed train config.
        overrides: of the command, which a checkpoint will record.
        confirm: take a real step before a number is believed.

    Raises:
        ValueError: a run whose batch size can't be found, no memory given on a CPU, or memory that holds no sample.
    """
    if cfg.train.batch_size != AUTO:
        return cfg, overrides
    with torch.random.fork_rng(devices=[]):
        found = find_batch_size(cfg, confirm)
    logging.info(found.sentence)
    settled = _with_batch_size(cfg, found.samples)
    ours = ("train.batch_size=", "train.memory=")
    kept = [override for override in overrides if not override.lstrip("+").startswith(ours)]
    of_file = [] if cfg.train.memory is None or _names_memory(overrides) else ["train.memory=null"]
    return settled, [*kept, f"train.batch_size={found.samples}", *of_file]


def _names_memory(overrides: list[str]) -> bool:
    return any(override.lstrip("+").startswith("train.memory=") for override in overrides)


def find_batch_size(cfg: DictConfig, confirm: bool = True) -> FoundBatchSize:
    """The most samples of one step that fit; see :func:`settle_batch_size`."""
    _require_findable(cfg)
    single = _with_batch_size(cfg, 1)
    host_cfg = sound_host_config(single)
    assert host_cfg.policy is not None
    memory = _memory(cfg.train.memory, torch.device(host_cfg.policy.device))
    config: Any = OmegaConf.to_container(single, resolve=True)
    run = RunCosts(config)
    shape, computation = largest_sample(run.workload), computation_of(config)
    held = psutil.Process().memory_info().rss if host_cfg.policy.device == "cpu" else 0

    def need(samples: int) -> float:
        return held + run.saving.memory(shape, samples, computation).total

    frames = sum(source.facts.num_frames for source in run.sources)
    samples = most_that_fit(need, memory, frames)
    _require_one(samples, need(1), memory, "counted")
    if not confirm:
        return FoundBatchSize(samples, memory, need(samples), None)

    def attempt(samples: int) -> Trial:
        return take_trial(config, run.parts, shape, samples)

    samples, trial = confirmed(attempt, samples, memory, need(2) - need(1))
    _require_one(samples, trial.peak, memory, "measured")
    return FoundBatchSize(samples, memory, need(samples), trial)


def most_that_fit(need: Callable[[int], float], memory: float, most: int) -> int:
    """The largest number up to ``most`` whose need fits, which grows with it, nearly in proportion; 0 for none."""
    fits, too_many = 0, most + 1
    low, slope = need(1), max(need(min(2, most)) - need(1), 1.0)
    in_proportion = True  # and by halves in turns, so that a need out of proportion is found as soon
    while too_many - fits > 1:
        guess = math.floor(1 + (memory - low) / slope) if in_proportion else (fits + too_many) // 2
        in_proportion = not in_proportion
        tried = min(max(guess, fits + 1), too_many - 1)
        needed = need(tried)
        if needed <= memory:
            fits = tried
        else:
            too_many = tried
        slope = max((needed - low) / (tried - 1), 1.0) if tried > 1 else slope
    return fits


def confirmed(attempt: Try, samples: int, memory: float, bytes_a_sample: float) -> tuple[int, Trial]:
    """The first number from ``samples`` downwards whose real step fits, with that step; 0 where not even one does.

    Each number is less than the last by what that was too much, in samples; half of it where it found no end.
    """
    while True:
        trial = attempt(samples)
        if trial.peak is not None and trial.peak <= memory:
            return samples, trial
        if samples == 1:
            return 0, trial
        excess = samples // 2 if trial.peak is None else math.ceil((trial.peak - memory) / max(bytes_a_sample, 1))
        logging.info("train.batch_size=auto: %d samples do not fit (%s).", samples, trial.sentence)
        samples = max(samples - max(excess, 1), 1)


def bytes_of(words: int | str) -> float:
    """Bytes of a number or of words such as ``24GB`` or ``512 MiB``.

    Raises:
        ValueError: neither, or nothing.
    """
    match = re.fullmatch(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B)?\s*", str(words))
    number = 0.0 if match is None else float(match["number"]) * UNITS[match["unit"] or ""]
    if number <= 0:
        raise ValueError(f"train.memory is a number of bytes, or one with KB, MiB, GB, ...; got {words!r}, not 24GB.")
    return number


def _memory(given: int | str | None, device: torch.device) -> float:
    if given is not None:
        return bytes_of(given)
    if device.type != "cuda":
        raise ValueError(
            f"train.batch_size=auto fits a step into memory, and policy.device={device} has none of its own to ask. "
            "Say how much of it a step may take: train.memory=16GB."
        )
    return USABLE * torch.cuda.mem_get_info(device)[0]


def _require_findable(cfg: DictConfig) -> None:
    if cfg.resume is not None:
        raise ValueError(
            f"A resumed run keeps the batch size that its checkpoint records; got train.batch_size={AUTO} with "
            f"resume={cfg.resume}. Leave train.batch_size and train.memory out."
        )
    if launched_processes() > 1:
        raise ValueError(
            f"train.batch_size={AUTO} tries a step in one process; {launched_processes()} were started. Find a number "
            f"first, with `lerobot plan train.batch_size={AUTO} train.memory=24GB plan.processes="
            f"{launched_processes()}`, and set it."
        )
    selection = select_training_features(cfg)
    if composes_batches(selection):
        raise ValueError(
            f"packing={selection.packing.name} composes its batches, whose size is its own budget; got "
            f"train.batch_size={AUTO}. Set a number, and limit memory by packing.options.budget, in tokens."
        )


def _require_one(samples: int, needed: float | None, memory: float, how: str) -> None:
    if samples < 1:
        most = "more than the machine has" if needed is None else in_words(needed)
        raise ValueError(
            f"The memory holds not one sample: a step of one needs {most}, {how}, and train.memory is "
            f"{in_words(memory)}. `lerobot plan` lists what needs less."
        )


def _with_batch_size(cfg: DictConfig, samples: int) -> DictConfig:
    changed = cfg.copy()
    changed.train.batch_size, changed.train.memory = samples, None
    return changed
