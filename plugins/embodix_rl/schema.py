# SPDX-License-Identifier: Apache-2.0
"""Schema of ``lerobot rl``: what ``hydra_conf/rl.yaml`` may hold.

``env`` and ``policy`` are LeRobot's own and open here, except for ``env=latency`` and ``policy=latency``, whose fields
are checked when the run is planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from embodix.config.train_schema import NamedChoice, TokenizerSettings


@dataclass
class RlSettings:
    """Length of a run, and what happens besides training.

    Attributes:
        steps: training steps; each trains on one rollout of all environments.
        seed: of environments, weights and the order of samples.
        save_every: training steps between checkpoints; null for none. The last step is saved too.
        eval_every: training steps between evaluations; null for none.
        warmup_steps: training steps at the beginning that rates leave out.
    """

    steps: int = 10
    seed: int = 1000
    save_every: int | None = None
    eval_every: int | None = None
    warmup_steps: int = 1


@dataclass
class RolloutSettings:
    """How experience is collected.

    Attributes:
        num_envs: environments at once, over all processes.
        steps: action steps of each environment in a rollout epoch.
        epochs: rollout epochs before a training step.
        stages: groups of a process's environments that take turns, so that one is simulated while the policy computes
            for another.
        chunk: action steps of a chunk that are executed before the policy looks again.
        max_episode_steps: action steps after which an episode is over; null for the environment's own number.
        auto_reset: a finished episode is followed by the next one at once; otherwise its remaining steps don't count.
        ignore_terminations: an episode goes on after success.
        group_size: environments that begin in the same state, which GRPO compares.
        fixed_seeds: every rollout begins the same episodes.
    """

    num_envs: int = 8
    steps: int = 40
    epochs: int = 1
    stages: int = 1
    chunk: int = 5
    max_episode_steps: int | None = None
    auto_reset: bool = True
    ignore_terminations: bool = False
    group_size: int = 1
    fixed_seeds: bool = False


@dataclass
class EvaluationSettings:
    """Evaluation between training steps, without noise: `num_envs` episodes at once of `steps` action steps, `epochs`
    times, with the seeds from `first_seed` on."""

    num_envs: int = 8
    steps: int = 40
    epochs: int = 1
    first_seed: int = 100_000


@dataclass
class RewardSettings:
    """What is rewarded.

    Attributes:
        source: ``success`` (`scale` at the step that succeeds), ``simulator`` (the simulator's own reward times
            `scale`) or ``progress`` (the change of the simulator's reward since the step before times `scale`, which
            does not pay for staying near a goal that ends the episode).
        scale: factor.
        step_cost: subtracted for every action step.
        success_bonus: added at the step that succeeds.
    """

    source: str = "success"
    scale: float = 1.0
    step_cost: float = 0.0
    success_bonus: float = 0.0


@dataclass
class OptimSettings:
    """Optimization. Batches are counted in action chunks.

    Attributes:
        micro_batch: chunks of a forward and backward pass in one process.
        global_batch: chunks of an optimizer step, over all processes.
        lr: of the policy.
        value_lr: of the value head.
        lr_schedule: ``constant``, or ``cosine``, which falls to 0 over `rl.steps`.
        lr_warmup_steps: training steps in which the learning rates rise from 0; Adam's first steps are its largest.
        critic_warmup_steps: optimizer steps at first that train the value head alone.
    """

    micro_batch: int = 8
    global_batch: int = 64
    lr: float = 1e-5
    value_lr: float = 1e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    lr_schedule: str = "constant"
    lr_warmup_steps: int = 0
    critic_warmup_steps: int = 0


@dataclass
class PlacementSettings:
    """The choice of a placement.

    Attributes:
        name: ``colocated``: every component on all accelerators; ``disaggregated``: training on accelerators of its
            own, environments and inference together on the others; ``hybrid``: environments on accelerators of their
            own, inference on the others, training on all.
        accelerators: of the node; 0 places processes on the node.
        env_workers: environment processes; None for one for each accelerator that they have.
        rollout_workers: inference processes, likewise.
        actor_workers: training processes, likewise.
        own_accelerators: of the separate component: training in ``disaggregated``, environments in ``hybrid``; None for
            half of them.
    """

    name: str = MISSING
    accelerators: int = 0
    env_workers: int | None = None
    rollout_workers: int | None = None
    actor_workers: int | None = None
    own_accelerators: int | None = None


@dataclass
class ClusterSettings:
    """Where the run's workers live.

    Attributes:
        address: ``host:port`` of an existing cluster, which is joined and left as it is; None for one of the run's own.
        start_timeout_s: how long a start may take. A loaded machine needs a minute.
        start_attempts: how often a start is tried.
        num_cpus: what Ray takes for the machine's cores; its own count if None. It limits prestarted processes.
        object_store_gb: memory for objects in flight.
        folder: where Ray's folder is made. Its path must be short: Ray puts sockets into it.
        threads_per_worker: of torch and BLAS in each worker process.
    """

    address: str | None = None
    start_timeout_s: float = 180.0
    start_attempts: int = 3
    num_cpus: int | None = None
    object_store_gb: float = 0.5
    folder: str | None = None
    threads_per_worker: int = 1


@dataclass
class BenchSettings:
    """What is run one after another, and how the report shows it. `lerobot rl` ignores it.

    Attributes:
        title: of the report.
        variants: name -> overrides of `lerobot rl`, in the order in which they run. The first is the baseline.
        against: variant -> its baseline, for those whose baseline is another.
        only: the variants to run; null for all.
        paper: variant -> the ratio to its baseline that a paper measured, on its own hardware.
        paper_source: where these stand, and with what they were measured.
        timeline_s: seconds of the timelines; null for two training steps of the baseline.
        timeout_s: the longest that a variant may take.
        resume: folder of an earlier bench; its finished variants are not run again where their config is the same.
    """

    title: str = "Schedules of reinforcement learning"
    variants: dict[str, list[str]] = field(default_factory=dict)
    against: dict[str, str] = field(default_factory=dict)
    only: list[str] | None = None
    paper: dict[str, float] = field(default_factory=dict)
    paper_source: str | None = None
    timeline_s: float | None = None
    timeout_s: float = 3600.0
    resume: str | None = None


@dataclass
class RlApp:
    """Root of the ``lerobot rl`` config.

    Attributes:
        policy: LeRobot's policy config, or ``type: latency``.
        architecture: sizes of a small policy.
        patches: those of upstream that a policy group names; a checkpoint brings those of the run that trained it.
        checkpoint: a run, checkpoint or model folder of `lerobot train` to start from.
        changes: fields of the checkpoint's policy config that training changes, such as ``train_expert_only``.
        trainable: regular expressions; of the policy only parameters in whose names one is found are trained. Few
            parameters learn from fewer episodes. null for all that the policy's config leaves trainable.
        sampler: how a flow policy draws its actions (`embodix_rl.flow`).
        value: the value head of a flow policy.
        packing, attention, vision_tokens: what a checkpoint's policy computes with, in rollout and training.
        quantization: of the weights that rollout computes with.
        precision: none; another is refused.
        env: LeRobot's environment config, or ``type: latency``.
        algorithm: RLinf's ``algorithm`` node.
        runner: how rollout, training and the exchange of weights are scheduled.
        host: further nodes of RLinf's config, merged over what is composed here.
        resume: a run folder, or one of its checkpoints, whose training goes on.
        bench: what `lerobot bench rl` compares; a run itself does not read it.
    """

    rl: RlSettings = field(default_factory=RlSettings)
    policy: Any = MISSING
    architecture: Any = None
    patches: Any = field(default_factory=dict)
    checkpoint: str | None = None
    changes: Any = None
    trainable: list[str] | None = None
    sampler: Any = None
    value: Any = None
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    packing: NamedChoice = field(default_factory=NamedChoice)
    attention: NamedChoice = field(default_factory=NamedChoice)
    vision_tokens: NamedChoice = field(default_factory=NamedChoice)
    quantization: NamedChoice = field(default_factory=NamedChoice)
    precision: NamedChoice = field(default_factory=NamedChoice)
    env: Any = MISSING
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    algorithm: Any = MISSING
    runner: NamedChoice = field(default_factory=NamedChoice)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    host: Any = field(default_factory=dict)
    strict_plugins: bool = True
    resume: str | None = None
    bench: BenchSettings = field(default_factory=BenchSettings)


def register() -> None:
    """Make the schema known to Hydra as ``schema/rl``."""
    ConfigStore.instance().store(group="schema", name="rl", node=RlApp, package="_global_")
