# SPDX-License-Identifier: Apache-2.0
"""What RLinf's environment processes are told of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix_rl.latency import Durations

LATENCY = "latency"
_FAULT_FIELDS = ("crash_every_steps", "hang_every_steps")
_LATENCY_FIELDS = ("type", "state_dim", "step_s", "step_s_per_env", "reset_s", "episode_length", *_FAULT_FIELDS)
REWARD_SOURCES = ("success", "simulator", "progress")


def environment_node(cfg: DictConfig) -> dict[str, Any]:
    """``train``, the node ``embodix`` of RLinf's ``env.train``, and ``episode_steps``.

    Raises:
        ValueError: a latency environment with unknown fields or impossible times, or an unknown source of reward.
    """
    env: Any = OmegaConf.to_container(cfg.env, resolve=True) if cfg.env is not None else None
    if not isinstance(env, Mapping):
        raise ValueError("`lerobot rl` needs an environment: env=latency, metaworld, pusht or libero.")
    if env.get("type") == LATENCY:
        return _latency_node(env, cfg.rl.seed)
    if cfg.reward.source not in REWARD_SOURCES:
        raise ValueError(f"reward.source is one of {', '.join(REWARD_SOURCES)}; got {cfg.reward.source!r}.")
    reward: Any = OmegaConf.to_container(cfg.reward)
    node = {"environment": "simulators", "env": dict(env), "reward": reward, "seed": cfg.rl.seed}
    return {
        "train": node,
        "episode_steps": cfg.rollout.max_episode_steps or env.get("episode_length") or cfg.rollout.steps,
    }


def is_latency(cfg: DictConfig) -> bool:
    """Whether nothing is simulated."""
    return cfg.env is not None and cfg.env.get("type") == LATENCY


def _latency_node(env: Mapping[str, Any], seed: int) -> dict[str, Any]:
    unknown = [name for name in env if name not in _LATENCY_FIELDS]
    if unknown:
        raise ValueError(
            f"env=latency has no field {', '.join(map(str, unknown))}; its fields are {', '.join(_LATENCY_FIELDS[1:])}."
        )
    for name in ("step_s", "reset_s"):
        Durations.of(env[name])
    if env["step_s_per_env"] < 0:
        raise ValueError(f"env.step_s_per_env is a number of seconds from 0 on; got {env['step_s_per_env']}.")
    faults = {name: env.get(name) for name in _FAULT_FIELDS}
    for name, steps in faults.items():
        if steps is not None and steps < 1:
            raise ValueError(f"env.{name} counts chunk steps, from 1 on, or is null; got {steps}.")
    declared = {name: env[name] for name in ("state_dim", "step_s", "step_s_per_env", "reset_s")}
    return {
        "train": {"environment": LATENCY, "seed": seed, **declared, **faults},
        "episode_steps": env["episode_length"],
    }
