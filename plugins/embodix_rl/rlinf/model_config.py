# SPDX-License-Identifier: Apache-2.0
"""RLinf's ``actor.model`` from the policy of the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix.policies.support import require_offered
from embodix_rl.latency import BatchTime
from embodix_rl.rlinf.environment_config import is_latency

LATENCY_MODEL, FLOW_MODEL = "embodix_latency", "embodix_flow"
_LATENCY_FIELDS = ("type", "action_dim", "width", "inference_s", "training_s")


def model_node(cfg: DictConfig) -> dict[str, Any]:
    """The node, with ``wrapped_layers``: class names of the layers that FSDP shards one by one.

    Raises:
        ValueError: a latency policy with unknown fields, impossible times, or in a real environment.
    """
    policy: Any = OmegaConf.to_container(cfg.policy, resolve=True)
    if policy.get("type") == "latency":
        return {**_common(cfg), **_latency_node(cfg, policy)}
    return {**_common(cfg), **_flow_node(cfg, policy)}


def _common(cfg: DictConfig) -> dict[str, Any]:
    return {
        "model_path": "",
        "precision": "32",
        "is_lora": False,
        "lora_rank": 0,
        "policy_setup": None,
        "add_value_head": cfg.algorithm.adv_type == "gae",
        "num_action_chunks": cfg.rollout.chunk,
        "seed": cfg.rl.seed,
    }


def _flow_node(cfg: DictConfig, policy: Mapping[str, Any]) -> dict[str, Any]:
    known = "`lerobot rl` knows policies of type latency,"
    require_offered(str(policy.get("type")), "flow", known, "Choose one of these, or policy=latency.")
    if is_latency(cfg):
        raise ValueError(
            f"policy.type={policy['type']} sees images, which env=latency has none of. Choose env=metaworld, pusht or "
            "libero, or policy=latency."
        )
    if cfg.checkpoint is None:
        raise ValueError(
            f"policy.type={policy['type']} starts from what `lerobot train` has learnt; give its run, checkpoint or "
            "model folder: checkpoint=outputs/train/.../run."
        )
    config = _checkpoint_config(Path(cfg.checkpoint))
    if config["type"] != policy["type"]:
        raise ValueError(f"{cfg.checkpoint} holds a policy of type {config['type']}, not {policy['type']}.")
    if cfg.rollout.chunk > config["chunk_size"]:
        raise ValueError(
            f"rollout.chunk={cfg.rollout.chunk} action steps are more than the {config['chunk_size']} that the policy "
            f"of {cfg.checkpoint} predicts."
        )
    return {
        "model_type": FLOW_MODEL,
        "checkpoint": cfg.checkpoint,
        "changes": OmegaConf.to_container(cfg.changes, resolve=True) if cfg.changes is not None else {},
        "trainable": OmegaConf.to_container(cfg.trainable) if cfg.trainable is not None else None,
        "tokenizer": cfg.tokenizer.directory,
        "env": OmegaConf.to_container(cfg.env, resolve=True),
        "action_dim": config["output_features"]["action"]["shape"][0],
        "sampler": OmegaConf.to_container(cfg.sampler, resolve=True) if cfg.sampler is not None else {},
        "value": OmegaConf.to_container(cfg.value, resolve=True) if cfg.value is not None else {},
        # None is wrapped by itself: the packed computation calls parts of layers, whose parameters must be there.
        "wrapped_layers": [],
    }


def _checkpoint_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a run, checkpoint or model folder.

    Raises:
        ValueError: none there.
    """
    places = [folder / inner / "config.json" for inner in ("", "pretrained_model", "checkpoints/last/pretrained_model")]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(f"checkpoint={folder} holds no model: {', '.join(map(str, places))} are missing.")
    return dict(json.loads(found.read_text()))


def _latency_node(cfg: DictConfig, policy: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in policy if name not in _LATENCY_FIELDS]
    if unknown:
        raise ValueError(
            f"policy=latency has no field {', '.join(map(str, unknown))}; its fields are "
            f"{', '.join(_LATENCY_FIELDS[1:])}."
        )
    if not is_latency(cfg):
        raise ValueError(
            "policy=latency acts in env=latency only: it looks at nothing that a simulator shows. Choose both, or "
            "another policy."
        )
    times = {name: declared_times(name, policy[name]) for name in ("inference_s", "training_s")}
    return {
        "model_type": LATENCY_MODEL,
        "action_dim": policy["action_dim"],
        "width": policy["width"],
        "state_dim": cfg.env.state_dim,
        "wrapped_layers": ["Linear"],
        **times,
    }


def declared_times(name: str, points: Any) -> dict[int, float]:
    """Seconds by batch size.

    Raises:
        ValueError: no mapping of sizes to seconds, or impossible ones.
    """
    if not isinstance(points, Mapping):
        raise ValueError(f"policy.{name} gives seconds by batch size, such as {{1: 0.05, 8: 0.1}}; got {points!r}.")
    times = {int(size): float(seconds) for size, seconds in points.items()}
    BatchTime(times)
    return times
