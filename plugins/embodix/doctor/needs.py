# SPDX-License-Identifier: Apache-2.0
"""The whole examination: what is here, what a composed config needs of it, and which of that is missing or broken.

Each check reads one part of the config and yields one sentence a fault: the rule, what was got, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix.contracts import TellsProblems
from embodix.doctor.findings import (
    AttentionTarget,
    Diagnosis,
    MachineFinding,
    VersionFinding,
    default_target,
    find_environments,
    find_implementations,
    find_patches,
    find_plugins,
    find_versions,
    implementation_problem,
    inspect_machine,
)
from embodix.patching import PatchError, patch_module
from embodix.plugins import PluginError, PluginRegistry
from embodix.policies.support import support_of, with_guards
from embodix.simulation.simulators import STANDS_IN

# The choices that leave upstream's own computation in place, so that no policy wrapper is needed.
UPSTREAM_CHOICES = {"packing": "none", "attention": "upstream", "vision_tokens": "upstream", "action_pad": "host"}


def diagnose(registry: PluginRegistry, config: DictConfig | None = None) -> Diagnosis:
    """Examine this installation; with a config, also list in ``needs`` what that config lacks.

    Attention backends are tried on the config's device, dtype and head size; without a config, for this
    machine's default device.
    """
    target = default_target() if config is None else attention_target(config)
    diagnosis = Diagnosis(
        plugins=find_plugins(registry),
        implementations=find_implementations(registry, target),
        patches=find_patches(),
        versions=find_versions(),
        machine=inspect_machine(),
        environments=find_environments(registry),
    )
    if config is not None:
        diagnosis.needs = unmet_needs(config, registry, diagnosis)
    return diagnosis


def unmet_needs(config: DictConfig, registry: PluginRegistry, diagnosis: Diagnosis) -> list[str]:
    """Every fault of this installation that stops a run of ``config``."""
    faults = [*_versions(diagnosis.versions), *_plugins(config, registry), *_patches(config)]
    faults += [*_implementations(config, registry), *_precision(config, registry), *_quantization(config, registry)]
    faults += [*_environment(config, registry), *_adapters(config)]
    if diagnosis.machine is not None:
        faults += _machine(config, diagnosis.machine)
    return faults


def missing_places(config: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Folders that the overrides name and that are not there; one that a config names itself may be made later."""
    named = {word.lstrip("+").partition("=")[0] for word in overrides}
    root, tokenizer = _select(config, "dataset.root"), _select(config, "tokenizer.directory")
    if "dataset.root" in named and root and not (Path(root) / "meta" / "info.json").is_file():
        yield f"No LeRobotDataset at dataset.root={root} (meta/info.json is missing). Record one with `lerobot data`."
    if named & {"dataset.root", "tokenizer.directory"} and tokenizer and not Path(tokenizer).is_dir():
        yield f"tokenizer.directory={tokenizer} is not there. `lerobot data` builds one in <data set>/tokenizer."


def attention_target(config: DictConfig) -> AttentionTarget:
    """Device, dtype and head size that the config's policy runs attention with."""
    policy_type = str(_select(config, "policy.type"))
    head_dim = OmegaConf.select(config, "architecture.language.head_dim") or support_of(policy_type).real_head_dim
    own = support_of(policy_type).own_autocast(config.policy) if _select(config, "policy.type") else None
    dtype = own or str(_select(config, "policy.dtype") or "float32")
    return AttentionTarget(_device(config), dtype, int(head_dim or AttentionTarget.head_dim))


def _versions(versions: list[VersionFinding]) -> Iterator[str]:
    for version in versions:
        if version.problem and (version.required or version.found):
            yield f"{version.distribution} is out of range: {version.problem}."


def _plugins(config: DictConfig, registry: PluginRegistry) -> Iterator[str]:
    if _select(config, "strict_plugins") is False:
        return
    for record in registry.broken():
        last_line = (record.error or "").strip().splitlines()[-1]
        yield (
            f"plugin {record.name!r} of {record.distribution} failed to load: {last_line}. "
            "Repair or uninstall it, or run with strict_plugins=false."
        )


def _patches(config: DictConfig) -> Iterator[str]:
    policy_type = str(_select(config, "policy.type"))
    names = list(with_guards(_select(config, "patches") or {}, policy_type))
    sizes = support_of(policy_type).sizes_patch
    if _select(config, "architecture") and sizes is not None and sizes not in names:
        names.append(sizes)
    for name in names:
        try:
            problem = patch_module(name).PATCH.version_problem()
        except PatchError as error:
            problem = str(error)
        except ImportError as error:
            problem = f"cannot import: {error}"
        if problem:
            yield f"patch {name!r} does not fit: {problem}"


def _implementations(config: DictConfig, registry: PluginRegistry) -> Iterator[str]:
    target = attention_target(config)
    for kind, name in _named_implementations(config, registry):
        problem = _named_problem(registry, kind, name, target)
        if problem:
            yield f"{kind} {name!r}: {problem}"
    if _select(config, "attention.name") == "auto":
        reasons = {name: _named_problem(registry, "attention_backends", name, target) for name in _backends(registry)}
        if all(reasons.values()):
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            yield f"attention 'auto' finds no backend that can run; choose attention=upstream. {listed}"


def _named_implementations(config: DictConfig, registry: PluginRegistry) -> Iterator[tuple[str, str]]:
    packing, attention = _select(config, "packing.name"), _select(config, "attention.name")
    if packing:
        yield "packers", packing
    if attention not in (None, "upstream", "auto"):
        yield "attention_backends", attention
    chosen = {group: _select(config, f"{group}.name") for group in UPSTREAM_CHOICES}
    if any(chosen[group] not in (None, upstream) for group, upstream in UPSTREAM_CHOICES.items()):
        yield "policies", str(_select(config, "policy.type"))
    if _select(config, "env.type") in registry.names("environments"):
        yield "environments", str(_select(config, "env.type"))


def _precision(config: DictConfig, registry: PluginRegistry) -> Iterator[str]:
    """A training precision that can't be installed, or that ``strict`` forbids to emulate."""
    name = _select(config, "precision.name")
    if name in (None, "none"):
        return
    problem = _named_problem(registry, "precisions", name, attention_target(config))
    emulated = problem is not None and problem.startswith("emulated")
    if problem and (not emulated or _select(config, "precision.options.strict")):
        yield f"precision {name!r}: {problem}"


def _quantization(config: DictConfig, registry: PluginRegistry) -> Iterator[str]:
    """A quantizer that is not there, or options that it does not take."""
    name, options = _select(config, "quantization.name"), _select(config, "quantization.options")
    if name in (None, "none"):
        return
    try:
        registry.build("quantizers", name, dict(options or {}))
    except ValueError as error:
        yield f"quantization {name!r}: {error}"


def _named_problem(registry: PluginRegistry, kind: str, name: str, target: AttentionTarget) -> str | None:
    try:
        registry.registration(kind, name)
    except PluginError as error:
        return str(error)
    return implementation_problem(registry, kind, name, target)


def _machine(config: DictConfig, machine: MachineFinding) -> Iterator[str]:
    device = _device(config)
    if device.startswith("cuda") and machine.gpu_problem:
        yield f"policy.device={device} cannot be used: {machine.gpu_problem}; set policy.device=cpu."
    if _select(config, "env") and all(machine.rendering.values()):
        reasons = "; ".join(f"{backend}: {reason}" for backend, reason in machine.rendering.items())
        yield f"env renders off-screen, and no backend can: {reasons}. Install libegl1 and libegl-mesa0, or libosmesa6."


def _adapters(config: DictConfig) -> Iterator[str]:
    if _select(config, "peft") is None:
        return
    from embodix.training.adapters import peft_problem

    problem = peft_problem()
    if problem is not None:
        yield problem


def _environment(config: DictConfig, registry: PluginRegistry) -> Iterator[str]:
    """What an environment says it lacks, LeRobot's own by the one that stands in for it; and one that is not there."""
    env_type = _select(config, "env.type")
    known = [name for name in (env_type, f"{STANDS_IN}{env_type}") if name in registry.names("environments")]
    try:
        if str(env_type).startswith(STANDS_IN):
            registry.registration("environments", env_type)
        environment = registry.resolve("environments", known[0]) if known else None
    except PluginError as error:
        if not known:  # one that can't be imported is told of as an implementation
            yield f"env.type={env_type} is not there: {error}"
        return
    if isinstance(environment, TellsProblems):
        fields: Any = OmegaConf.to_container(config.env, resolve=True)
        yield from (f"env.type={env_type} can't run: {problem}" for problem in environment.problems(fields))


def _backends(registry: PluginRegistry) -> list[str]:
    return registry.names("attention_backends")


def _device(config: DictConfig) -> str:
    return str(_select(config, "policy.device") or "cpu")


def _select(config: DictConfig, key: str) -> Any:
    """The value at ``key``, None where the config has none (other verbs' configs lack some nodes)."""
    return OmegaConf.select(config, key, throw_on_missing=False)
