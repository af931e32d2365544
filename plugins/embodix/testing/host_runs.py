# SPDX-License-Identifier: Apache-2.0
"""Small runs of upstream's training loop in this process: through embodix's front, or upstream alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodix.patching import patched, replace_attribute, sizes_patch
from embodix.schema.compose import compose
from embodix.testing.groot import SMALL_ARCHITECTURE as SMALL_GROOT
from embodix.testing.pi05 import SMALL_ARCHITECTURE
from embodix.training.host_assets import prepare_host_assets
from embodix.training.host_config import decode_host_config
from embodix.training.host_context import command_line
from embodix.training.run import RunResult, run_training

VOCAB_SIZE = 1024


def small_run(dataset_root: Path, *overrides: str) -> list[str]:
    """Hydra overrides of a run that takes seconds on a CPU: 28-pixel images, batches of 3, 3 steps."""
    architecture = {part: dict(sizes) for part, sizes in SMALL_ARCHITECTURE.items()}
    architecture["language"]["vocab_size"] = VOCAB_SIZE
    sizes = json.dumps(architecture).replace('"', "")
    return [
        "policy=pi05_small",
        f"architecture={sizes}",
        f"dataset.root={dataset_root}",
        "policy.image_resolution=[28,28]",
        "policy.chunk_size=6",
        "policy.n_action_steps=3",
        "policy.tokenizer_max_length=64",
        "train.batch_size=3",
        "train.num_workers=0",
        "train.steps=3",
        "train.eval_freq=0",
        *overrides,
    ]


def small_groot_run(dataset_root: Path, *overrides: str) -> list[str]:
    """The same for GR00T-N1.5."""
    architecture = {**SMALL_GROOT, "language": {**SMALL_GROOT["language"], "vocab_size": VOCAB_SIZE}}
    sizes = json.dumps(architecture).replace('"', "")
    return [
        "policy=groot_n15_small",
        f"architecture={sizes}",
        f"dataset.root={dataset_root}",
        "policy.image_size=[28,28]",
        "policy.chunk_size=6",
        "policy.n_action_steps=3",
        "train.batch_size=3",
        "train.num_workers=0",
        "train.steps=3",
        "train.eval_freq=0",
        *overrides,
    ]


def train_here(overrides: list[str]) -> RunResult:
    """What ``lerobot train`` does with these overrides, in this process."""
    return run_training(compose("train", overrides), overrides)


def train_upstream(overrides: list[str]) -> list[float]:
    """Upstream's own ``train(cfg)`` on the config that these overrides make, without accelerator or features.

    Only what makes the run possible on a CPU without network is there: the small sizes and the offline tokenizer, and
    for GR00T-N1.5 the repairs without which it can't run.

    Returns:
        The loss of each step, as upstream's loop computed it.
    """
    from lerobot.scripts import lerobot_train

    from embodix.data.tokenizer import offline_tokenizer

    cfg = compose("train", overrides)
    host_cfg = decode_host_config(cfg)
    prepare_host_assets(cfg, host_cfg)
    patches = {sizes_patch(cfg.policy.type): {"architecture": host_sizes(cfg)}}
    if cfg.policy.type == "groot":
        patches |= {"lerobot_groot_runs": {}, "lerobot_groot_samples": {"language": cfg.language.name}}
    with (
        patched(patches),
        offline_tokenizer(Path(cfg.tokenizer.directory)),
        command_line(["lerobot-train"]),
        recorded_losses() as losses,
    ):
        lerobot_train.train(host_cfg)
    return losses


def host_sizes(cfg: Any) -> dict[str, Any]:
    """The ``architecture`` node as the size patch takes it."""
    from omegaconf import OmegaConf

    sizes: Any = OmegaConf.to_container(cfg.architecture, resolve=True)
    return dict(sizes)


@contextmanager
def recorded_losses() -> Iterator[list[float]]:
    """Keep the loss that each call of upstream's ``update_policy`` reports."""
    from lerobot.scripts import lerobot_train

    losses: list[float] = []
    update_policy = lerobot_train.update_policy

    def recording(train_metrics: Any, *args: Any, **kwargs: Any) -> Any:
        result = update_policy(train_metrics, *args, **kwargs)
        losses.append(train_metrics.loss.val)
        return result

    undo = replace_attribute(lerobot_train, "update_policy", recording)
    try:
        yield losses
    finally:
        undo()
