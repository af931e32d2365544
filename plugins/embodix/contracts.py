# SPDX-License-Identifier: Apache-2.0
"""What a plugin author has to satisfy: every contract of embodix, in one file. Read it first.

A hook of ``embodix.hookspecs`` names implementations; the contract of each kind is here. Importing this module imports
no torch and no host, and neither should the module that registers.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads, D head_dim; B samples, S rows of a
padded prefix; F stochastic steps of each, T action steps, A padded action dimensions, W a width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.configs.train import TrainPipelineConfig
    from omegaconf import DictConfig
    from torch import Tensor, nn

    from embodix.attention.segments import Segments
    from embodix.data.preprocessing import Merger
    from embodix.data.sample_sizes import SizedDataset
    from embodix.packing.bins import Bins
    from embodix.packing.layout import PackedLayout
    from embodix.packing.sample_cost import CostModel, IntArray, SampleSizes
    from embodix.policies.flow_host import FlowSizes, RecomputedSteps
    from embodix.policies.settings import FastPathSettings, ReferenceCheck, TokenCounts
    from embodix.quantization.accuracy_probe import LayerTensors
    from embodix.quantization.gate_rules import RecipeNumbers
    from embodix.quantization.selection import ModuleChoice
    from embodix.tensor_file import TensorSpec

ModuleKind = Literal["language_linear", "embedding", "unused_head", "vision", "connector", "action_head", "other"]


class NotOfferedError(ValueError):
    """A verb needs something of a policy that its plugin does not offer."""


# --- packers ----------------------------------------------------------------------------------------------------------


class Packer(Protocol):
    """Decides which rows of a padded batch are computed. Hook ``register_packers``."""

    name: str

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        """The layout for a bool mask of the tokens that exist.

        Raises:
            ValueError: the mask is not a two-dimensional bool tensor.
        """
        ...


@runtime_checkable
class ShapePadder(Protocol):
    """A packer that computes a training batch in one of few shapes."""

    def pad(self, layout: PackedLayout, num_images: int) -> PackedLayout:
        """``layout`` with blank rows, and with the number of samples and images to compute.

        Raises:
            ValueError: a batch that no shape holds.
        """
        ...


@runtime_checkable
class BatchComposer(Protocol):
    """A packer that also decides which samples share a bin (a micro-batch); nothing else announces it.

    Attributes:
        bins_per_step: bins of one optimizer step on each rank.
    """

    bins_per_step: int

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Bins that hold each of ``samples_N`` exactly once, a function of the arguments alone.

        Args:
            samples_N: int64 dataset indices of one epoch, in its order.
            sizes: of every sample of the data set.
            samples_per_bin: samples that a bin should hold on average where no budget is set.
            cost: the cost model in force, in token units.

        Raises:
            ValueError: a sample that no bin can hold.
        """
        ...


# --- attention --------------------------------------------------------------------------------------------------------


class AttentionBackend(Protocol):
    """Attention over packed segments, bidirectional or causal, with grouped heads (``register_attention_backends``).

    Causal masks are aligned to the last key (a query segment shorter than its key segment sees all earlier keys).
    A query that may see no key gives 0.

    A backend may state ``preference``, an int or None: its place in the order in which ``auto`` tries backends, the
    lowest first. Those of the core have 10 to 70, fastest first; a backend without one comes after all that have.
    """

    name: str

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend can't run there, or None when it can. Never raises."""
        ...

    def __call__(
        self,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        segments: Segments,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attention output, ``[N, H, D]`` in the dtype of ``q_NHD``; ``scale`` defaults to ``D ** -0.5``.

        Raises:
            ValueError: shapes and segments disagree, or fp16 input.
        """
        ...


# --- policies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageModel:
    """Where a policy has its decoder, and what transformers calls the same.

    Attributes:
        path: of the decoder in the policy.
        architecture: class of transformers, whose ``model`` is the decoder.
    """

    path: str
    architecture: str


@dataclass(frozen=True)
class SampleShape:
    """What decides the cost of one sample.

    Attributes:
        images: real ones.
        prompt: tokens, those of images left out.
        padding: rows that upstream appends to the prefix to fill its batch.
    """

    images: int
    prompt: int
    padding: int = 0


@dataclass(frozen=True)
class SampleLayout:
    """What upstream makes of one sample.

    Attributes:
        image_tokens: that one image becomes.
        action_tokens: of one noise and time draw.
        prompt_length: to which every prompt is padded; None where it is the longest of the batch.
        camera_slots: that upstream computes whether there is an image or not; None where it computes real ones.
    """

    image_tokens: int
    action_tokens: int
    prompt_length: int | None = None
    camera_slots: int | None = None

    def padding(self, images: int, prompt: int) -> int:
        """Rows that carry nothing in a prefix of fixed length."""
        blank = 0 if self.camera_slots is None else (self.camera_slots - images) * self.image_tokens
        return blank + (0 if self.prompt_length is None else self.prompt_length - prompt)


@dataclass(frozen=True)
class ShortenedTask:
    """A task whose text is shortened because its prompts are longer than the policy takes.

    Attributes:
        num_prompts: shortened ones.
        num_looked_at: prompts of all tasks that were looked at.
        excess: tokens that the longest of them was too long by.
        longest: tokens that the policy takes.
    """

    task: str
    num_prompts: int
    num_looked_at: int
    excess: int
    longest: int

    @property
    def sentence(self) -> str:
        """For people."""
        share = 100 * self.num_prompts / self.num_looked_at
        return (
            f"The text of the task {self.task!r} is shortened: its prompts are up to {self.excess} tokens longer than "
            f"the {self.longest} that the policy takes, {self.num_prompts} of {self.num_looked_at} prompts "
            f"({share:.1f} %)."
        )


@dataclass(frozen=True)
class MemorySaver:
    """A field of the policy's config with which training needs less memory.

    Attributes:
        price: what it costs, in words.
        exact: whether training computes the same function with it.
    """

    field: str
    value: Any
    price: str
    exact: bool


class PolicySupport:
    """Everything that embodix needs to know of one policy of LeRobot (``register_policies``, by the policy's type).

    A policy is one folder, and this is its record: subclass it and offer what there is. What is not offered has a
    default that leaves upstream as it is, or says which verb can't go on without it. A policy that nobody has
    registered is ``PolicySupport(type)``: it trains and acts as upstream's. Keep heavy imports inside the methods.

    Attributes:
        policy_type: LeRobot's.
        display_name: as people write it.
        config_group: option of the group ``policy`` with what the policy needs to run here.
        supported: host -> versions that the packed computation was written for.
        sizes_patch: patch that builds the policy in the sizes of ``architecture``; None where they can't be chosen.
        guards: patches against faults of upstream's policy, in force under ``patches=host_guards``.
        module_kinds: kind -> pattern of full module paths; the first that matches counts. Quantizers and precisions
            convert the kinds of the language model.
        kept_modules: pattern -> reason: modules that are never converted, whatever their kind.
        language_model: the decoder, for exports; None for none.
        real_head_dim: channels of an attention head at the real size, for probes before the policy is built.
        blank_cameras: part of the key of cameras that the policy adds itself and nobody provides.
        tokenizer_hub_id: the tokenizer that upstream has hard-coded, which ``tokenizer.directory`` stands in for; None
            for a policy that reads its tokenizer from elsewhere.
        tokenizer_config: ``config.json`` of that tokenizer's stand-in.
        real_name: the public checkpoint and its sizes in words, which a small policy stands in for.
        real_fields: upstream's fields of the sizes that it has; None for a policy that comes in one size.
        memory_savers: fields of upstream's config that save memory.
        peft_targets: pattern of the modules that adapters are put on where none is asked for; None leaves that to
            upstream, whose policy may have a pattern of its own or demand one.
        valued_keys: of a batch, tensors whose values upstream's own forward pass asks for: token ids, not masks.
    """

    policy_type: str = ""
    display_name: str = ""
    config_group: ClassVar[str] = "upstream"
    supported: ClassVar[Mapping[str, str]] = {}
    sizes_patch: ClassVar[str | None] = None
    guards: ClassVar[tuple[str, ...]] = ()
    module_kinds: ClassVar[Mapping[ModuleKind, str]] = {}
    kept_modules: ClassVar[Mapping[str, str]] = {}
    language_model: ClassVar[LanguageModel | None] = None
    real_head_dim: ClassVar[int | None] = None
    blank_cameras: ClassVar[str | None] = None
    tokenizer_hub_id: ClassVar[str | None] = None
    tokenizer_config: ClassVar[Mapping[str, Any]] = {}
    real_name: ClassVar[str] = ""
    real_fields: ClassVar[Mapping[str, Any] | None] = None
    memory_savers: ClassVar[Sequence[MemorySaver]] = ()
    peft_targets: ClassVar[str | None] = None
    valued_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, policy_type: str | None = None) -> None:
        self.policy_type = policy_type or type(self).policy_type
        self.display_name = type(self).display_name or self.policy_type

    def offers(self, member: str) -> bool:
        """Whether the plugin has given this attribute or method."""
        return getattr(type(self), member) is not getattr(PolicySupport, member)

    # before a run

    def patches(self, cfg: DictConfig) -> dict[str, dict[str, Any]]:
        """Further patches, with their options, that a run of this config needs."""
        return {}

    def config_faults(self, config: PreTrainedConfig, architecture: Mapping[str, Any] | None) -> Iterable[str]:
        """What of the policy's config can't be trained, a sentence each with the rule and what was got; asked before
        data or weights are loaded.

        Args:
            config: upstream's, decoded.
            architecture: the config's node; None for the real size.
        """
        return ()

    def config_notes(self, config: PreTrainedConfig) -> Iterable[str]:
        """What upstream makes of the policy's fields otherwise than they say, a sentence each; said before a run."""
        return ()

    def prepare_assets(self, cfg: DictConfig, host_cfg: TrainPipelineConfig) -> None:
        """Put files that upstream reads in their place and name them in upstream's config."""

    def uses_tokenizer_directory(self) -> bool:
        """Whether upstream asks the hub for its tokenizer, so that ``tokenizer.directory`` may stand in for the hub."""
        return True

    def public_architecture(self) -> Mapping[str, Any] | None:
        """Sizes of the public checkpoint where upstream's own config does not have them."""
        return None

    def normalisation(self, config: Any) -> tuple[Mapping[str, str], bool]:
        """How the policy's processors scale what they are given, and whether a range of zero stays bounded.

        Args:
            config: upstream's.

        Returns:
            Kind of feature (``STATE``, ``ACTION``, ``ENV``, ``VISUAL``) -> LeRobot's ``NormalizationMode`` by name, for
            those that are scaled; and whether a dimension whose bounds are equal gives bounded values.
        """
        modes = {str(getattr(kind, "value", kind)): mode.name for kind, mode in config.normalization_mapping.items()}
        return {kind: mode for kind, mode in modes.items() if mode != "IDENTITY"}, False

    # computing

    def wrapper(self) -> PolicyWrapper:
        """What makes the policy compute on packed batches.

        Raises:
            NotOfferedError: there is none.
        """
        raise self._not_offered("a packed computation", "packing=none, attention=upstream and vision_tokens=upstream")

    def own_autocast(self, config: Any) -> str | None:
        """``bfloat16`` or ``float32`` where the policy decides by its own autocast what it computes in; else None."""
        return None

    def switched_autocast(self, policy: Any, dtype: str) -> AbstractContextManager[None]:
        """The policy's own autocast in another dtype; only where ``own_autocast`` has one."""
        return nullcontext()

    def noise_shape(self, policy: Any, batch_size: int) -> tuple[int, int, int]:
        """``(B, T, A)`` of the noise that denoising starts from, padded dimensions included.

        Raises:
            NotOfferedError: not known.
        """
        raise self._not_offered("the shape of its noise, which watching its denoising needs", "gate.enabled=false")

    def merger(self, policy_cfg: Any, members: Sequence[Any], preprocessors: Sequence[Any]) -> Merger:
        """How preprocessed batches of several embodiments become one batch.

        Args:
            policy_cfg: upstream's config.
            members: ``embodix.data.mixture_dataset.Member`` each.
            preprocessors: upstream's, of each member.

        Raises:
            NotOfferedError: there is no way.
        """
        raise self._not_offered("a merger of several embodiments' batches", "dataset=lerobot")

    def flow(self, policy: Any, settings: FastPathSettings) -> FlowHost:
        """The policy as a flow whose samples have log-probabilities.

        Raises:
            NotOfferedError: there is none.
        """
        raise self._not_offered("a flow with log-probabilities, which training from rollouts needs", "another policy")

    # parallel training

    def unread_parameters(self, policy: Any) -> Sequence[str]:
        """Parameters that get no gradient from the packed computation, in any batch, by name; so that copies of the
        policy need not search for them in every step.

        Raises:
            NotOfferedError: not known.
        """
        raise self._not_offered("the parameters that nothing reads", "packing=none")

    def shard_units(self, policy: Any) -> Sequence[ShardUnit]:
        """What is gathered together where parameters are sharded, in the order of the forward pass; what no unit holds
        is gathered for the whole pass. Layers that one function computes together are one unit.

        Raises:
            NotOfferedError: not known.
        """
        raise self._not_offered("units to shard", "parallel=ddp")

    def tensor_plan(self, policy: Any) -> TensorPlan:
        """How its layers are cut across ranks.

        Raises:
            NotOfferedError: not known.
        """
        raise self._not_offered("a plan of how its layers are cut", "parallel=fsdp2")

    def pipeline_stages(self, policy: Any, num_stages: int) -> PipelineStages:
        """Its training step in stages that ranks compute one after the other, cut so that they weigh alike.

        Args:
            policy: with its fast path in place.

        Raises:
            NotOfferedError: not known.
            ValueError: fewer layers than stages.
        """
        raise self._not_offered("stages", "parallel=fsdp2")

    # costs

    def sample_layout(self, policy: Any) -> SampleLayout | None:
        """Sizes of a sample's parts; None where a policy has no tokens, or its plugin does not say."""
        return None

    def sample_batch(self, policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
        """A preprocessed training batch of equal samples on the CPU; values do not matter, those of masks do.

        Raises:
            NotOfferedError: not known; upstream's computation is then fed what its config declares.
        """
        raise self._not_offered("a batch of samples of a given size", "upstream's own computation")

    def prompt_texts(
        self, policy: Mapping[str, Any], task: str, images: int, state_stats: Mapping[str, list[float]]
    ) -> Mapping[str, float]:
        """Texts that are tokenised for a task, and the share of its samples that has each.

        Args:
            policy: fields of upstream's config.
            state_stats: statistics of the state by name, one value a dimension.
        """
        return {task: 1.0}

    def shortened_tasks(self, part: SizedDataset) -> Sequence[ShortenedTask]:
        """The tasks of a data set whose text has to be shortened, counted before anything is trained; none by default.

        Raises:
            ValueError: prompts that are too long without any text of a task.
        """
        return ()

    def shortened_so_far(self, preprocessor: Any) -> Sequence[ShortenedTask]:
        """Those whose text one of upstream's preprocessors has shortened in this process."""
        return ()

    def tokenizer_file(self, config: Mapping[str, Any]) -> Path | None:
        """``tokenizer.json`` of a composed config on this machine, where ``tokenizer_hub_id`` does not tell."""
        return None

    # checkpoints

    def policy_names(self, policy: Any, file_values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values of a checkpoint's file under the policy's names, as upstream renames them when it loads the file."""
        return file_values

    def weights_reader(self) -> tuple[type, str]:
        """Upstream's class and the name of its class method that reads the weights of a checkpoint.

        Raises:
            NotOfferedError: not known.
        """
        raise self._not_offered("the method that reads its weights, which quantized checkpoints need", "another policy")

    def _not_offered(self, what: str, instead: str) -> NotOfferedError:
        return NotOfferedError(
            f"The plugin of policy.type={self.policy_type} does not offer {what}. Choose {instead}, or offer it in the "
            "policy's PolicySupport (embodix.contracts)."
        )


class PolicyWrapper(Protocol):
    """Puts a fast path on instances of one host policy."""

    policy_type: str
    supported: Mapping[str, str]

    def head_dim(self, policy: nn.Module) -> int:
        """Channels of one attention head: what a backend's probe is asked about."""
        ...

    def install(self, policy: nn.Module, settings: FastPathSettings) -> Installation:
        """Set the fast methods on this instance only.

        Raises:
            ValueError: another policy type, a host version out of range, or a config the fast path can't honour.
        """
        ...


class Installation(Protocol):
    """A fast path in place on one policy."""

    @property
    def token_counts(self) -> TokenCounts | None:
        """Counts of the last training step, None before the first."""
        ...

    def uninstall(self) -> None:
        """Put upstream's methods back."""
        ...

    def describe(self) -> dict[str, Any]:
        """What is installed, for reports."""
        ...

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        """Elements that the loss of this batch is a mean over, flow samples included."""
        ...


@runtime_checkable
class ChecksReference(Protocol):
    """An installation whose reference is not upstream's own batch."""

    def check_reference(self, batch: Mapping[str, Any]) -> ReferenceCheck:
        """Compare with the reference on a preprocessed batch; weights and gradients are left as they are."""
        ...


@runtime_checkable
class MeasuresSamples(Protocol):
    """A policy wrapper that knows how large samples are, which packers that compose batches need."""

    def sample_sizes(
        self, policy: nn.Module, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
    ) -> SampleSizes:
        """Sizes of all samples, data set after data set.

        Args:
            progress: told the number of samples that were measured since the last call.
        """
        ...


class ObservedFlow(Protocol):
    """The velocity field of one batch of observations, without gradients; what all steps share is computed once."""

    noise_dtype: torch.dtype

    def initial_noise(self) -> Tensor:
        """``[B, T, A]`` where the host starts, drawn from torch's stream as the host draws it."""
        ...

    def step(self, x_BTA: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity ``[B, T, A]`` and features of the action tokens ``[B, W]`` at steps ``step_B``."""
        ...

    def prefix_features(self) -> Tensor:
        """``[B, W]`` features of the observations; known after the first step."""
        ...


class FlowHost(Protocol):
    """One policy of LeRobot on the packed path."""

    sizes: FlowSizes

    @property
    def device(self) -> torch.device:
        """Where the policy is now."""
        ...

    def batch_size(self, batch: Mapping[str, Any]) -> int:
        """Observations of a batch."""
        ...

    def observe(self, batch: Mapping[str, Any]) -> ObservedFlow:
        """The flow for a preprocessed batch of observations.

        Raises:
            ValueError: a batch that the policy's fast path refuses.
        """
        ...

    def recompute(self, batch: Mapping[str, Any], x_BFTA: Tensor, step_BF: Tensor) -> RecomputedSteps:
        """Velocities of noisy actions, differentiable; the observation is computed once for its F steps."""
        ...

    def pack_observation(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the policy reads of a batch, as tensors whose first dimension is the sample."""
        ...

    def unpack_observation(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch that ``pack_observation`` packed, its samples in any selection and order."""
        ...

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Inputs of several rollouts as one, whatever the padding of their prompts."""
        ...

    def pad(self, inputs: Mapping[str, Tensor], prompt_length: int, num_images: int) -> dict[str, Tensor]:
        """Inputs that can be joined by ``torch.cat`` with all others that were padded so.

        Raises:
            ValueError: a prompt or a number of images beyond these sizes.
        """
        ...


# --- number formats ---------------------------------------------------------------------------------------------------


class LowPrecision(Protocol):
    """A low precision in place on a policy: quantized weights, or the layers of a training precision."""

    def describe(self) -> dict[str, Any]:
        """For reports and the accuracy gate.

        ``converted`` and ``skipped`` list modules by ``path``, ``shape`` and ``reason``, the converted ones with their
        ``kernel``. A quantizer adds its ``name`` and, where not everything runs as meant, a sentence as ``fallback``.
        """
        ...

    def uninstall(self) -> None:
        """Give the policy back the very parameters it had; those that were given up are not there any more."""
        ...


class Quantizer(Protocol):
    """Puts low-precision weights into a policy that acts (hook ``register_quantizers``).

    Its options are keyword arguments with defaults. The weight that it puts into a module is a tensor, or a subclass
    with ``dequantize(dtype)``. With no more than this, evaluation and rollouts take it; see ``CheckpointQuantizer``.

    Attributes:
        name: as it is registered, and its option of the group ``quantization``.
    """

    name: str

    def install(
        self,
        policy: nn.Module,
        policy_type: str,
        *,
        stored: Mapping[str, Any] | None = None,
        keep_originals: bool = True,
    ) -> LowPrecision:
        """Quantize the chosen modules.

        Args:
            policy: LeRobot's bare policy.
            policy_type: of LeRobot.
            stored: module path -> weight of a checkpoint of this quantizer, taken as it is.
            keep_originals: keep the replaced Parameters, so that they can be put back.

        Raises:
            ValueError: a policy that can't be quantized, or stored weights that are not those of the chosen modules.
        """
        ...


@dataclass(frozen=True)
class FormatWords:
    """A number format in words, for the pages of ``lerobot quantize`` (``quantization.format`` of its record).

    Attributes:
        name: what a policy is said to be in, as in "int8".
        title: what modules are said to be in where there is a line: the name, and what shares a scale.
        sentence: the same within a sentence about weights.
        glossary: terms and what they mean.
    """

    name: str
    title: str
    sentence: str
    glossary: Mapping[str, str]


class StoredWeight(Protocol):
    """One quantized weight as a file has it, which ``Quantizer.install`` takes."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What the file holds, by what its names add to the module's path; ``.weight`` is one of them."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``: the weight that it stands for."""
        ...

    def sqnr_db(self, weight: Tensor) -> float:
        """Its signal-to-quantization-noise ratio against the weight that it was made from."""
        ...


class WeightLayout(Protocol):
    """How the quantized weights of one model lie in its file."""

    def to_json(self) -> dict[str, Any]:
        """``quantization_config`` of the folder's ``config.json``."""
        ...

    def describe(self) -> dict[str, Any]:
        """Figures of the format for the record of ``lerobot quantize``, such as the size of a block."""
        ...

    def specs(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """What ``StoredWeight.tensors`` has of a weight of this shape."""
        ...

    def quantize(self, weight: Tensor) -> StoredWeight:
        """
        Raises:
            ValueError: values that can't be quantized.
        """
        ...


class QuantizedModel(Protocol):
    """A model folder of a quantizer, open for reading; ``embodix.checkpoints.quantized_weights`` has a base class.

    Attributes:
        dropped: name -> specification of the tensors that the file leaves out because nothing reads them.
    """

    dropped: Mapping[str, TensorSpec]

    @property
    def summary(self) -> str:
        """What it holds, as in "21 weights in int8"."""
        ...

    def stored(self) -> Mapping[str, StoredWeight]:
        """Every quantized weight by module path."""
        ...

    def state(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the policy by name, one in memory at a time; quantized ones dequantized to ``dtype``."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class CheckpointQuantizer(Quantizer, Protocol):
    """A quantizer with a file format: ``lerobot quantize`` writes it behind its accuracy gate, every verb loads it.

    Attributes:
        words: its format in words.
    """

    words: FormatWords

    def choose(self, policy: nn.Module, policy_type: str) -> list[ModuleChoice]:
        """Every linear layer and embedding, with what ``install`` does with it (``quantization.selection``)."""
        ...

    def layout(self, converted: Sequence[str], skipped: Sequence[str]) -> WeightLayout:
        """The layout of a model whose modules at these paths are quantized, and at those are not."""
        ...

    def recognises(self, folder: Path) -> bool:
        """Whether a model folder, or a place that is none, holds weights of this quantizer; whatever its options."""
        ...

    def open(self, folder: Path) -> QuantizedModel:
        """Such a folder.

        Raises:
            ValueError: a damaged folder; names the tensor.
        """
        ...

    def recipe_numbers(self, description: Mapping[str, Any]) -> RecipeNumbers:
        """What the gate's formulas need of an installation, from its ``describe``."""
        ...


@runtime_checkable
class ComparesFormats(Protocol):
    """A quantizer that shows other formats beside its own on the page of the gate."""

    def compare_formats(self, weights: Mapping[str, Tensor], layers: Mapping[str, LayerTensors]) -> dict[str, Any]:
        """``gate.formats`` of the record: ``rows`` (one a ``format``), ``columns`` (their ``key`` in a row, ``title``,
        ``small`` print, ``is_share``) and a ``sentence``.

        Args:
            weights: module path -> unquantized weight.
            layers: what the unquantized policy computed.
        """
        ...


@runtime_checkable
class ExportsLanguageModel(Protocol):
    """A quantizer that writes the language model alone, as transformers loads it."""

    def export_language_model(
        self, policy: nn.Module, policy_type: str, source: Path, folder: Path, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """Export it from the quantized model at ``source`` into ``folder``; returns what the record says of it.

        Args:
            policy: its skeleton, for the config.
            dtype: of what is not quantized; None for the format's own choice.
        """
        ...


class TrainingPrecision(Protocol):
    """Computes the matrix products of training in low precision (hook ``register_precisions``)."""

    @staticmethod
    def needs() -> str | None:
        """What it can't be installed without and this installation lacks, or None."""
        ...

    @staticmethod
    def probe(device: torch.device) -> str | None:
        """Why it can't run in units of the device, so that it is emulated, or None."""
        ...

    def install(
        self, policy: nn.Module, policy_type: str, device: torch.device, *, gemm_table: Path | None = None
    ) -> PrecisionInstallation:
        """Compute the policy's chosen layers in low precision.

        Args:
            gemm_table: what ``PrecisionInstallation.gemm_table`` saved before a run was resumed, to decide by unless
                the options name another.
        """
        ...


class PrecisionInstallation(LowPrecision, Protocol):
    """A training precision in place on a policy."""

    @property
    def gemm_table(self) -> GemmTimings | None:
        """The timings that decided which products run in low precision; None where nothing was timed."""
        ...

    def suspended(self) -> AbstractContextManager[None]:
        """The policy's own layers for the time being."""
        ...


class GemmTimings(Protocol):
    """Timings of matrix products that a resumed run decides by again."""

    def save(self, path: Path) -> None:
        """Write them."""
        ...


# --- parallel strategies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLayout:
    """How the processes of a run are arranged. Ranks are counted with the tensor dimension innermost, then pipeline,
    shard and data.

    Attributes:
        data: copies of the parameters, each with samples of its own.
        shard: ranks that share one copy and have samples of their own.
        pipeline: ranks that share the layers of one copy, on the same samples.
        tensor: ranks that share every layer of one copy, on the same samples.
    """

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def num_processes(self) -> int:
        return self.data * self.shard * self.pipeline * self.tensor

    @property
    def num_batches(self) -> int:
        """Ranks that train on samples of their own."""
        return self.data * self.shard

    def batch_index(self, rank: int) -> int:
        """Which of them a rank is; those that share samples have the same."""
        return rank // (self.pipeline * self.tensor)


@dataclass(frozen=True)
class ShardUnit:
    """Modules whose parameters are gathered together, computed with and given up again.

    Attributes:
        modules: paths in the policy; one of them may have its parameters read by the code of another.
        entry: path of the module whose call, or ``embodix.policies.units.call_unit`` of it, computes them all.
    """

    modules: tuple[str, ...]
    entry: str


@dataclass(frozen=True)
class TensorPlan:
    """How the layers of a policy are cut across ranks that share every layer.

    Paths are patterns, as of ``fnmatch``, of the paths of modules; each must match one at least. Every rank has the
    same input. Where a layer's output is a part, what follows computes on that part.

    Attributes:
        columns: linear layers whose output features are cut, each rank keeping its part of the output.
        rows: linear layers whose input features are cut, and come cut; the ranks' outputs are summed.
        rows_of_whole: the same where the input comes whole.
        gathered_columns: linear layers and embeddings whose output features are cut, and gathered.
        gathered_modules: modules of another kind, made of torch's operations: their parameters are cut along the last
            dimension, that of their output features, and their output is gathered.
        shared_columns: as gathered columns, but the output is read by what is cut, as a key/value head by the query
            heads of each rank: the gradients of the output are summed.
        summed_parameters: patterns of parameters that every rank holds whole and reads with what is cut: their
            gradients are summed.
        heads: module -> attribute that counts heads of which every rank has a part.
        counts: what must be divisible by the number of ranks, in words -> how many there are.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    rows_of_whole: tuple[str, ...] = ()
    gathered_columns: tuple[str, ...] = ()
    gathered_modules: tuple[str, ...] = ()
    shared_columns: tuple[str, ...] = ()
    summed_parameters: tuple[str, ...] = ()
    heads: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


class PipelineStages(Protocol):
    """A policy's training step in stages. Every rank of a pipeline prepares the same micro-batches with the same random
    draws; what has parameters is computed by the stage that holds them.

    Attributes:
        cut: which layers each stage has, in words.
    """

    cut: str

    @property
    def parameters(self) -> Sequence[frozenset[str]]:
        """Names of those that each stage holds; each of the policy's is in one."""
        ...

    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """A micro-batch with all that needs no parameters, its random draws included."""
        ...

    def counts(self, prepared: Any) -> TokenCounts:
        """Its tokens."""
        ...

    def sent(self, stage: int, prepared: Any) -> tuple[Tensor, ...]:
        """Tensors on the meta device like those that ``compute`` of a stage gives."""
        ...

    def compute(self, stage: int, prepared: Any, *received: Tensor) -> tuple[Tensor, ...]:
        """What a stage gives, contiguous: to the next, or from the last one to ``loss``.

        Args:
            received: from the stage before; nothing for the first.
        """
        ...

    def loss(self, prepared: Any, *output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The policy's loss of what the last stage gives, and what is logged of it."""
        ...


@dataclass(frozen=True)
class RunTraits:
    """What of a run decides whether a parallel strategy can train it.

    Attributes:
        support: the policy's record.
        packed: the policy computes on packed batches.
        packing: the packer's name.
        composes: the packer composes the batches.
        precision: the training precision's name, ``none`` without one.
        adapters: it trains adapters beside frozen weights.
        mixture: it trains on several data sets.
        streaming: its data set is streamed.
        device: of the policy.
        batch_size: samples of one rank's step.
        evaluates_in_loop: upstream evaluates the policy between steps, in the first rank.
        clips_nothing: the optimizer's ``grad_clip_norm`` is 0, so that upstream's loop takes the norm by itself.
        bins_per_step: micro-batches of a rank's step.
        num_shapes: that a packer for fixed shapes computes micro-batches in; None for any.
        checkpoint_format: ``checkpoint.format``; None where no checkpoint is saved.
        publishes: what upstream does with a whole policy in the first rank when it saves or ends, as an override.
        patches: names of those in force.
    """

    support: PolicySupport
    packed: bool
    packing: str
    composes: bool
    precision: str
    adapters: bool
    mixture: bool
    streaming: bool
    device: str
    batch_size: int
    evaluates_in_loop: bool = False
    clips_nothing: bool = False
    bins_per_step: int = 1
    num_shapes: int | None = None
    checkpoint_format: str | None = None
    publishes: str | None = None
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedBytes:
    """Bytes of one rank.

    Attributes:
        sharded: of parameters of which other ranks hold other parts, or that ranks of other stages do not hold.
        replicated: of parameters that each rank holds whole.
        optimizer: of the optimizer's state, 0 before its first step.
        total: of all parameters of the policy as one process holds them.
    """

    sharded: int
    replicated: int
    optimizer: int
    total: int


class Placement(Protocol):
    """A policy and its optimizer in place on the ranks of a run, as upstream's loop uses them.

    Attributes:
        policy: in the place of the policy: ``train()``, ``forward(batch)``, ``parameters()``.
        optimizer: in the place of the optimizer: ``step()``, ``zero_grad()``, ``param_groups``.
        layout: of the ranks, as it runs.
        strategy: what spreads them, in words, as in "FSDP2".
        backend: what exchanges between them, as in "gloo".
    """

    policy: Any
    optimizer: Any
    layout: RankLayout
    strategy: str
    backend: str

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss, averaged over the ranks that have samples of their own."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the gradients of a micro-batch add up without exchanging them."""
        ...

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of all ranks down to a norm; the norm before, a plain tensor of one element."""
        ...

    def placed_bytes(self) -> PlacedBytes:
        """What this rank holds."""
        ...

    def state(self) -> dict[str, Any]:
        """``model`` and ``optimizer`` by the names of the bare policy's parameters, for torch's distributed
        checkpoints: sharded tensors are DTensors. Every rank must ask."""
        ...

    def optimizer_template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """An empty tensor like this rank's part of a tensor of ``state()["optimizer"]``, for reading into; None where
        it holds nothing of it.

        Args:
            name: of the parameter.
            shape: of the whole tensor; that of the parameter, or another.
        """
        ...

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take the optimizer's state of ``state()["optimizer"]``, possibly saved under another strategy."""
        ...

    def release(self) -> None:
        """Give the policy back what was put on it, at the end of the run."""
        ...


@dataclass(frozen=True)
class ComputedPart:
    """A micro-batch whose forward and backward are done.

    Attributes:
        loss: its value, without a graph.
        logged: as the policy's ``forward`` gives it.
        counts: of its tokens.
    """

    loss: Tensor
    logged: dict[str, Any]
    counts: TokenCounts


@runtime_checkable
class ComputesWholeSteps(Protocol):
    """A placement that runs forward and backward of a step's micro-batches together; its ``backward`` does nothing."""

    def forward_step(self, parts: Sequence[Mapping[str, Any]]) -> Sequence[ComputedPart]:
        """All micro-batches of a step, forward and backward, their gradients averaged over the ranks that have samples
        of their own; every rank must call.

        Raises:
            ValueError: micro-batches that can't be computed together; nothing has been computed then.
        """
        ...


@runtime_checkable
class TellsNeeds(Protocol):
    """A registered strategy's class that needs more than an install of embodix brings, for ``embodix doctor``."""

    @staticmethod
    def needs() -> str | None:
        """What is missing here and how to get it, None where nothing is; looked for without importing it."""
        ...


class ParallelStrategy(Protocol):
    """How a training step is spread over processes (hook ``register_parallel_strategies``).

    Its options are keyword arguments with defaults.

    Attributes:
        name: as it is registered, and its option of the group ``parallel``.
        keeps_whole: every rank has the whole policy and the whole state of its optimizer, as the host made
            them, so that it can save, evaluate and publish them.
    """

    name: str
    keeps_whole: bool

    def layout(self, num_processes: int) -> RankLayout:
        """The arrangement of so many processes.

        Raises:
            ValueError: a number of processes that it can't arrange.
        """
        ...

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterable[str]:
        """Why it can't train such a run, a sentence each: the rule, what was got, the nearest that can."""
        ...

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> Placement | None:
        """Spread a policy, with its fast path installed, and its optimizer; collective over all ranks.

        The optimizer's state, where it has one from a checkpoint, is taken over. None leaves both to the host.
        """
        ...


@dataclass(frozen=True)
class StepUse:
    """What one training step of a policy enters and trains, as counted on the meta device.

    Attributes:
        gradients: names of the parameters that get a gradient.
        entered: entries of units that the forward pass calls, and whether the backward pass comes back to them.
        frozen: names of the parameters that a run of several processes does not train, since nothing reads them.
    """

    gradients: frozenset[str]
    entered: Mapping[str, bool]
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank, counted from the shapes of a policy before there are ranks.

    Attributes:
        placed: what it holds after its first step with AdamW.
        gradients: between two steps' ends, of the parts that it holds.
        exchange: held beside them for the exchange with other ranks, at most.
        sent: in words -> bytes that it sends in one step, each of N ranks sending 1/N of what goes around a ring.
    """

    placed: PlacedBytes
    gradients: int
    exchange: int
    sent: Mapping[str, int]

    @property
    def held(self) -> int:
        """All but activations."""
        placed = self.placed
        return placed.sharded + placed.replicated + placed.optimizer + self.gradients + self.exchange


@runtime_checkable
class CountsRankBytes(Protocol):
    """A parallel strategy that tells what a rank will hold and send, for ``lerobot plan``."""

    def rank_bytes(
        self, policy: Any, layout: RankLayout, support: PolicySupport, use: StepUse, rank: int = 0
    ) -> RankBytes:
        """Of one rank, by the shapes of a policy that may be on the meta device; the first rank holds most.

        Raises:
            NotOfferedError: the policy's record does not say what the strategy needs.
        """
        ...


# --- runners ----------------------------------------------------------------------------------------------------------


class HostRunner(Protocol):
    """How rollout, training and weight exchange are scheduled in a host of many processes. Hook ``register_runners``.

    Building one imports no host. ``workers`` and ``runner_class`` do. ``sizes`` are the run's: environments, processes,
    chunks and batches by name, as its host's plugin plans them.

    Attributes:
        evaluates: whether it can evaluate between training steps.
    """

    evaluates: bool

    def check(self, sizes: Any) -> None:
        """Raise ValueError for sizes it can't run with."""

    def host_settings(self, sizes: Any) -> Mapping[str, Any]:
        """Nodes that are merged over the host's config."""

    def workers(self) -> Any:
        """Its worker classes: ``env``, ``rollout`` and ``actor``."""

    def runner_class(self) -> Any:
        """The host's runner: ``(cfg, actor, rollout, env)``, ``init_workers()``, ``run()``."""


# --- simulators -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one action. `done` ends the episode; so does the simulator's `max_steps`."""

    reward: float
    success: bool
    done: bool


class Simulator(Protocol):
    """One task in one process.

    An episode is a function of the seed given to `reset` and of the actions, whatever ran before: the engine
    repeats an episode that was lost from these alone.

    Attributes:
        instruction: the task in words, "" if it has none.
        max_steps: actions after which an episode is over.
        fps: actions a second, for videos.
    """

    instruction: str
    max_steps: int
    fps: int

    def reset(self, seed: int) -> None:
        """Start the episode of a seed."""

    def observe(self) -> dict[str, Any]:
        """The observation of one gym environment, as LeRobot's `preprocess_observation` takes it without batch
        dimension. Images are rendered here and not in `step`: most steps of a chunk are never looked at."""

    def step(self, action: np.ndarray[Any, Any]) -> StepOutcome:
        """Apply one action (action_dim,)."""

    def frame(self) -> np.ndarray[Any, Any]:
        """What a person would want to see of the present state, uint8 (H, W, 3)."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class HasExpert(Protocol):
    """A simulator with a scripted controller that sees its whole state."""

    def expert_action(self) -> np.ndarray[Any, Any]:
        """The controller's action (action_dim,) in the present state."""


class Simulators(Protocol):
    """The tasks of an environment config (hook ``register_environments``), and how to build their simulators.

    It is pickled and sent to worker processes. What a worker does not need, such as `env_cfg`, should be left out
    of the pickle (``__getstate__``) where its class would import torch.
    """

    @property
    def env_cfg(self) -> Any:
        """LeRobot's config, for its `make_env_pre_post_processors`."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""

    def build(self, task: str) -> Simulator:
        """The simulator of a task."""


@dataclass(frozen=True)
class SimulatorStatus:
    """What there is of a simulator on this machine.

    Attributes:
        found: versions and files, "" where there is nothing.
        problem: why it can't run and what to do, None where it can.
    """

    found: str
    problem: str | None


@runtime_checkable
class TellsStatus(Protocol):
    """A registered environment's class that knows what there is of its simulator, for ``embodix doctor``."""

    @staticmethod
    def status() -> SimulatorStatus:
        """What is here; looked for without building or importing the simulator."""
        ...


@runtime_checkable
class TellsProblems(Protocol):
    """A registered environment's class that knows what would stop it on this machine."""

    @staticmethod
    def problems(fields: Mapping[str, Any]) -> list[str]:
        """Why an environment with these fields of the config can't run here, one sentence a reason; none where it can.

        Nothing is built. LeRobot's own environment is asked about too where ``embodix_<its type>`` stands in for it.
        """
        ...
