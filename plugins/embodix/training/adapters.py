# SPDX-License-Identifier: Apache-2.0
"""Adapters in the place of a policy's weights (group ``peft``): what upstream's own support of PEFT is given.

Upstream freezes the policy and wraps it before it hands it to the accelerator; targets that fit the policy, a scale
and a base that is found from anywhere are added here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig

from embodix.policies.adapters import bare_policy, holds_adapters, merge_command
from embodix.policies.quantizers import quantizer_of
from embodix.policies.support import support_of

RESUME_PATCH, ALPHA_PATCH = "lerobot_peft_resume", "lerobot_peft_alpha"
ALPHA = "lora_alpha"


def upstream_peft(node: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fields of the group that upstream's ``PeftConfig`` has."""
    return None if node is None else {name: value for name, value in node.items() if name != ALPHA}


def adapter_patches(node: Mapping[str, Any] | None, resume_config: Path | None = None) -> dict[str, dict[str, Any]]:
    """Patches of a run that trains adapters, with their options; none for another.

    Args:
        node: the group ``peft`` of the composed config.
        resume_config: ``train_config.json`` of the checkpoint that is resumed, which plain upstream may have written.
    """
    resumed = None if resume_config is None else json.loads(resume_config.read_text()).get("peft")
    if node is None and resumed is None:
        return {}
    patches: dict[str, dict[str, Any]] = {RESUME_PATCH: {}}
    alpha = (node or {}).get(ALPHA)
    if alpha is not None:
        patches[ALPHA_PATCH] = {ALPHA: int(alpha)}
    return patches


def settle_adapters(host_cfg: TrainPipelineConfig, node: Mapping[str, Any] | None) -> None:
    """Fill in what upstream's config needs to train adapters of this policy.

    Args:
        host_cfg: of a run that is resumed it names the checkpoint whose adapters go on, wherever the base is.
        node: the group ``peft`` of the composed config.

    Raises:
        ValueError: no weights to start from, weights that adapters can't be put beside, a method that PEFT does not
            have, a scale of another method than LoRA, or a peft that can't run here.
    """
    assert host_cfg.policy is not None
    base = host_cfg.policy.pretrained_path
    if not host_cfg.resume and base is not None and holds_adapters(Path(base)):
        raise ValueError(
            f"policy.pretrained_path={base} holds adapters, not a policy. Go on with its run by resume={base}, or "
            f"merge them and start from the result: {merge_command(base)}."
        )
    if host_cfg.peft is None:
        return
    _require_method(host_cfg.peft.method_type, (node or {}).get(ALPHA))
    host_cfg.policy.pretrained_path = _found_from_anywhere(base)
    if host_cfg.peft.target_modules is None:
        host_cfg.peft.target_modules = support_of(host_cfg.policy.type).peft_targets


def _require_method(method: str, alpha: Any) -> None:
    problem = peft_problem()
    if problem is not None:
        raise ValueError(problem)
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    known = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
    if method.upper() not in known:
        raise ValueError(f"peft.method_type must be one of {', '.join(known)}; got {method!r}.")
    if alpha is not None and method.upper() != "LORA":
        raise ValueError(f"peft.{ALPHA} scales the adapters of LORA; got method_type={method}. Set peft.{ALPHA}=null.")


def _found_from_anywhere(base: Path | str | None) -> Path | str:
    """The weights that adapters stand beside, as every later command finds them: their folder is kept by its path."""
    if base is None:
        raise ValueError(
            "Adapters are trained beside the weights of a trained policy; got policy.pretrained_path=null. Set it to a "
            "checkpoint's pretrained_model or a model on the hub, or train every weight: peft=none."
        )
    folder = Path(base)
    if quantizer_of(folder) is not None:
        raise ValueError(
            f"Adapters are trained beside unquantized weights, so that plain LeRobot loads them; {base} is quantized. "
            "Start from the checkpoint that it was made from, and quantize the merged policy."
        )
    return folder.resolve() if folder.is_dir() else base


def put_adapters_on(policy: Any, node: Mapping[str, Any]) -> Any:
    """Adapters as the group ``peft`` asks for in a policy that was built without weights; only they are trained.

    Raises:
        ValueError: see ``settle_adapters``, or a policy for which neither its record nor upstream knows targets.
    """
    _require_method(str(node.get("method_type", "LORA")), node.get(ALPHA))
    targets = node.get("target_modules") or support_of(policy.config.type).peft_targets
    if policy.config.pretrained_path is None:
        policy.config.pretrained_path = "the weights of a run"  # without which upstream refuses adapters
    return bare_policy(policy.wrap_with_peft(peft_cli_overrides={**node, "target_modules": targets}))


def knows_targets(policy: Any) -> bool:
    """Whether adapters can be put on a policy without naming its modules."""
    from lerobot.policies.pretrained import PreTrainedPolicy

    own = type(policy)._get_default_peft_targets is not PreTrainedPolicy._get_default_peft_targets
    return own or support_of(policy.config.type).peft_targets is not None


def peft_problem() -> str | None:
    """Why the installed peft can't wrap a policy, and what to do; None where it can."""
    try:
        from peft.import_utils import is_torchao_available

        is_torchao_available()  # what peft asks for each layer that it wraps
    except ImportError as error:
        return (
            f"Training adapters needs a peft that runs beside what is installed: {error}. pip install 'embodix[lora]'."
        )
    return None
