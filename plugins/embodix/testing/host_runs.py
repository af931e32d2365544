# SPDX-License-Identifier: Apache-2.0
"""Small runs of upstream's training loop in this process: through embodix's front, or upstream alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodix.config.compose import compose
from embodix.costs.batch_size import settle_batch_size
from embodix.patching import patched, replace_attribute
from embodix.policies.support import sizes_patch, support_of
from embodix.training.host_config import decode_host_config
from embodix.training.host_context import command_line
from embodix.training.run import RunResult, run_training

VOCAB_SIZE = 1024


def train_here(overrides: list[str]) -> RunResult:
    """What ``lerobot train`` does with these overrides, in this process."""
    return run_training(*settle_batch_size(compose("train", overrides), overrides))


def train_upstream(overrides: list[str], needed: Collection[str] = ()) -> list[float]:
    """Upstream's own ``train(cfg)`` on the config that these overrides make, without accelerator or features.

    Only what makes the run possible on a CPU without network is there: the small sizes, the offline tokenizer and the
    patches without which the policy can't run.

    Args:
        needed: of the config's patches, those to apply.

    Returns:
        The loss of each step, as upstream's loop computed it.
    """
    from lerobot.scripts import lerobot_train

    from embodix.data.tokenizer import offline_tokenizer

    cfg = compose("train", overrides)
    host_cfg = decode_host_config(cfg)
    support_of(cfg.policy.type).prepare_assets(cfg, host_cfg)
    patches = {sizes_patch(cfg.policy.type): {"architecture": host_sizes(cfg)}}
    patches |= {name: dict(options or {}) for name, options in cfg.patches.items() if name in needed}
    patches |= support_of(cfg.policy.type).patches(cfg)
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
