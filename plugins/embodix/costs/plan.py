# SPDX-License-Identifier: Apache-2.0
"""Plan a training run from its config and the metadata of its data: tokens, waste, bound, memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from embodix.contracts import SampleShape
from embodix.costs.dataset_facts import padded_action_share
from embodix.costs.gpu_sizes import smallest_gpu
from embodix.costs.policy_costs import (
    EMBODIX,
    UPSTREAM,
    Computation,
    MemoryCount,
    PolicyCosts,
    Workload,
    computation_of,
)
from embodix.costs.rank_plan import PlannedProcesses, RankPlan, plan_ranks
from embodix.costs.workload import Source, TaskPrompt, draws_of, padded, read_sources
from embodix.policies.support import support_of
from embodix.report.compare import SpeedBound
from embodix.training.adapters import knows_targets, peft_problem
from embodix.training.host_context import policy_patches

ADAPTERS: Mapping[str, Any] = {"method_type": "LORA", "r": 16}  # what the option `peft=lora` has


@dataclass(frozen=True)
class Remedy:
    """One way to need less memory.

    Attributes:
        setting: the override that does it.
        price: what it costs, in words.
        total: bytes that remain with it alone.
        exact: whether training computes the same function afterwards.
        gpu_gigabytes: of the smallest common GPU that they fit in.
    """

    setting: str
    price: str
    total: float
    exact: bool
    gpu_gigabytes: int | None


@dataclass(frozen=True)
class VariantPlan:
    """What one variant will cost a sample; bounds are against upstream, token counts None where nothing tells them.

    Attributes:
        gpu_gigabytes: of the smallest common GPU that its memory fits in.
    """

    name: str
    computation: Computation
    tokens: float | None
    images: float
    utilisation: float | None
    forward_flops: float
    backward_flops: float
    bound: float
    forward_bound: float
    real_bound: float | None
    memory: MemoryCount
    gpu_gigabytes: int | None


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that can be known before training.

    Attributes:
        policy: as people write it.
        real_name: the policy that the real bounds speak of; None where no other size is known.
        tokens: mean tokens a sample by what they carry, as upstream lays them out; empty where nothing tells them.
        waste: share of upstream's tokens that carry no input.
        padded_action_share: share of the loss that lies after the end of episodes.
        num_trained: of the parameters, those that training changes.
        variants: upstream, each step towards the fast path, and the config's own choice.
        chosen: name of the variant that the config selects.
        ranks: one of several processes under each strategy that is asked about.
    """

    policy: str
    real_name: str | None
    dataset: str
    num_episodes: int
    num_frames: int
    real_cameras: list[str]
    blank_cameras: list[str]
    num_parameters: int
    num_trained: int
    batch_size: int
    dtype: str
    checkpointing: bool
    features: dict[str, Any]
    tokens: dict[str, float]
    waste: float | None
    prompts: list[TaskPrompt]
    prompt_source: str
    padded_action_share: float
    variants: list[VariantPlan]
    chosen: str
    remedies: list[Remedy]
    ranks: list[RankPlan] = field(default_factory=list)


class RunCosts:
    """The costs of a composed config: its policy at its own size and at the real one, and what it draws.

    Args:
        config: plain containers, as ``lerobot train --cfg job`` shows them.

    Raises:
        ValueError: no data set, cameras that fit no slot of the policy, or a policy that can't be counted.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.policy_fields = config, dict(config["policy"])
        self.support = support_of(self.policy_fields["type"])
        self.sources = read_sources(config)
        self.batch_size = int(config["train"]["batch_size"])
        recomputing = {saver.field for saver in self.support.memory_savers if saver.exact}
        # Operations are those of the function itself, without what saving memory computes again.
        plain = {name: value for name, value in self.policy_fields.items() if name not in recomputing}
        self.peft: Mapping[str, Any] | None = config.get("peft")
        self.costs = self._build(plain, config.get("architecture"))
        self.saving = self.costs
        if any(self.policy_fields.get(name) for name in recomputing):
            self.saving = self._build(self.policy_fields, config.get("architecture"))
        self._plain = plain
        longest = None if self.costs.layout is None else self.costs.layout.prompt_length
        self.draws, self.prompts, self.prompt_source = draws_of(config, self.support, self.sources, longest)
        self.workload = padded(self.draws, self.costs.layout, self.batch_size)
        self._real: tuple[PolicyCosts, Workload] | None = None

    @property
    def is_real(self) -> bool:
        """Whether the policy has its public checkpoint's sizes already, or comes in one size only."""
        real = self.support.real_fields
        return real is None or (
            self.config.get("architecture") is None
            and all(_plain(self.policy_fields.get(name, value)) == _plain(value) for name, value in real.items())
        )

    def real(self) -> tuple[PolicyCosts, Workload]:
        """The policy at its real size, and the same samples for it."""
        if self.is_real:
            return self.costs, self.workload
        if self._real is None:
            costs = self._build({**self._plain, **(self.support.real_fields or {})}, None)
            self._real = costs, padded(self.draws, costs.layout, self.batch_size)
        return self._real

    def with_field(self, field: str, value: Any) -> PolicyCosts:
        """The same policy with one field changed."""
        return self._build({**self.policy_fields, field: value}, self.config.get("architecture"))

    def with_adapters(self, peft: Mapping[str, Any]) -> PolicyCosts:
        """The same policy with adapters in the place of what it trains."""
        return self._build(self.policy_fields, self.config.get("architecture"), peft)

    def real_bound(self, computation: Computation, baseline: Computation = UPSTREAM) -> float:
        costs, workload = self.real()
        return costs.bound(workload, computation, baseline)

    def cameras(self) -> tuple[list[str], list[str]]:
        """Image keys of the policy that the data fills, and those that stay blank."""
        filled = list(dict.fromkeys(slot for source in self.sources for slot in source.slots))
        return filled, [key for key in self.costs.policy.config.image_features if key not in filled]

    def tokens(self) -> dict[str, float]:
        """Mean tokens a sample by what they carry, as upstream lays them out; empty where nothing tells them."""
        layout = self.costs.layout
        if layout is None:
            return {}
        images, padding = self._mean("images"), self._mean("padding")
        blank = 0.0 if layout.camera_slots is None else (layout.camera_slots - images) * layout.image_tokens
        return {
            "images": images * layout.image_tokens,
            "prompt": self._mean("prompt"),
            "actions": float(layout.action_tokens),
            "blank_images": blank,
            "prompt_padding": padding - blank,
        }

    def images(self, computation: Computation) -> float:
        """Mean images a sample that go through the vision tower."""
        slots = None if self.costs.layout is None else self.costs.layout.camera_slots
        return self._mean("images") if slots is None or computation.vision_tokens == "valid" else float(slots)

    def _mean(self, part: str) -> float:
        total = sum(self.workload.values())
        return float(sum(getattr(shape, part) * share for shape, share in self.workload.items()) / total)

    def _build(
        self,
        fields: Mapping[str, Any],
        architecture: Mapping[str, Any] | None,
        peft: Mapping[str, Any] | None = None,
    ) -> PolicyCosts:
        return _policy_costs(json.dumps(self._parts(fields, architecture, peft), sort_keys=True))

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the policy is built of: arguments of ``built_policy``."""
        return self._parts(self.policy_fields, self.config.get("architecture"))

    def _parts(self, fields: Any, architecture: Any, peft: Any = None) -> tuple[Any, ...]:
        return fields, *_features(fields, self.sources), architecture, _patches(self.config), peft or self.peft


@functools.lru_cache(maxsize=32)
def _policy_costs(described: str) -> PolicyCosts:
    """What has been counted of a policy once is known to all plans of a process."""
    return PolicyCosts(*json.loads(described))


def plan_training(config: Mapping[str, Any], processes: PlannedProcesses | None = None) -> TrainingPlan:
    """Plan the run that a composed train config describes, on one process and on those that are asked about.

    Raises:
        ValueError: see :class:`RunCosts` and :func:`embodix.costs.rank_plan.plan_ranks`.
    """
    run = RunCosts(config)
    choice, real_cameras, blank_cameras = computation_of(config), *run.cameras()
    named = _variants(run, choice)
    episodes = [episode.length for source in run.sources for episode in source.facts.episodes]
    policy_config = run.costs.policy.config
    chunk = len(policy_config.action_delta_indices or [0])
    tokens = run.tokens()
    return TrainingPlan(
        policy=run.support.display_name,
        real_name=None if run.support.real_fields is None else run.support.real_name,
        dataset=" + ".join(source.facts.name for source in run.sources),
        num_episodes=len(episodes),
        num_frames=sum(episodes),
        real_cameras=real_cameras,
        blank_cameras=blank_cameras,
        num_parameters=run.costs.num_parameters,
        num_trained=run.costs.num_trained,
        batch_size=run.batch_size,
        dtype=str(run.policy_fields.get("dtype", "float32")),
        checkpointing=bool(run.policy_fields.get("gradient_checkpointing", False)),
        features=_switches(config),
        tokens=tokens,
        waste=(tokens["blank_images"] + tokens["prompt_padding"]) / sum(tokens.values()) if tokens else None,
        prompts=run.prompts,
        prompt_source=run.prompt_source,
        padded_action_share=padded_action_share(episodes, chunk),
        variants=[_variant(name, computation, run, tokens) for name, computation in named.items()],
        chosen=next(name for name, computation in named.items() if computation == choice),
        remedies=_remedies(run, choice),
        ranks=plan_ranks(run.saving, run.saving.count(largest_sample(run.workload), choice, run.batch_size), processes),
    )


def speed_bounds(configs: Mapping[str, Mapping[str, Any]], baseline: str) -> dict[str, SpeedBound]:
    """Bounds of a comparison's variants against its baseline, for the report.

    Args:
        configs: composed train config of each variant; they share data set and policy.

    Raises:
        ValueError: see :class:`RunCosts`.
    """
    run, base = RunCosts(configs[baseline]), computation_of(configs[baseline])
    filled, blank = run.cameras()
    lengths = [length for _, length in run.draws]
    basis = (
        f"Matrix products of forward and backward for {len(filled)} real and {len(blank)} blank cameras, prompts of "
        f"{min(lengths)} to {max(lengths)} tokens."
    )
    return {
        name: SpeedBound(
            this_size=run.costs.bound(run.workload, computation_of(config), base),
            real_size=None if run.is_real else run.real_bound(computation_of(config), base),
            real_name=run.support.real_name,
            basis=basis,
        )
        for name, config in configs.items()
        if name != baseline
    }


def _features(fields: Mapping[str, Any], sources: list[Source]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the policy is fed: declared cameras, else those of the data; state and action of the widest data set."""
    declared = {key: f for key, f in (fields.get("input_features") or {}).items() if str(f["type"]) == "VISUAL"}
    found = {slot: {"type": "VISUAL", "shape": shape} for source in sources for slot, shape in source.slots.items()}
    widths = {
        key: max(source.facts.widths.get(key, 0) for source in sources) or fields.get(limit, 1)
        for key, limit in (("observation.state", "max_state_dim"), ("action", "max_action_dim"))
    }
    state = {"observation.state": {"type": "STATE", "shape": [widths["observation.state"]]}}
    return {**(declared or found), **state}, {"action": {"type": "ACTION", "shape": [widths["action"]]}}


def _patches(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Patches of upstream's policies that the config asks for; those of sizes come with the skeleton."""
    node = {**config, "patches": config.get("patches") or {}, "architecture": None}
    return policy_patches(OmegaConf.create(node))


def _variants(run: RunCosts, choice: Computation) -> dict[str, Computation]:
    """The variants to show; the config's own is added where it is none of them."""
    named = {"upstream": UPSTREAM}
    if run.support.offers("wrapper"):
        if run.costs.layout is not None and run.costs.layout.camera_slots is not None:
            named["vision_tokens=valid"] = Computation(vision_tokens="valid")
        named |= {"packing=padding_free": Computation(packing="padding_free"), "embodix": EMBODIX}
    if choice not in named.values():
        named["this config"] = choice
    return named


def _variant(name: str, computation: Computation, run: RunCosts, means: Mapping[str, float]) -> VariantPlan:
    flops, upstream = run.costs.mean(run.workload, computation), run.costs.mean(run.workload)
    memory = run.saving.memory(largest_sample(run.workload), run.batch_size, computation)
    valid = computed = None
    if means:
        valid = means["images"] + means["prompt"] + means["actions"] * computation.flow_samples
        computed = valid + (computation.packing == "none") * (means["blank_images"] + means["prompt_padding"])
    return VariantPlan(
        name=name,
        computation=computation,
        tokens=computed,
        images=run.images(computation),
        utilisation=valid and computed and valid / computed,
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        bound=run.costs.bound(run.workload, computation),
        forward_bound=upstream.forward / flops.forward * computation.flow_samples,
        real_bound=None if run.support.real_fields is None else run.real_bound(computation),
        memory=memory,
        gpu_gigabytes=smallest_gpu(memory.total),
    )


def largest_sample(workload: Workload) -> SampleShape:
    """The sample that needs most memory."""
    return max(workload, key=lambda shape: (shape.images, shape.prompt))


def _remedies(run: RunCosts, choice: Computation) -> list[Remedy]:
    """Ways to need less memory that are not in use yet: exact ones first, then by what each leaves."""
    before = run.saving.memory(largest_sample(run.workload), run.batch_size, choice).total
    saving = [remedy for remedy in _possible_remedies(run, choice) if remedy.total < before]
    costly = sorted((remedy for remedy in saving if not remedy.exact), key=lambda remedy: remedy.total)
    return [remedy for remedy in saving if remedy.exact] + costly


def _possible_remedies(run: RunCosts, choice: Computation) -> Iterator[Remedy]:
    size, costs = run.batch_size, run.saving

    def remedy(
        setting: str, price: str, exact: bool, costs: PolicyCosts, batch_size: int, computation: Computation
    ) -> Remedy:
        total = costs.memory(largest_sample(run.workload), batch_size, computation).total
        return Remedy(setting, price, total, exact, smallest_gpu(total))

    slow = choice.packing == "none" or choice.is_dense or choice.vision_tokens == "upstream"
    if slow and run.support.offers("wrapper"):
        fast = Computation("padding_free", "auto", "valid", choice.flow_samples)
        price = "none: fewer tokens, no attention scores kept, and faster"
        yield remedy("+plugin=embodix", price, True, costs, size, fast)
    if size > 1:
        price = "twice the steps for as many samples, or two processes instead of one"
        yield remedy(f"train.batch_size={size // 2}", price, False, costs, size // 2, choice)
    for saver in run.support.memory_savers:
        if getattr(costs.policy.config, saver.field) != saver.value:
            value = str(saver.value).lower()
            changed = run.with_field(saver.field, saver.value)
            yield remedy(f"policy.{saver.field}={value}", saver.price, saver.exact, changed, size, choice)
    if run.peft is None and knows_targets(costs.policy) and peft_problem() is None:
        price = "adapters are trained beside the frozen weights of a trained policy"
        yield remedy("peft=lora", price, False, run.with_adapters(ADAPTERS), size, choice)


def _switches(config: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of the run by group."""
    groups = ("packing", "attention", "vision_tokens", "action_pad")
    peft = config.get("peft")
    return {
        **{group: config[group]["name"] for group in groups},
        **({} if peft is None else {"peft": f"{peft['method_type'].lower()}, r={peft['r']}"}),
        "flow_samples": config.get("flow_samples", 1),
        "plugin": config.get("plugin"),
        "patches": sorted(config.get("patches") or {}),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
