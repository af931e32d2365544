# SPDX-License-Identifier: Apache-2.0
"""What RLinf's processes are told of the policy, its features and the environment: ``actor.model`` and ``env``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from embodix.arguments import typed_arguments
from embodix.policies.support import require_offered
from embodix_rl.latency import BatchTime, Durations

if TYPE_CHECKING:
    from embodix.training.features import FeatureSelection

LATENCY = "latency"
_FAULT_FIELDS = ("crash_every_steps", "hang_every_steps")
_ENV_FIELDS = ("type", "state_dim", "step_s", "step_s_per_env", "reset_s", "episode_length", *_FAULT_FIELDS)
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
        return _latency_env_node(env, cfg.rl.seed)
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


def _latency_env_node(env: Mapping[str, Any], seed: int) -> dict[str, Any]:
    unknown = [name for name in env if name not in _ENV_FIELDS]
    if unknown:
        raise ValueError(
            f"env=latency has no field {', '.join(map(str, unknown))}; its fields are {', '.join(_ENV_FIELDS[1:])}."
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


LATENCY_MODEL, FLOW_MODEL = "embodix_latency", "embodix_flow"
# As in hydra_conf/rl.yaml.
FEATURE_DEFAULTS = {
    "packing": "padding_free",
    "attention": "auto",
    "vision_tokens": "valid",
    "quantization": "none",
    "precision": "none",
}
_POLICY_FIELDS = ("type", "action_dim", "width", "inference_s", "training_s")


def model_node(cfg: DictConfig) -> dict[str, Any]:
    """The node, with ``wrapped_layers``: class names of the layers that FSDP shards one by one.

    Raises:
        ValueError: a latency policy with unknown fields, impossible times, or in a real environment.
    """
    policy: Any = OmegaConf.to_container(cfg.policy, resolve=True)
    if policy.get("type") == "latency":
        return {**_common(cfg), **_latency_policy_node(cfg, policy)}
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
    env: Any = OmegaConf.to_container(cfg.env, resolve=True)
    _require_environment(env)
    return {
        "model_type": FLOW_MODEL,
        "checkpoint": cfg.checkpoint,
        "changes": OmegaConf.to_container(cfg.changes, resolve=True) if cfg.changes is not None else {},
        "trainable": OmegaConf.to_container(cfg.trainable) if cfg.trainable is not None else None,
        "features": feature_node(cfg),
        "tokenizer": cfg.tokenizer.directory,
        "env": env,
        "action_dim": config["output_features"]["action"]["shape"][0],
        **flow_settings(cfg),
        # None is wrapped by itself: the packed computation calls parts of layers, whose parameters must be there.
        "wrapped_layers": [],
    }


def flow_settings(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The nodes ``sampler`` and ``value``, of which the workers make their settings.

    Raises:
        ValueError: a field that the settings do not have, or a value that they refuse.
    """
    from embodix_rl.flow.chain import ChainSettings
    from embodix_rl.flow.flow_policy import ValueSettings

    nodes: dict[str, dict[str, Any]] = {}
    for name, settings in (("sampler", ChainSettings), ("value", ValueSettings)):
        written: Any = OmegaConf.to_container(cfg[name], resolve=True) if cfg[name] is not None else {}
        nodes[name] = typed_arguments(settings, written, name)
        settings(**nodes[name])
    return nodes


def feature_node(cfg: DictConfig) -> dict[str, Any]:
    """The features that a policy of a checkpoint computes with, for `selected_features`.

    Raises:
        embodix.plugins.PluginError: an unknown packer, attention backend, quantizer or precision.
        ValueError: an unknown ``vision_tokens``, or what RLinf leaves no place for.
    """
    from embodix import plugins
    from embodix.contracts import BatchComposer, ShapePadder
    from embodix.training.features import UNCHANGED, require_known

    node = {group: OmegaConf.to_container(cfg[group], resolve=True) for group in FEATURE_DEFAULTS}
    selection = selected_features(node)
    require_known(selection)
    if selection.precision.name != UNCHANGED:
        raise ValueError(
            f"precision={selection.precision.name} exchanges layers at their first batch; RLinf's training worker has "
            "sharded their parameters by FSDP before, and would go on with those of layers that are gone. Set "
            "precision=none; quantization= rounds the weights of rollout."
        )
    packer = plugins.build("packers", selection.packing.name, selection.packing.options)
    if isinstance(packer, (BatchComposer, ShapePadder)):
        raise ValueError(
            f"packing={selection.packing.name} composes the batches of a data set; those of `lerobot rl` are what "
            "environments and optim.micro_batch make them. Set packing=padding_free or none."
        )
    if selection.quantization.name != UNCHANGED:
        plugins.build("quantizers", selection.quantization.name, selection.quantization.options)
    return node


def selected_features(node: Mapping[str, Any]) -> FeatureSelection:
    """The selection of a `feature_node`. Flows draw noise of their own and have no loss, so the rest is upstream's."""
    from embodix.training.features import FeatureSelection, named_choice

    choices = {group: named_choice(OmegaConf.create(node[group])) for group in FEATURE_DEFAULTS}
    return FeatureSelection(
        packing=choices["packing"],
        attention=choices["attention"],
        vision_tokens=choices["vision_tokens"].name,
        action_pad="host",
        quantization=choices["quantization"],
        precision=choices["precision"],
    )


def _require_default_features(cfg: DictConfig) -> None:
    """A latency policy computes nothing that a feature could change."""
    chosen = [f"{group}={cfg[group].name}" for group, name in FEATURE_DEFAULTS.items() if cfg[group].name != name]
    if chosen:
        raise ValueError(f"policy=latency has no features; leave out {', '.join(chosen)}, or take another policy.")


def _checkpoint_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a run, checkpoint or model folder.

    Raises:
        ValueError: none there, or a damaged one.
    """
    places = [folder / inner / "config.json" for inner in ("", "pretrained_model", "checkpoints/last/pretrained_model")]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(f"checkpoint={folder} holds no model: {', '.join(map(str, places))} are missing.")
    from embodix.checkpoints.model_folder import read_json
    from embodix.checkpoints.processor_files import require_whole_processors

    require_whole_processors(found.parent)
    return dict(read_json(found))


def _require_environment(env: Mapping[str, Any]) -> None:
    """Find a wrong field or task here rather than in every worker.

    Raises:
        ValueError: as the environment says it.
    """
    from embodix.simulation.simulators import simulators_of
    from embodix.training.host_config import decode_env

    assert simulators_of(decode_env(env)).tasks


def _latency_policy_node(cfg: DictConfig, policy: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in policy if name not in _POLICY_FIELDS]
    if unknown:
        raise ValueError(
            f"policy=latency has no field {', '.join(map(str, unknown))}; its fields are "
            f"{', '.join(_POLICY_FIELDS[1:])}."
        )
    if not is_latency(cfg):
        raise ValueError(
            "policy=latency acts in env=latency only: it looks at nothing that a simulator shows. Choose both, or "
            "another policy."
        )
    _require_default_features(cfg)
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
    return dict(BatchTime.of(points).points)


ENVIRONMENTS = {
    "latency": "embodix_rl.rlinf.latency_env:LatencyEnv",
    "simulators": "embodix_rl.rlinf.simulator_env:SimulatorEnv",
}


def environment_class(env_cfg: Any) -> Any:
    """The class for a config whose node ``embodix`` names it.

    Raises:
        ValueError: an unknown name.
    """
    name = str(env_cfg.embodix.environment)
    if name not in ENVIRONMENTS:
        raise ValueError(f"No environment is called {name!r}; known: {', '.join(ENVIRONMENTS)}.")
    module, _, attribute = ENVIRONMENTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
