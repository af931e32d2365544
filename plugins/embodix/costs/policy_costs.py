# SPDX-License-Identifier: Apache-2.0
"""What samples of one policy cost, variant by variant: counted where it must be, interpolated where it may be.

The operations of a transformer are a polynomial of second degree in the length of its prompt, so three counts give
those of every prompt.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from embodix.checkpoints.skeleton import fed_config, policy_skeleton
from embodix.contracts import NotOfferedError, SampleShape
from embodix.costs.counting import CountedAttention, CountedStep, count_step
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.patching import patched
from embodix.policies.adapters import bare_policy
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix.training.adapters import put_adapters_on

Workload = Mapping[SampleShape, float]  # how often each kind of sample is drawn; any positive scale


@dataclass(frozen=True)
class Computation:
    """What a variant computes; the defaults are upstream's.

    Attributes:
        packing: ``none`` computes all prefix rows, anything else the valid ones.
        attention: ``upstream`` for dense attention over the padded batch, anything else for segments.
        vision_tokens: ``upstream`` sends blank images through the vision tower, ``valid`` real ones only.
        flow_samples: noise and time draws an observation.
    """

    packing: str = "none"
    attention: str = "upstream"
    vision_tokens: str = "upstream"
    flow_samples: int = 1

    @property
    def is_upstream(self) -> bool:
        """Whether nothing is installed."""
        return self == UPSTREAM

    @property
    def is_dense(self) -> bool:
        return self.attention == "upstream"


UPSTREAM = Computation()
EMBODIX = Computation("padding_free", "auto", "valid")


def computation_of(config: Mapping[str, Any]) -> Computation:
    """What a composed train config computes."""
    names = {group: config[group]["name"] for group in ("packing", "attention", "vision_tokens")}
    return Computation(**names, flow_samples=int(config.get("flow_samples", 1)))


@dataclass(frozen=True)
class Flops:
    """Operations of one sample's forward and backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class MemoryCount:
    """Bytes by what they hold, for one process with AdamW."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


class PolicyCosts:
    """A policy on the meta device, and what has been counted of it.

    Args:
        fields: of upstream's config.
        inputs, outputs: features of the policy, each with ``type`` and ``shape``.
        architecture: the policy's sizes; None for those of the public checkpoint.
        patches: of upstream's policies, in force while it is built and while it runs.
        peft: the group of that name; None where no adapters are trained.

    Raises:
        ValueError: fields that upstream's config does not have, a policy that can't be built without its weights, or
            adapters that don't fit it.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        architecture: Mapping[str, Any] | None = None,
        patches: Mapping[str, Mapping[str, Any] | None] | None = None,
        peft: Mapping[str, Any] | None = None,
    ) -> None:
        self.support = support_of(fields["type"])
        self._patches = patches or {}
        self.policy = built_policy(fields, inputs, outputs, architecture, patches, peft)
        self.layout = self.support.sample_layout(self.policy)
        self._counts: dict[tuple[Computation, SampleShape, int], CountedStep] = {}

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.policy.parameters())

    @property
    def num_trained(self) -> int:
        """Parameters that training changes."""
        return sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)

    def mean(self, workload: Workload, computation: Computation = UPSTREAM) -> Flops:
        """Mean operations of a sample's training step.

        Raises:
            ValueError: no samples.
        """
        weight = sum(workload.values())
        if weight <= 0:
            raise ValueError("A mean needs at least one sample with a positive weight; got none.")
        groups: dict[tuple[int, int], dict[float, float]] = {}
        for shape, share in self._decisive(workload, computation).items():
            along = groups.setdefault((shape.images, shape.padding), {})
            along[shape.prompt] = along.get(shape.prompt, 0.0) + share / weight
        parts = [
            part
            for (images, padding), along in groups.items()
            for part in self._along(computation, images, padding, along)
        ]
        return Flops(sum(part.forward for part in parts), sum(part.backward for part in parts))

    def bound(self, workload: Workload, computation: Computation, baseline: Computation = UPSTREAM) -> float:
        """How many times fewer operations ``computation`` needs than ``baseline`` for the same loss samples."""
        mine = self.mean(workload, computation).total / computation.flow_samples
        return self.mean(workload, baseline).total / baseline.flow_samples / mine

    def memory(self, shape: SampleShape, batch_size: int, computation: Computation = UPSTREAM) -> MemoryCount:
        """Of a training step with AdamW on a batch of equal samples."""
        count = self.count(shape, computation, batch_size)
        held = sum(parameter.numel() * parameter.element_size() for parameter in self.policy.parameters())
        return MemoryCount(held, count.gradients, 2 * count.gradients, count.activations)

    def count(self, shape: SampleShape, computation: Computation = UPSTREAM, batch_size: int = 1) -> CountedStep:
        """One step of a batch of equal samples.

        Raises:
            NotOfferedError: the policy does not run on the batch that its plugin gives.
        """
        key = (computation, shape, batch_size)
        if key not in self._counts:
            with patched(self._patches), _quiet():
                self._counts[key] = self._count(shape, computation, batch_size)
        return self._counts[key]

    def _count(self, shape: SampleShape, computation: Computation, batch_size: int) -> CountedStep:
        batch = sample_batch(self.policy, shape, batch_size)
        valued = self.support.valued_keys
        attention = CountedAttention()
        if not computation.is_upstream:
            with self._installed(computation, attention):
                return count_step(
                    self.policy, _on_meta(batch, lambda t: t.is_floating_point()), attention, (), self._entries()
                )
        batch = {key: value if key in valued else _moved(value) for key, value in batch.items()}
        try:
            return count_step(self.policy, batch, attention, valued)
        except Exception as error:  # whatever a third party's code raises for a batch that is not its own
            raise NotOfferedError(
                f"policy.type={self.policy.config.type} does not run on torch's meta device with a batch of "
                f"{', '.join(batch)}: {type(error).__name__}: {error}. Give its batch by sample_batch in the policy's "
                "PolicySupport (embodix.contracts)."
            ) from error

    def _entries(self) -> dict[str, nn.Module]:
        """Of the units that the policy's record names, by path."""
        bare = bare_policy(self.policy)
        units = self.support.shard_units(bare) if self.support.offers("shard_units") else ()
        return {unit.entry: bare.get_submodule(unit.entry) for unit in units}

    @contextmanager
    def _installed(self, computation: Computation, attention: CountedAttention) -> Iterator[None]:
        packer = PaddedPacker() if computation.packing == "none" else PaddingFreePacker()
        settings = FastPathSettings(
            packer,
            None if computation.is_dense else attention,
            computation.vision_tokens,  # type: ignore[arg-type]
            flow_samples=computation.flow_samples,
        )
        installation = self.support.wrapper().install(self.policy, settings)
        try:
            yield
        finally:
            installation.uninstall()

    def _along(
        self, computation: Computation, images: int, padding: int, shares: Mapping[float, float]
    ) -> Iterator[Flops]:
        """Operations of samples that differ in their prompts only, each times its share."""
        lengths = sorted(shares)
        longest = self.layout and self.layout.prompt_length
        nodes = [1, longest // 2, longest] if longest else [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
        counted = lengths if len(lengths) == 1 or (len(lengths) <= 3 and not longest) else nodes
        for length in counted:
            share = sum(value * _lagrange(counted, length, x) for x, value in shares.items())
            count = self.count(SampleShape(images, int(length), padding), computation)
            yield Flops(share * count.forward, share * count.backward)

    def _decisive(self, workload: Workload, computation: Computation) -> dict[SampleShape, float]:
        """The workload by what this computation sees: all rows of a sample, or those that exist, or both."""
        seen: dict[SampleShape, float] = {}
        fixed = self.layout is None or self.layout.prompt_length is not None
        mean_padding = round(sum(s.padding * share for s, share in workload.items()) / sum(workload.values()))
        for shape, share in workload.items():
            if computation.packing == "none" and computation.is_dense:
                rows = self.layout.prompt_length if fixed and self.layout else shape.prompt + shape.padding
                shape = SampleShape(shape.images, rows or 0, 0)
            elif fixed or not (computation.packing == "none" or computation.is_dense):
                shape = dataclasses.replace(shape, padding=0)
            else:
                shape = dataclasses.replace(shape, padding=mean_padding)
            seen[shape] = seen.get(shape, 0.0) + share
        return seen


def built_policy(
    fields: Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    architecture: Mapping[str, Any] | None = None,
    patches: Mapping[str, Mapping[str, Any] | None] | None = None,
    peft: Mapping[str, Any] | None = None,
    device: str = "meta",
) -> Any:
    """A policy with random weights that is to be trained; arguments and errors are those of :class:`PolicyCosts`."""
    named = {name: value for name, value in fields.items() if name not in ("input_features", "output_features")}
    upstream_config = fed_config(named, inputs, outputs)
    try:
        with patched(patches or {}), _quiet():
            policy: Any = policy_skeleton(upstream_config, architecture, device)
            if peft is not None:
                policy = put_adapters_on(policy, peft)
            return policy.to(device).train()  # buffers, too
    except OSError as error:
        raise NotOfferedError(
            f"Building policy.type={named['type']} asks for files that are not here: {error}. Name them in its "
            "fields, or set the field that asks for them to null."
        ) from error


def sample_batch(policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
    """A preprocessed batch of equal samples on the CPU, of the policy's record or else of what its config declares."""
    support = support_of(policy.config.type)
    if support.offers("sample_batch"):
        return support.sample_batch(policy, shape, batch_size)
    return _feature_batch(policy.config, batch_size)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what upstream prints and logs of a policy that it builds."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _lagrange(nodes: Sequence[float], node: float, x: float) -> float:
    """Value at ``x`` of the polynomial that is 1 at ``node`` and 0 at the other nodes."""
    value = 1.0
    for other in nodes:
        if other != node:
            value *= (x - other) / (node - other)
    return value


def _moved(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _on_meta(batch: Mapping[str, Any], which: Any) -> dict[str, Any]:
    return {key: _moved(value) if isinstance(value, Tensor) and which(value) else value for key, value in batch.items()}


def _feature_batch(config: Any, batch_size: int) -> dict[str, Tensor]:
    """The features that a config declares, as upstream's loader stacks them: several steps where it asks for steps."""

    def shape(deltas: Sequence[int] | None, feature: Sequence[int]) -> tuple[int, ...]:
        steps = () if deltas is None else (len(deltas),)
        return (batch_size, *steps, *feature)

    inputs = {key: shape(config.observation_delta_indices, f.shape) for key, f in config.input_features.items()}
    actions = shape(config.action_delta_indices, config.output_features[ACTION].shape)
    batch = {key: torch.zeros(size) for key, size in {**inputs, ACTION: actions}.items()}
    batch[f"{ACTION}_is_pad"] = torch.zeros(actions[:-1], dtype=torch.bool)
    length = getattr(config, "tokenizer_max_length", None)
    if length is not None:
        batch[OBS_LANGUAGE_TOKENS] = torch.zeros(batch_size, length, dtype=torch.int64)
        batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.ones(batch_size, length, dtype=torch.bool)
    return batch
