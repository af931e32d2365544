# SPDX-License-Identifier: Apache-2.0
"""Schema of ``lerobot eval``: what ``hydra_conf/eval.yaml`` may hold.

``env`` and ``policy`` are upstream's own and open here; draccus checks their fields when the run starts. The groups
of features (``packing``, ``attention``, ...) count where the command names them; what it does not name is as in the
run that trained the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from embodix.config.train_schema import NamedChoice, TokenizerSettings


@dataclass
class EpisodeSettings:
    """Which episodes are run, and how.

    Attributes:
        n_episodes: episodes of each task.
        first_seed: they have the seeds from this one on.
        num_slots: episodes simulated at once, over all tasks. Part of what defines a result to the last bit.
        num_groups: groups of slots that take turns: one is simulated while the policy computes for another.
        num_workers: processes for the simulators, 0 for none but this one; null for the cores but one, at least 1.
        videos: recorded episodes of each task, the first ones.
        max_repeats: times that an episode begins again after its simulator died, before the run stops.
        worker_timeout_s: a worker without an answer for so long is replaced.
    """

    n_episodes: int = 50
    first_seed: int = 100_000
    num_slots: int = 8
    num_groups: int = 2
    num_workers: int | None = None
    videos: int = 1
    max_repeats: int = 3
    worker_timeout_s: float = 600.0


@dataclass
class RecordingSettings:
    """The demonstrations whose mean is the blind control; null for those that the checkpoint was trained on."""

    root: str | None = None


@dataclass
class EvalApp:
    """Root of the ``lerobot eval`` config.

    Attributes:
        checkpoint: a run, checkpoint or model folder, or a model on the hub; a list, or a mapping of names, for several
            on the same episodes. In a mapping, ``{path: ..., policy.n_action_steps: 1}`` changes one of them alone.
        actor: what acts: ``policy``, or ``expert``, ``blind``, ``blank_image``, ``wrong_prompt``.
        controls: those of the latter four that are run beside it.
        wrong_prompt: what the wrong-prompt control says; null for another task's instruction.
        env: LeRobot's environment config; null for that of the run that trained the checkpoint.
        policy: fields of the policy's config that are changed, for example ``device`` or ``+policy.n_action_steps=5``.
        rename_map: upstream's, from the environment's keys to the policy's; null keeps the checkpoint's.
        resume: folder of an evaluation that was interrupted; its finished episodes are kept.
    """

    checkpoint: Any = None
    actor: str = "policy"
    controls: list[str] = field(default_factory=list)
    wrong_prompt: str | None = None
    env: Any = None
    eval: EpisodeSettings = field(default_factory=EpisodeSettings)
    policy: Any = field(default_factory=dict)
    dataset: RecordingSettings = field(default_factory=RecordingSettings)
    rename_map: Any = None
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    packing: NamedChoice = field(default_factory=NamedChoice)
    attention: NamedChoice = field(default_factory=NamedChoice)
    vision_tokens: NamedChoice = field(default_factory=NamedChoice)
    quantization: NamedChoice = field(default_factory=NamedChoice)
    reads: NamedChoice = field(default_factory=NamedChoice)
    preprocessing: NamedChoice = field(default_factory=NamedChoice)
    language: NamedChoice = field(default_factory=NamedChoice)
    plugin: Any = None
    strict_plugins: bool = True
    resume: str | None = None


def register() -> None:
    """Make the schema known to Hydra as ``schema/eval``."""
    ConfigStore.instance().store(group="schema", name="eval", node=EvalApp, package="_global_")
