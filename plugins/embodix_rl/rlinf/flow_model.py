# SPDX-License-Identifier: Apache-2.0
"""LeRobot's flow-matching policies on RLinf's contract for embodied models.

Shape suffixes: B observations, C action steps of a chunk that are executed, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lerobot.configs.types import FeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import env_to_policy_features
from lerobot.policies.factory import make_policy
from rlinf.models.embodiment.base_policy import BasePolicy
from torch import Tensor, nn

from embodix import plugins
from embodix.checkpoints.env_features import require_fitting_features
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.checkpoints.processor_files import load_processors
from embodix.training.features import UNCHANGED, packed_settings
from embodix.training.host_config import decode_env
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import FlowPolicy, ValueSettings, flow_policy, train_only
from embodix_rl.rlinf.observations import from_host
from embodix_rl.rlinf.task_config import selected_features

_until_the_process_ends = ExitStack()  # the patches under which a policy was built stay as long as it


class FlowModel(nn.Module, BasePolicy):
    """A `FlowPolicy` between LeRobot's pre- and postprocessor.

    Args:
        flow: the policy with log-probabilities.
        preprocessor: LeRobot's, from an observation with ``task`` to the policy's batch.
        postprocessor: LeRobot's, from a normalised action [B, A] to one of the environment.
        cameras: the environment's image keys, in the order in which they travel.
        chunk: action steps that are executed.
    """

    forward = BasePolicy.forward  # nn.Module has a stub; the bases in the other order can't be wrapped by FSDP

    def __init__(
        self,
        flow: FlowPolicy,
        preprocessor: Callable[[Any], Any],
        postprocessor: Callable[[Tensor], Tensor],
        cameras: list[str],
        chunk: int,
    ) -> None:
        super().__init__()
        self.flow = flow
        self._preprocessor, self._postprocessor = preprocessor, postprocessor
        self._cameras, self._chunk = cameras, chunk

    @property
    def value_head(self) -> nn.Module:
        """RLinf looks for it where values of last observations are needed.

        Raises:
            AttributeError: there is none, which RLinf asks with `hasattr`.
        """
        if self.flow.value_head is None:
            raise AttributeError("This policy has no value head.")
        return self.flow.value_head

    def weights_changed(self) -> None:
        """They were written to in place: what is quantized of them is old."""
        self.flow.weights_changed()

    def predict_action_batch(
        self, env_obs: Mapping[str, Any], mode: Literal["train", "eval"] = "train", **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions of the environment [B, C, A] with log-probabilities [B, C, A] and values [B, 1]."""
        batch = self._preprocessor(from_host(env_obs, self._cameras))
        rollout = self.flow.sample(batch, mode=mode)
        actions_BCA = rollout.actions[:, : self._chunk]
        executed = [self._postprocessor(actions_BCA[:, step]) for step in range(self._chunk)]
        log_probs = rollout.log_probs if rollout.log_probs is not None else torch.zeros_like(actions_BCA)
        values = rollout.values[:, None] if rollout.values is not None else None
        result = {
            "prev_logprobs": log_probs.float().cpu(),
            "prev_values": None if values is None else values.float().cpu(),
            "forward_inputs": {name: value.cpu() for name, value in rollout.forward_inputs.items()},
        }
        return torch.stack(executed, dim=1).cpu(), result

    def default_forward(
        self, forward_inputs: Mapping[str, Tensor], compute_values: bool = True, **_: Any
    ) -> dict[str, Tensor | None]:
        """Log-probabilities [B, C, A], entropy [B, 1] and values [B, 1] of earlier actions, differentiable."""
        evaluation = self.flow.evaluate(forward_inputs)
        values = evaluation.values[:, None] if compute_values and evaluation.values is not None else None
        return {"logprobs": evaluation.log_probs, "entropy": evaluation.entropy[:, None], "values": values}


def build_flow_model(cfg: Any) -> FlowModel:
    """The model of RLinf's ``actor.model`` from a checkpoint of `lerobot train`.

    Raises:
        ValueError: no checkpoint, an environment that does not fit it, or settings that don't.
    """
    from omegaconf import OmegaConf

    node: Any = OmegaConf.to_container(cfg, resolve=True)
    source = find_model(node["checkpoint"])
    source.require_policy("rl")
    run = source.compose_run(source.policy_type(), [])
    source = source.member(run)
    _until_the_process_ends.enter_context(prepared_host(source, run, node["tokenizer"]))
    changes = {**node["changes"], "device": _device(), "n_action_steps": node["num_action_chunks"]}
    config = policy_config(source, changes)
    pre, post = load_processors(config, source.model, {"device_processor": {"device": _device()}})
    env_cfg = decode_env(node["env"])
    renames = renamed_keys(pre)
    require_fitting_features(config, env_cfg, renames)
    policy = make_policy(cfg=config, env_cfg=env_cfg, rename_map=renames)
    if node["trainable"] is not None:
        train_only(policy, node["trainable"])
    features = selected_features(node["features"])
    settings = packed_settings(policy, features, _device())
    value = ValueSettings(**node["value"]) if node["add_value_head"] else None
    quantizer = None
    if features.quantization.name != UNCHANGED:
        quantizer = plugins.build("quantizers", features.quantization.name, features.quantization.options)
    flow = flow_policy(policy, settings, ChainSettings(**node["sampler"]), value, quantizer)
    return FlowModel(flow, pre, post, camera_keys(env_cfg), node["num_action_chunks"])


def camera_keys(env_cfg: EnvConfig) -> list[str]:
    """The image keys of an environment, in the order in which its observations have them."""
    return [key for key, feature in env_to_policy_features(env_cfg).items() if feature.type is FeatureType.VISUAL]


def renamed_keys(preprocessor: Any) -> dict[str, str]:
    """What a preprocessor renames: the environment's key -> the policy's."""
    renamed: dict[str, str] = {}
    for step in preprocessor.steps:
        renamed |= getattr(step, "rename_map", {})
    return renamed


def _device() -> str:
    from rlinf.scheduler import Worker

    return str(Worker.torch_device_type)
