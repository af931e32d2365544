# SPDX-License-Identifier: Apache-2.0
"""One training run: features installed, steps timed and recorded, position kept for the checkpoint.

Of the first batch it keeps what the policy sees, where upstream's own batch is not the reference to compare with.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.train_utils import get_step_checkpoint_dir
from torch.utils.flop_counter import FlopCounterMode

from embodix import patching
from embodix.contracts import BatchComposer, ChecksReference, Placement
from embodix.data.streams import require_whole_epoch
from embodix.parallel.choice import ParallelChoice
from embodix.policies.adapters import bare_policy
from embodix.policies.settings import ReferenceCheck, TokenCounts
from embodix.policies.support import support_of
from embodix.report.manifest import collect_manifest
from embodix.report.steps import StepRecord, append_step
from embodix.training.accelerator import ObservedAccelerator, StepClock
from embodix.training.checkpoint_evaluation import CheckpointEvaluation
from embodix.training.composition import Composition
from embodix.training.features import FeatureSelection, InstalledFeatures, install_features
from embodix.training.finite import NonFiniteError, StepSamples, all_finite, non_finite_state, non_finite_step
from embodix.training.first_batch import FirstBatch
from embodix.training.flops import flop_counter
from embodix.training.interruption import Interruption, SaveNow
from embodix.training.loader import LoaderState, ResumableLoader, StreamState
from embodix.training.memory import peak_memory
from embodix.training.resumption import Continuity, Resumption
from embodix.training.run_data import RunData, read_choices
from embodix.training.schedule import RunSchedule
from embodix.training.spread import SpreadRun
from embodix.training.step_totals import StepTotals
from embodix.training.stopped import RunInterrupted

STEPS_FILE, MANIFEST_FILE, GEMM_TABLE_FILE = "steps.jsonl", "manifest.json", "gemm_gate.json"
_current: contextvars.ContextVar[TrainingSession] = contextvars.ContextVar("embodix_training_session")


def current_session() -> TrainingSession:
    """The session whose upstream loop runs in this thread."""
    return _current.get()


class TrainingSession:
    """Observes upstream's loop through its accelerator; see ``embodix.training.accelerator``.

    Args:
        name: the variant's name in reports.
        host_cfg: upstream's config.
        selection: the features to install.
        config: the resolved Hydra config, for the manifest and the checkpoint.
        overrides: the Hydra overrides that make this config, for the checkpoint.
        synchronize: wait for the device at each mark.
        count_flops_at: the step whose operations are counted, or None.
        resumption: what the checkpoint that is resumed holds; None for a run from its beginning.
        check_reference: after the first step, compare with the reference where upstream's own batch is not it.
        on_step: called with each finished step's record, in the main process.
        evaluation: evaluates the checkpoints while training goes on; None for nothing.
        interruption: ends the run after a whole step where it is asked for; None leaves Ctrl-C to Python.
        schedule: length of the learning-rate schedule; None for upstream's.
        parallel: how the run is spread; None for one process, or upstream's DDP.

    Attributes:
        spread: how it runs on its ranks.
        interruption: as given.
        between_steps: called before each batch is fetched, when no step is open; None for nothing.
    """

    def __init__(
        self,
        name: str,
        host_cfg: TrainPipelineConfig,
        selection: FeatureSelection,
        config: dict[str, Any],
        overrides: list[str],
        synchronize: bool = False,
        count_flops_at: int | None = None,
        resumption: Resumption | None = None,
        check_reference: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
        evaluation: CheckpointEvaluation | None = None,
        interruption: Interruption | None = None,
        schedule: RunSchedule | None = None,
        parallel: ParallelChoice | None = None,
    ) -> None:
        self.name = name
        self.host_cfg = host_cfg
        self.data = RunData(read_choices(config))
        self.selection = selection
        self.config = config
        self.overrides = overrides
        self.records: list[StepRecord] = []
        self.policy: Any = None
        self.features: InstalledFeatures | None = None
        self.loader: ResumableLoader | None = None
        self.composition: Composition | None = None
        self.flops_per_step: int | None = None
        self._synchronize = synchronize
        self._count_flops_at = count_flops_at
        self.parallel = parallel or ParallelChoice()
        num_batches = self.parallel.layout.num_batches
        self.continuity = Continuity(host_cfg, config, selection, resumption, num_batches)
        self._step = resumption.step + 1 if resumption else 1
        self._check_reference = check_reference
        self._first_batch: FirstBatch | None = None
        self._reference_check: ReferenceCheck | None = None
        self._on_step = on_step
        self._evaluation = evaluation
        self.interruption = interruption
        self.schedule = schedule or RunSchedule(host_cfg.steps)
        resumed_from = resumption.folder if resumption else None
        self.spread = SpreadRun(self.parallel, config["checkpoint"], resumed_from)
        self.between_steps: Callable[[], None] | None = None
        self._counter: FlopCounterMode | None = None
        self._samples: StepSamples | None = None
        self._totals: StepTotals | None = None
        self._num_samples = self._epoch_samples = 0
        self._loss = self._lr = float("nan")
        self._grad_norm: float | None = None

    @property
    def output_dir(self) -> Path:
        assert self.host_cfg.output_dir is not None
        return Path(self.host_cfg.output_dir)

    def activate(self) -> None:
        """Make this the session of the calling thread."""
        _current.set(self)

    def dataset_built(self) -> None:
        """The data set is there and the policy is not.

        Raises:
            ValueError: this is not the run that wrote the checkpoint that is resumed.
        """
        self.continuity.dataset_built(self.data.dataset)

    def policy_built(self, policy: Any, accelerator: ObservedAccelerator) -> None:
        self.policy = policy = bare_policy(policy)
        self._num_parameters = sum(parameter.numel() for parameter in policy.parameters())  # before they are cut
        self.accelerator = accelerator
        own_table = self.output_dir / GEMM_TABLE_FILE if self._step > 1 else None
        self.features = install_features(policy, self.selection, accelerator, gemm_table=own_table)
        composes = self.features.composer is not None
        if self._check_reference and not composes and isinstance(self.features.installation, ChecksReference):
            self._first_batch = FirstBatch(policy)
        self.clock = StepClock(accelerator.device, self._synchronize)
        if self.features.composer is not None:
            self.composition = self._composed_by(self.features.composer)

    def _composed_by(self, composer: BatchComposer) -> Composition:
        """Measure the samples and pack the first epoch, before anything is trained."""
        assert self.features is not None
        assert self.features.step_count is not None
        count, resumed = self.features.step_count, self.continuity.stream_position()
        composition = Composition(composer, self.features, count, self.host_cfg, self.accelerator, resumed)
        order = self.data.order(self.host_cfg.seed or 0)
        composition.measure(self.policy, self.data.sized_datasets(), order, self.selection.flow_samples)
        return composition

    def loader_built(self, loader: Any) -> Any:
        """Upstream's loader, before accelerate prepares it."""
        loader = self.data.adapt_loader(loader, self.host_cfg.seed or 0)
        if self.accelerator.is_main_process:
            self.data.announce(baseline=self.selection.packing.name == "none")
            self.data.count_shortened(self.policy.config.type)
        return loader

    def place(self, policy: Any, optimizer: Any) -> Placement | None:
        """Spread the policy and its optimizer over the ranks; None leaves that to accelerate."""
        support = support_of(self.policy.config.type)
        packed = self.features is not None and self.features.installation is not None
        return self.spread.place(policy, self.policy, optimizer, support, packed, self.accelerator)

    def prepared(self, policy: Any, optimizer: Any, loader: Any, scheduler: Any) -> tuple[Any, Any]:
        """The loader and the scheduler that upstream's loop uses, from those that accelerate prepared."""
        self.optimizer = optimizer
        self.spread.placed(self.policy, optimizer, self.accelerator, self.checkpoint_finished)
        self.schedule.adjust(scheduler, self.host_cfg)
        if self.composition is not None:
            self.composition.wrap_forward(policy, self.clock.end)
            scheduler = self.composition.wrap_schedule(scheduler)
            loader = self.composition.build_loader(
                self.data.dataset, self.data.collate, self._fetch_starts, self._fetched
            )
        else:
            resumed = self.continuity.loader_position()
            if resumed is not None:
                self._epoch_samples = resumed.num_batches * self._full_batch
            loader = self.loader = ResumableLoader(
                loader,
                resumed,
                self._fetch_starts,
                self._fetched,
                order=self.data.sampler,
                epoch_ended=self._epoch_ended,
            )
        if self.accelerator.is_main_process:
            self.write_manifest()
            remark = self._schedule_remark()
            if remark is not None:
                logging.warning(remark)
        self.spread.restore_random_state(self.accelerator)
        return loader, scheduler

    def _schedule_remark(self) -> str | None:
        pace = 1.0 if self.composition is None else self.composition.advances_a_step()
        return self.schedule.remark(self.host_cfg, pace, self._step - 1 - len(self.records))

    @property
    def position(self) -> LoaderState | StreamState | None:
        """Where the run stands in its data, None before the first batch."""
        if self.composition is not None:
            return self.composition.state()
        return self.loader.position if self.loader is not None else None

    def forward_starts(self) -> None:
        self.clock.end("preprocess")
        self._grad_norm = None
        if self._step == self._count_flops_at and self.clock.running:
            self._counter = flop_counter()
            self._counter.__enter__()

    def backward_starts(self, loss: torch.Tensor) -> None:
        self.clock.end("forward")
        self._loss = float(loss.detach())

    def backward_ended(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops_per_step = self._counter.get_total_flops()
            self._counter = None
        self.clock.end("backward")
        if self.composition is not None:
            self.composition.bin_ended()

    def gradients_clipped(self, grad_norm: Any) -> None:
        self._grad_norm = float(grad_norm)

    def optimizer_steps(self) -> None:
        """The last moment before the weights change: a step that is not finite on some rank ends the run on all.

        Raises:
            NonFiniteError: names the step and its samples.
        """
        if self._grad_norm is None:  # upstream clips past the accelerator where grad_clip_norm is 0
            self._grad_norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), float("inf")))
        self._lr = float(self.optimizer.param_groups[0]["lr"])  # the one this step uses; the schedule steps after it
        assert self._samples is not None
        finite = all_finite(self._loss, self._grad_norm) and self._samples.inputs_are_finite()
        asked = self.interruption is not None and self.interruption.requested
        own = StepTotals(self._loss, self._grad_norm, self._num_samples, self._token_counts(), asked, finite)
        self._totals = own.over_ranks(self.accelerator, already_total=self.composition is not None)
        if not self._totals.finite:
            raise self._non_finite(self._totals)

    def _non_finite(self, totals: StepTotals) -> NonFiniteError:
        assert self._samples is not None
        samples, num_ranks = self._samples.describe(), self.accelerator.num_processes
        if num_ranks > 1:
            samples = gather_object([f"process {self.accelerator.process_index}: {sample}" for sample in samples])
        return non_finite_step(self._step, totals.loss, totals.grad_norm, samples, num_ranks)

    def step_ended(self) -> None:
        if not self.clock.running:
            return
        self.clock.end("optimizer")
        self.clock.stop()
        record = self._record()
        self.records.append(record)
        if self._totals is not None and self._totals.interrupted:
            self.host_cfg.save_freq = SaveNow(self.host_cfg.save_freq)
        if self._saves_now():
            self._require_finite_checkpoint()
            place = get_step_checkpoint_dir(self.output_dir, self.host_cfg.steps, self._step)
            self.spread.begin_saving(place, self.policy, self.optimizer)
        if self.accelerator.is_main_process:
            append_step(self.output_dir / STEPS_FILE, record)
            if self._on_step is not None:
                self._on_step(record)
        self._step += 1
        if self.composition is not None:
            self.composition.step_ended()
        self._compare_with_reference()
        self._keep_gemm_table()
        if self.spread.saver is not None:
            self.spread.saver.tell()
        if self._evaluation is not None:
            self._evaluation.poll()

    def _saves_now(self) -> bool:
        """Whether upstream's loop is about to save."""
        cfg = self.host_cfg
        return bool(cfg.save_checkpoint and (self._step % cfg.save_freq == 0 or self._step == cfg.steps))

    def _require_finite_checkpoint(self) -> None:
        """Every rank looks, so that all end together."""
        problem = non_finite_state(self._step, self.policy.named_parameters(), self.optimizer)
        found = [problem] if self.accelerator.state.num_processes == 1 else gather_object([problem])
        if problems := [problem for problem in found if problem is not None]:
            raise NonFiniteError(problems[0])

    def training_ends(self) -> None:
        """Upstream's loop is over, or ended between two steps, on every rank.

        Raises:
            embodix.training.stopped.RunStoppedError: the last checkpoint could not be written.
        """
        self.spread.finish_saving()

    def checkpoint_finished(self, checkpoint_dir: Path) -> None:
        """A checkpoint is complete and in its place."""
        if self._evaluation is not None:
            self._evaluation.checkpoint_saved(int(checkpoint_dir.name), checkpoint_dir)

    def _compare_with_reference(self) -> None:
        """Once, between two steps, so that no phase is charged; the run's random stream is left where it was."""
        kept, self._first_batch = self._first_batch, None
        if kept is None or kept.batch is None:
            return
        installation = self.features.installation if self.features else None
        assert isinstance(installation, ChecksReference)
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        precision = self.features.precision if self.features else None
        with torch.random.fork_rng(devices=devices), precision.suspended() if precision else nullcontext():
            self._reference_check = installation.check_reference(kept.batch)

    def _keep_gemm_table(self) -> None:
        """Once, when the first batch has decided what is computed in low precision, for this run's resumption."""
        table = self.features.precision.gemm_table if self.features and self.features.precision else None
        if table is not None and len(self.records) == 1 and self.accelerator.is_main_process:
            table.save(self.output_dir / GEMM_TABLE_FILE)

    def write_manifest(self) -> None:
        """Write what is known of the run; called again at the end with what was measured."""
        assert self.features is not None
        settings = self._settings()
        low_precision = [settings[name] for name in ("quantization", "precision") if name in settings]
        manifest = collect_manifest(
            self.name,
            seed=self.host_cfg.seed,
            config=self.config,
            packer=self.selection.packing.name,
            attention=self.features.attention_backend,
            settings=settings,
            fallbacks=[part["fallback"] for part in low_precision if part.get("fallback")],
            patches=[name for name in patching.patch_names() if patching.is_applied(name)],
            flops_per_step=self.flops_per_step,
            num_parameters=self._num_parameters,
            reference_check=asdict(self._reference_check) if self._reference_check else None,
            **peak_memory(self.accelerator.device),
        )
        manifest.save(self.output_dir / MANIFEST_FILE)

    def _settings(self) -> dict[str, Any]:
        assert self.features is not None
        schedule = {**asdict(self.schedule), "remark": self._schedule_remark()}
        settings: dict[str, Any] = {**self.features.describe(), "data": self.data.describe(), "schedule": schedule}
        settings["parallel"] = self.spread.effective
        own_autocast = support_of(self.policy.config.type).own_autocast(self.policy.config)
        if own_autocast is not None:
            settings["own_autocast"] = own_autocast
        if self.composition is not None:
            settings["composition"] = self.composition.describe()
        return settings

    def close(self) -> None:
        """Write the final manifest and give upstream's policy back its own methods, and Ctrl-C to Python."""
        if self.interruption is not None:
            self.interruption.release()
        if self.features is None:
            return
        if self.accelerator.is_main_process:
            self.write_manifest()
        if self.composition is not None:
            self.composition.release()
        if self._first_batch is not None:
            self._first_batch.release()
        self.spread.release()
        self.features.uninstall()

    def _fetch_starts(self) -> None:
        if self._totals is not None and self._totals.interrupted:
            raise RunInterrupted(self._how_to_go_on())
        if self.interruption is not None:
            self.interruption.watch()
        if self.between_steps is not None:
            self.between_steps()
        self.clock.start()

    def _how_to_go_on(self) -> str:
        done = f"Interrupted after step {self._step - 1} of {self.host_cfg.steps}"
        if not self.host_cfg.save_checkpoint:
            return f"{done}; nothing is saved (train.save_checkpoint=false)."
        return f"{done}, which is saved. Go on with: lerobot train resume={self.output_dir}"

    def _fetched(self, batch: Any) -> None:
        self.clock.end("data_wait")
        self._samples = StepSamples(batch, self.data.first_frames())
        if self.composition is not None:
            self._num_samples = self.composition.num_samples
        else:
            self._num_samples = _batch_size(batch)
            self._epoch_samples += self._num_samples * self.accelerator.num_processes

    def _epoch_ended(self) -> None:
        num_read, self._epoch_samples = self._epoch_samples, 0
        if self.host_cfg.dataset.streaming:
            require_whole_epoch(num_read, self.data.dataset.num_frames)

    @property
    def _full_batch(self) -> int:
        return self.host_cfg.batch_size * self.accelerator.num_processes

    def _token_counts(self) -> TokenCounts | None:
        """Of this rank's batch; of all ranks where the packer composes batches."""
        if self.composition is not None:
            return self.composition.token_counts
        installation = self.features.installation if self.features else None
        return installation.token_counts if installation else None

    def _record(self) -> StepRecord:
        totals = self._totals
        assert totals is not None
        return StepRecord(
            step=self._step,
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            lr=self._lr,
            num_samples=totals.num_samples,
            wall_s=dict(self.clock.wall_s),
            cpu_s=dict(self.clock.cpu_s),
            tokens=totals.token_record(),
            action_valid=totals.counts.action_valid if totals.counts else None,
            action_total=totals.counts.action_total if totals.counts else None,
        )


def _batch_size(batch: Any) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))
