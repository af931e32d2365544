# SPDX-License-Identifier: Apache-2.0
"""RLinf's config from embodix's. RLinf ships none in its wheel; names and nodes are those of its examples at v0.3
(examples/embodiment/config)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix_rl.rlinf.run_sizes import Placement
from embodix_rl.rlinf.task_config import environment_node, model_node

# RLinf knows a closed list of environments; it hands actions to this one as they are.
PASS_THROUGH_ENV = "realworld"
ACTOR_GROUP, ROLLOUT_GROUP, ENV_GROUP = "ActorGroup", "RolloutGroup", "EnvGroup"
TIMELINE_FOLDER = "timeline"
LR_SCHEDULES = ("constant", "cosine")
CHECKPOINT_PREFIX = "global_step_"


def host_config(cfg: DictConfig, placement: Placement, runner: Mapping[str, Any], folder: Path) -> DictConfig:
    """RLinf's config of a run.

    Args:
        cfg: of ``hydra_conf/rl.yaml``.
        placement: of its processes.
        runner: what the runner changes in RLinf's config.
        folder: of the run; checkpoints land in its ``checkpoints``.

    Raises:
        ValueError: an environment or policy that can't run so.
    """
    environment, model = environment_node(cfg), model_node(cfg)
    composed = OmegaConf.create(
        {
            "cluster": {"num_nodes": 1, "component_placement": dict(placement.component_placement)},
            "runner": _runner_node(cfg, folder),
            "algorithm": _algorithm_node(cfg),
            "env": _env_node(cfg, environment),
            "rollout": _rollout_node(cfg, model),
            "actor": _actor_node(cfg, model),
            "weight_syncer": _weight_syncer_node(cfg),
            "reward": {"use_reward_model": False},
            "critic": {"use_critic_model": False},
            "embodix": {"timeline": str(folder / TIMELINE_FOLDER)},
        }
    )
    merged = OmegaConf.merge(composed, OmegaConf.create(dict(runner)), cfg.host)
    assert isinstance(merged, DictConfig)
    return merged


def _runner_node(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    return {
        "task_type": "embodied",
        # RLinf saves below log_path/experiment_name; the metrics are written by embodix.
        "logger": {"log_path": str(folder), "project_name": "embodix", "experiment_name": "", "logger_backends": []},
        "max_epochs": cfg.rl.steps,
        "max_steps": cfg.rl.steps,
        "only_eval": False,
        "val_check_interval": cfg.rl.eval_every or -1,
        "save_interval": cfg.rl.save_every or -1,  # RLinf saves after the last step too where it saves at all
        "weight_sync_interval": 1,
        "resume_dir": None if cfg.resume is None else str(last_checkpoint(Path(cfg.resume))),
        "ckpt_path": None,
    }


def _algorithm_node(cfg: DictConfig) -> dict[str, Any]:
    node: Any = OmegaConf.to_container(cfg.algorithm, resolve=True)
    return {**node, "group_size": cfg.rollout.group_size}


def _env_node(cfg: DictConfig, node: Mapping[str, Any]) -> dict[str, Any]:
    rollout, evaluation = cfg.rollout, cfg.evaluation
    episode = rollout.max_episode_steps or node["episode_steps"]
    common = {
        "env_type": PASS_THROUGH_ENV,
        "max_episode_steps": episode,
        "video_cfg": {"save_video": False},
        "seed": cfg.rl.seed,
    }
    train = {
        **common,
        "rollout_epoch": rollout.epochs,
        "total_num_envs": rollout.num_envs,
        "max_steps_per_rollout_epoch": rollout.steps,
        "auto_reset": rollout.auto_reset,
        "ignore_terminations": rollout.ignore_terminations,
        "group_size": rollout.group_size,
        "use_fixed_reset_state_ids": rollout.fixed_seeds,
        "is_eval": False,
        "embodix": node["train"],
    }
    evaluated = {
        **common,
        "rollout_epoch": evaluation.epochs,
        "total_num_envs": evaluation.num_envs,
        "max_steps_per_rollout_epoch": evaluation.steps,
        "auto_reset": True,
        "ignore_terminations": False,
        "group_size": 1,
        "use_fixed_reset_state_ids": True,
        "is_eval": True,
        "embodix": {**node["train"], "seed": evaluation.first_seed},
    }
    return {"group_name": ENV_GROUP, "train": train, "eval": evaluated}


def _rollout_node(cfg: DictConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "group_name": ROLLOUT_GROUP,
        "backend": "huggingface",
        "pipeline_stage_num": cfg.rollout.stages,
        "enable_offload": False,
        "enable_torch_compile": False,
        "enable_cuda_graph": False,
        "model": {"model_path": model["model_path"], "precision": model["precision"]},
    }


def _actor_node(cfg: DictConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    optim = cfg.optim
    return {
        "group_name": ACTOR_GROUP,
        "training_backend": "fsdp",
        "micro_batch_size": optim.micro_batch,
        "global_batch_size": optim.global_batch,
        "seed": cfg.rl.seed,
        "enable_offload": False,
        "model": dict(model),
        "optim": {
            "lr": optim.lr,
            "value_lr": optim.value_lr,
            "adam_beta1": optim.adam_beta1,
            "adam_beta2": optim.adam_beta2,
            "adam_eps": optim.adam_eps,
            "weight_decay": optim.weight_decay,
            "clip_grad": optim.clip_grad,
            "lr_scheduler": lr_schedule(optim.lr_schedule),
            "total_training_steps": cfg.rl.steps,  # RLinf counts training steps here, not those of the optimizer
            "lr_warmup_steps": optim.lr_warmup_steps,
            "critic_warmup_steps": optim.critic_warmup_steps,
        },
        "fsdp_config": fsdp_node(model["wrapped_layers"]),
    }


def lr_schedule(name: str) -> str:
    """RLinf's name of a schedule of learning rates.

    Raises:
        ValueError: another name.
    """
    if name not in LR_SCHEDULES:
        raise ValueError(f"optim.lr_schedule is one of {', '.join(LR_SCHEDULES)}; got {name!r}.")
    return name


def last_checkpoint(folder: Path) -> Path:
    """The latest ``global_step_<n>`` of a run folder, or the folder itself if it is one.

    Raises:
        ValueError: no checkpoint there.
    """
    if folder.name.startswith(CHECKPOINT_PREFIX) and (folder / "actor").is_dir():
        return folder
    saved = [path for path in folder.glob(f"checkpoints/{CHECKPOINT_PREFIX}*") if (path / "actor").is_dir()]
    if not saved:
        raise ValueError(
            f"resume={folder} holds no checkpoint ({folder}/checkpoints/{CHECKPOINT_PREFIX}<n>/actor); `lerobot rl` "
            "writes them with rl.save_every=<steps>."
        )
    return max(saved, key=lambda path: int(path.name.removeprefix(CHECKPOINT_PREFIX)))


def fsdp_node(wrapped_layers: list[str]) -> dict[str, Any]:
    """FSDP2, which runs on CPU and GPU; FSDP1 needs an accelerator.

    Args:
        wrapped_layers: class names of the layers that are sharded one by one.
    """
    return {
        "strategy": "fsdp2",
        "sharding_strategy": "no_shard",
        "gradient_checkpointing": False,
        "cpu_offload": False,
        "offload_pin_memory": False,
        "reshard_after_forward": True,
        "enable_gradient_accumulation": True,
        "forward_prefetch": False,
        "limit_all_gathers": False,
        "backward_prefetch": None,
        "use_orig_params": False,
        "use_liger_kernel": False,
        "wrap_policy": {"transformer_layer_cls_to_wrap": wrapped_layers},
        "mixed_precision": {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None},
        "amp_autocast": {"enabled": False, "precision": "bf16"},
        "grad_scaler": {"enabled": False},
    }


def _weight_syncer_node(cfg: DictConfig) -> dict[str, Any]:
    on_cpu = cfg.placement.accelerators == 0
    return {
        "type": "bucket",
        "bucket": {
            "bucket_size": 512 * 1024**2,
            "bucket_dtype": None,
            "bucket_device": "cpu" if on_cpu else "cuda",
            "is_agent": False,
            "load_instant": True,
        },
    }
