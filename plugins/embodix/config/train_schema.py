# SPDX-License-Identifier: Apache-2.0
"""Schema of ``lerobot train``: what ``hydra_conf/train.yaml`` may hold.

Nodes that are upstream's own (``policy``, ``dataset``, ``env``, ``optimizer``, ``scheduler``, ``peft``) are open
mappings here; draccus checks their keys and types against upstream's dataclasses when the run starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class NamedChoice:
    """A registered implementation by name, with keyword arguments for its constructor."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainSettings:
    """Scalar fields of upstream's ``TrainPipelineConfig`` (lerobot 0.5.1, lerobot/configs/train.py), same defaults.

    ``output_dir`` defaults to a folder inside Hydra's run directory. ``batch_size=auto`` finds the most samples whose
    step fits ``memory``, in bytes or words (``24GB``); null for what is free on the GPU.
    """

    output_dir: str | None = None
    job_name: str | None = None
    seed: int | None = 1000
    cudnn_deterministic: bool = False
    num_workers: int = 4
    batch_size: int | str = 8
    memory: int | str | None = None
    steps: int = 100_000
    eval_freq: int = 20_000
    log_freq: int = 200
    tolerance_s: float = 1e-4
    save_checkpoint: bool = True
    save_freq: int = 20_000
    use_rabc: bool = False
    rabc_progress_path: str | None = None
    rabc_kappa: float = 0.01
    rabc_epsilon: float = 1e-6
    rabc_head_mode: str | None = "sparse"


@dataclass
class EvalSettings:
    """Upstream's ``EvalConfig`` (lerobot/configs/default.py): evaluation while training."""

    n_episodes: int = 50
    batch_size: int = 50
    use_async_envs: bool = False


@dataclass
class TokenizerSettings:
    """Folder of an offline tokenizer, or None for the hub's; see ``embodix.data.tokenizer``."""

    directory: str | None = None


@dataclass
class CheckSettings:
    """What happens where data can't be trained on: ``error``, ``warn`` or ``off``; and of which images they are looked
    at: a ``sample``, ``all`` or ``none``."""

    name: str = "error"
    images: str = "sample"


@dataclass
class CheckpointSettings:
    """How checkpoints are written.

    Attributes:
        format: ``upstream``, from a whole policy by the first process; ``sharded``, each process its part while
            training goes on; ``auto`` for the former where a process has the whole policy, else the latter.
        most_failures: sharded checkpoints in a row that can't be written before the run ends.
    """

    format: str = "auto"
    most_failures: int = 2


@dataclass
class ScheduleSettings:
    """The length of the learning-rate schedule.

    Attributes:
        steps: it is built for, of ``train.batch_size`` samples a process each; null for ``train.steps``.
        on_resume: what becomes of it where a run is resumed with other steps: ``keep`` stays on it, past its end at its
            last learning rate; ``rewarm`` begins one anew for the steps that are left; ``one_run`` goes on as if all
            steps had been planned from the start, as upstream does. Without a choice a change is refused.
    """

    steps: int | None = None
    on_resume: str | None = None


@dataclass
class LoggingSettings:
    """Where metrics go beside ``steps.jsonl``: ``none``, ``tensorboard`` or ``wandb`` with upstream's options."""

    name: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepClockSettings:
    """How steps are timed. ``synchronize`` waits for the device at every phase (exact phases, slower on a GPU);
    ``count_flops_at`` counts floating-point operations in that step, which is left out of timing."""

    synchronize: bool = False
    count_flops_at: int | None = None


@dataclass
class CompareSettings:
    """What ``lerobot compare`` adds to the train config.

    Attributes:
        variants: name -> overrides that make the variant.
        only: names of the variants to train; null for all. The first is the reference of every ratio.
        measure_memory: also run two steps of each variant in a process of its own and read its peak memory.
        evaluate: roll the trained policies out when ``env`` is set.
        controls: with the evaluation, also run the controls that its tasks and its data set allow.
        first_eval_seed: the seeds of the evaluation are this one and those after it.
        videos: recorded episodes of each task and variant.
    """

    variants: dict[str, list[str]] = field(default_factory=dict)
    only: list[str] | None = None
    measure_memory: bool = True
    evaluate: bool = True
    controls: bool = True
    first_eval_seed: int = 100_000
    videos: int = 1


@dataclass
class PlanSettings:
    """What ``lerobot plan`` adds to the train config.

    Attributes:
        processes: that a run is planned for; null for one, without a table of ranks.
        parallel: strategies to show for them; none for the run's own, or all where that is ``auto``.
    """

    processes: int | None = None
    parallel: list[str] = field(default_factory=list)


@dataclass
class TrainApp:
    """Root of the ``lerobot train`` config; ``compare`` and ``plan`` are used by the verbs of that name only.

    ``accept_changes`` names what a resumed run may have otherwise than its checkpoint recorded: ``data``,
    ``tokenizer``, ``batch``, ``policy``, ``algorithm``, ``versions``, and ``position`` for an epoch that begins again.
    """

    train: TrainSettings = field(default_factory=TrainSettings)
    policy: Any = MISSING
    architecture: Any = None
    dataset: Any = MISSING
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    packing: NamedChoice = field(default_factory=NamedChoice)
    attention: NamedChoice = field(default_factory=NamedChoice)
    vision_tokens: NamedChoice = field(default_factory=NamedChoice)
    action_pad: NamedChoice = field(default_factory=NamedChoice)
    quantization: NamedChoice = field(default_factory=NamedChoice)
    precision: NamedChoice = field(default_factory=NamedChoice)
    parallel: NamedChoice = field(default_factory=NamedChoice)
    reads: NamedChoice = field(default_factory=NamedChoice)
    preprocessing: NamedChoice = field(default_factory=NamedChoice)
    sampling: NamedChoice = field(default_factory=NamedChoice)
    language: NamedChoice = field(default_factory=NamedChoice)
    flow_samples: int = 1
    optimizer: Any = None
    scheduler: Any = None
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    env: Any = None
    eval: EvalSettings = field(default_factory=EvalSettings)
    evaluation: NamedChoice = field(default_factory=NamedChoice)
    peft: Any = None
    rename_map: Any = field(default_factory=dict)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    step_clock: StepClockSettings = field(default_factory=StepClockSettings)
    patches: Any = field(default_factory=dict)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    plugin: Any = None
    strict_plugins: bool = True
    resume: str | None = None
    accept_changes: list[str] = field(default_factory=list)
    compare: CompareSettings | None = None
    plan: PlanSettings | None = None


def register() -> None:
    """Make the schema known to Hydra as ``schema/train``."""
    ConfigStore.instance().store(group="schema", name="train", node=TrainApp, package="_global_")
