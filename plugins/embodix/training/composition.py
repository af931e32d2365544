# SPDX-License-Identifier: Apache-2.0
"""A run whose packer composes the batches: sizes, stream, loader, step, schedule and cost model, put together once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from lerobot.configs.train import TrainPipelineConfig
from torch.utils.data import default_collate

from embodix.contracts import BatchComposer
from embodix.data.order import SampleOrder, ShuffledOrder
from embodix.data.sample_sizes import SizedDataset, measure_samples
from embodix.packing.batches import BatchStream
from embodix.packing.sample_cost import CostModel, IntArray, MeasuredBin, SampleSizes, fit_cost
from embodix.policies.settings import TokenCounts
from embodix.training.features import InstalledFeatures
from embodix.training.interruption import ignore_in_worker
from embodix.training.loader import StepDataset, StepLoader, StreamState
from embodix.training.step_forward import StepCount, StepForward


def require_composable(host_cfg: TrainPipelineConfig) -> None:
    """Refuse what composed batches can't be trained with.

    Raises:
        ValueError: sample weighting (RA-BC), or a streamed data set.
    """
    if host_cfg.use_rabc:
        raise ValueError(
            "train.use_rabc weights the samples of upstream's batches; a packer that composes batches normalises by "
            "action elements. Choose packing=padding_free."
        )
    if host_cfg.dataset.streaming:
        raise ValueError(
            "A packer that composes batches picks samples by index, which a streamed data set has not. "
            "Set dataset.streaming=false, or choose packing=padding_free."
        )


class Composition:
    """Puts a composing packer into upstream's loop.

    Args:
        composer: the packer.
        features: what is installed on the policy; its losses are divided by ``count``.
        count: the step's count of action elements.
        resume_from: state of the checkpoint that is resumed.

    Attributes:
        forward: what stands in for the prepared policy's ``forward``, once it is prepared.
    """

    def __init__(
        self,
        composer: BatchComposer,
        features: InstalledFeatures,
        count: StepCount,
        host_cfg: TrainPipelineConfig,
        accelerator: Accelerator,
        resume_from: StreamState | None,
    ) -> None:
        require_composable(host_cfg)
        self._composer, self._features, self._count = composer, features, count
        self._host_cfg, self._accelerator, self._resume_from = host_cfg, accelerator, resume_from
        self._schedule: SampleSchedule | None = None
        self._fit: CostFit | None = None
        self.forward: StepForward | None = None

    def measure(self, policy: Any, datasets: Sequence[SizedDataset], order: SampleOrder | None, flow: int) -> None:
        """Measure every sample and pack the first epoch.

        Raises:
            ValueError: a sample that no bin can hold, or a policy that can't tell sizes.
        """
        quiet = not self._accelerator.is_main_process
        self.sizes: SampleSizes = measure_samples(self._features.wrapper, policy, datasets, flow, quiet)
        self.stream = BatchStream(
            order or ShuffledOrder(len(self.sizes), self._host_cfg.seed or 0),
            self._composer,
            self.sizes,
            num_ranks=self._accelerator.num_processes,
            samples_per_step=self._host_cfg.batch_size,
            cost=getattr(self._composer, "cost_model", None),
        )
        if self._resume_from is not None:
            self.stream.load_state_dict(self._resume_from.stream)
        fit_steps: int | None = getattr(self._composer, "fit_steps", None)
        if fit_steps is not None and len(self.stream.cost_models) == 1:
            self._fit = CostFit(fit_steps, self.sizes, self._accelerator)

    def build_loader(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        before_step: Callable[[], None],
        after_step: Callable[[Any], None],
    ) -> StepLoader:
        """The loader in place of the one that upstream built, with upstream's options."""
        num_workers = self._host_cfg.num_workers
        options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": self._accelerator.device.type == "cuda"}
        options |= {"prefetch_factor": 2 if num_workers > 0 else None, "worker_init_fn": ignore_in_worker}
        steps = StepDataset(dataset, collate or default_collate, self._host_cfg.seed or 0)
        rank, device = self._accelerator.process_index, self._accelerator.device
        self.loader = StepLoader(self.stream, steps, rank, device, options, before_step, after_step)
        return self.loader

    def wrap_forward(self, prepared: Any, phase_ended: Callable[[str], None]) -> None:
        """Run the micro-batches of a step in the prepared policy's ``forward``."""
        installation = self._features.installation
        assert installation is not None
        backward = getattr(self._accelerator, "plain_backward", None)
        whole_step = getattr(self._accelerator, "whole_step", None)
        self.forward = StepForward(
            prepared, self._accelerator, installation, self._count, phase_ended, self, backward, whole_step
        )

    def wrap_schedule(self, scheduler: Any) -> Any:
        """Let the learning rate advance by samples."""
        if scheduler is None:
            return None
        since_last = self._resume_from.samples_since_schedule if self._resume_from else 0
        per_step = self._host_cfg.batch_size * self._accelerator.num_processes
        self._schedule = SampleSchedule(scheduler, per_step, lambda: self.num_samples, since_last)
        return self._schedule

    def advances_a_step(self) -> float:
        """How often the schedule advances in a step, from the samples that the packed epoch's steps hold."""
        samples = float(self.stream.describe()["samples_a_bin"]) * self._composer.bins_per_step
        return samples / self._host_cfg.batch_size

    @property
    def num_samples(self) -> int:
        """Samples of the last step over all ranks."""
        assert self.loader.step is not None
        return self.loader.step.num_samples

    @property
    def token_counts(self) -> TokenCounts | None:
        """Counts of the last step over all ranks."""
        return self.forward.token_counts if self.forward else None

    def bin_started(self) -> None:
        """Of each micro-batch, with the two below: times it while the cost model is being fitted."""
        if self._fit is not None:
            self._fit.bin_started()

    def forward_ended(self) -> None:
        if self._fit is not None:
            self._fit.forward_ended()

    def bin_ended(self) -> None:
        if self._fit is not None:
            self._fit.bin_ended()

    def step_ended(self) -> None:
        """Fit the cost model once enough steps are measured."""
        if self._fit is None:
            return
        assert self.loader.step is not None
        model = self._fit.step_ended(self.loader.step.ranks[self._accelerator.process_index])
        if not self._fit.finished:
            return
        num_measured, self._fit = len(self._fit.measured), None
        self._adopt(model, num_measured)

    def state(self) -> StreamState | None:
        """What the checkpoint keeps, None before the first step."""
        stream = self.loader.stream_state()
        return StreamState(stream, self._schedule.since_last if self._schedule else 0) if stream is not None else None

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        shapes = getattr(self._composer, "shapes", ())
        return {
            "tokens_a_sample": float(self.sizes.tokens.mean()),
            "images_a_sample": float(self.sizes.images_N.mean()),
            **self.stream.describe(),
            **({"shapes": [asdict(shape) for shape in shapes]} if shapes else {}),
            "cost_models": [asdict(entry) for entry in self.stream.cost_models],
            "schedule": "by samples",
        }

    def release(self) -> None:
        """Give the prepared policy its own ``forward`` back."""
        if self.forward is not None:
            self.forward.release()

    def _adopt(self, model: CostModel | None, num_measured: int) -> None:
        if model is None:
            logging.warning(
                f"The times of {num_measured} bins explain no cost model; bins stay composed by tokens. Give "
                "packing.options.cost as coefficients, or measure more steps with packing.options.fit_steps."
            )
            return
        self.stream.adopt(model)
        scaled = asdict(self.stream.cost_models[-1].model)
        logging.info(
            f"Cost model fitted to {num_measured} bins, in tokens: {scaled}. It shares bins among processes from now "
            "on and packs from the next epoch on; packing.options.cost takes it as it is."
        )


class SampleSchedule:
    """Advances a scheduler once for every ``samples_a_step`` samples: not at all, once or several times a step.

    Args:
        scheduler: the scheduler that accelerate prepared.
        samples_a_step: ``train.batch_size`` x processes, what a step of upstream holds.
        step_samples: samples of the step that was just trained.
        since_last: samples trained since the scheduler last advanced.
    """

    def __init__(
        self, scheduler: Any, samples_a_step: int, step_samples: Callable[[], int], since_last: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.since_last = since_last
        self._samples_a_step = samples_a_step
        self._step_samples = step_samples

    def step(self) -> None:
        """Called by upstream's loop once an optimizer step."""
        self.since_last += self._step_samples()
        while self.since_last >= self._samples_a_step:
            self.scheduler.step()
            self.since_last -= self._samples_a_step

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


NUM_WARMUP = 2


class CostFit:
    """Measures the bins of ``num_steps`` steps after warm-up, then fits.

    A bin's time is that of its forward and backward; of its forward alone where several processes wait for each other
    in the backward.

    Args:
        num_steps: steps to measure.
        sizes: of every sample.

    Attributes:
        measured: bins of this process so far.
    """

    def __init__(self, num_steps: int, sizes: SampleSizes, accelerator: Accelerator) -> None:
        self.measured: list[MeasuredBin] = []
        self._num_steps, self._sizes, self._accelerator = num_steps, sizes, accelerator
        self._seen_steps = 0
        self._seconds: list[float] = []
        self._started: float | None = None

    def bin_started(self) -> None:
        self._started = self._now()

    def forward_ended(self) -> None:
        if self._accelerator.state.num_processes > 1:
            self._stop()

    def bin_ended(self) -> None:
        self._stop()

    def step_ended(self, bins: list[IntArray]) -> CostModel | None:
        """Keep the step's bins; the fitted model after the last step, None before it or where nothing fits.

        The fit is over the bins of all processes, each of which gets the same model.
        """
        if self._seen_steps >= NUM_WARMUP:
            timed = zip(bins, self._seconds, strict=True)
            self.measured += [MeasuredBin.of(samples, self._sizes, seconds) for samples, seconds in timed]
        self._seconds = []
        self._seen_steps += 1
        return fit_cost(self._everyones()) if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether every step that is measured has been."""
        return self._seen_steps >= NUM_WARMUP + self._num_steps

    def _everyones(self) -> list[MeasuredBin]:
        if self._accelerator.state.num_processes == 1:
            return self.measured
        return list(gather_object(self.measured))

    def _stop(self) -> None:
        if self._started is not None:
            self._seconds.append(self._now() - self._started)
            self._started = None

    def _now(self) -> float:
        if self._accelerator.device.type == "cuda":
            torch.cuda.synchronize(self._accelerator.device)
            return time.perf_counter()
        return time.process_time()
