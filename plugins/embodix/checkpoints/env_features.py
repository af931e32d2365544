# SPDX-License-Identifier: Apache-2.0
"""Whether an environment shows a policy what it was trained on, said before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.factory import make_env_pre_post_processors
from lerobot.envs.utils import env_to_policy_features

from embodix.policies.support import support_of


def env_name(env_cfg: EnvConfig) -> str:
    """What ``env.type`` calls it."""
    return str(env_cfg.get_choice_name(type(env_cfg)))


def require_fitting_features(
    policy_cfg: PreTrainedConfig, env_cfg: EnvConfig, rename_map: Mapping[str, str]
) -> list[str]:
    """Compare cameras, state and action of an environment with those of a policy.

    Args:
        rename_map: environment key -> policy key.

    Returns:
        One sentence for each camera of the policy that the environment lacks, which upstream leaves blank.

    Raises:
        ValueError: no camera in common, a camera the policy does not know while it lacks another, or another size of
            state or action; the message names them.
    """
    provided = {rename_map.get(key, key): feature for key, feature in env_to_policy_features(env_cfg).items()}
    expected = {**(policy_cfg.input_features or {}), **(policy_cfg.output_features or {})}
    blank = support_of(policy_cfg.type).blank_cameras
    composed = bool(make_env_pre_post_processors(env_cfg, policy_cfg)[0].steps)  # such as a state of several parts
    for key, feature in expected.items():
        if feature.type in (FeatureType.STATE, FeatureType.ACTION) and (key in provided or not composed):
            _require_size(key, feature, provided.get(key), env_cfg)
    return _missing_cameras(_cameras(expected, blank), _cameras(provided, blank), env_cfg)


def require_provided(env_cfg: EnvConfig, rename_map: Mapping[str, str]) -> None:
    """Refuse a rename of what an environment does not have.

    Raises:
        ValueError: names the keys that it has.
    """
    provided = list(env_to_policy_features(env_cfg))
    unknown = [key for key in rename_map if key not in provided]
    if unknown:
        raise ValueError(
            f"rename_map goes from the environment's keys to the policy's; env.type={env_name(env_cfg)} has no "
            f"{', '.join(unknown)}. It has {', '.join(provided)}."
        )


def _require_size(key: str, wanted: PolicyFeature, found: PolicyFeature | None, env_cfg: EnvConfig) -> None:
    if found is None:
        raise ValueError(
            f"The policy reads {key} of {wanted.shape[0]} values, and env.type={env_name(env_cfg)} has none."
        )
    if tuple(wanted.shape) != tuple(found.shape):
        raise ValueError(
            f"The policy was trained with {key} of {wanted.shape[0]} values, and env.type={env_name(env_cfg)} has "
            f"{found.shape[0]}. Choose the environment of the training data, or its fields (env.state=[...])."
        )


def _missing_cameras(expected: list[str], provided: list[str], env_cfg: EnvConfig) -> list[str]:
    missing = [key for key in expected if key not in provided]
    strange = [key for key in provided if key not in expected]
    if expected and (len(missing) == len(expected) or (missing and strange)):
        raise ValueError(
            f"The policy looks through {_short(expected)}, and env.type={env_name(env_cfg)} shows {_short(provided)}: "
            f"{_short(missing)} would be missing. Choose cameras of the training data (env.cameras=[...]), or name "
            f"them alike: rename_map={{{(strange or provided or ['<environment key>'])[0]}: {missing[0]}}}."
        )
    return [f"The environment has no camera {_short([key])}; the policy sees it blank." for key in missing]


def _cameras(features: Mapping[str, PolicyFeature], blank: str | None) -> list[str]:
    """Without those that the policy adds itself."""
    visual = [key for key, feature in features.items() if feature.type is FeatureType.VISUAL]
    return [key for key in visual if blank is None or blank not in key]


def _short(keys: list[str]) -> str:
    return ", ".join(key.removeprefix("observation.images.") for key in keys) or "no camera"
