# SPDX-License-Identifier: Apache-2.0
"""Let RLinf's environment workers run embodix's environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="rlinf_environment_registry",
    target="rlinf.workers.env.env_worker.get_env_cls",
    requires={"rlinf": ">=0.3.0,<0.3.1"},
    symptom="RLinf's environments are a closed list (SupportedEnvType), which no plugin can add to.",
    upstream="none known; models have register_model, environments have nothing like it",
    why_safe="only configs with a field `embodix` are answered differently; their env_type is `realworld`, for which "
    "RLinf hands actions over as they are",
    remove_when="RLinf lets a plugin register an environment",
)


def apply() -> Callable[[], None]:
    """Patch the name in the environment worker's module; returns the undo."""
    from rlinf.workers.env import env_worker

    upstream = env_worker.get_env_cls

    def get_env_cls(env_type: str, env_cfg: Any = None) -> Any:
        if env_cfg is None or env_cfg.get("embodix") is None:
            return upstream(env_type, env_cfg)
        from embodix_rl.rlinf.task_config import environment_class

        return environment_class(env_cfg)

    return replace_attribute(env_worker, "get_env_cls", get_env_cls)
