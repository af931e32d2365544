# SPDX-License-Identifier: Apache-2.0
"""What a policy computes on held-out samples: losses, gradients and activations of chosen layers, action chunks.

Two recordings of one policy in two precisions, on the same samples, noise and times, are compared number by number. The
other of float32 and bfloat16 is the yardstick for what a lower precision does to the same policy.

Shape suffixes: B samples, T action steps, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from embodix.policies.support import support_of
from embodix.quantization.accuracy import (
    ChunkAccuracy,
    Comparison,
    LayerAccuracy,
    LossAccuracy,
    action_errors,
    cosines,
    relative_error,
    sqnr_db,
)

Batch = Mapping[str, Any]
WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_ELEMENTS = 2**18  # of one layer's tensor in one batch; of larger ones, rows spread evenly are kept


@dataclass
class LayerTensors:
    """What one layer saw, batch by batch: rows of its inputs, outputs, and the loss's gradient at its outputs.

    ``weight_gradient`` is the sum over batches, None where its weight is not trained.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    weight_gradient: Tensor | None = None


@dataclass
class Recording:
    """One policy in one precision.

    Attributes:
        losses: of each batch.
        layers: the watched layers that were computed, in the order of their first call.
        states: the denoising states of all samples after each step, ``[B, T, A]`` in the real action dimensions.
        state_dtypes: of the states, as they were computed.
        chunks: ``[B, T, A]`` in physical units.
    """

    losses: list[float]
    layers: dict[str, LayerTensors]
    states: list[Tensor]
    state_dtypes: list[str]
    chunks: Tensor


class AccuracyProbe:
    """Runs one policy, installed as it is at that moment, on the same samples, noise and times.

    Args:
        policy: with a packed computation, whose action sampler can be watched.
        postprocess: the policy's own, from normalised to physical actions.
        batches: preprocessed, with actions.
        seed: of noise and times.
    """

    def __init__(
        self, policy: Any, postprocess: Callable[[Tensor], Tensor], batches: Sequence[Batch], seed: int
    ) -> None:
        self._policy, self._postprocess, self._batches, self._seed = policy, postprocess, list(batches), seed
        self._num_dims = int(policy.config.output_features["action"].shape[0])

    @property
    def num_samples(self) -> int:
        return sum(len(batch["action"]) for batch in self._batches)

    def record(self, paths: Sequence[str]) -> Recording:
        """Losses and gradients, then action chunks, of every batch; no gradient is left in the policy.

        Args:
            paths: the layers to watch.
        """
        modules = {path: self._policy.get_submodule(path) for path in paths}
        layers: dict[str, LayerTensors] = {}
        losses = [self._loss(index, batch, modules, layers) for index, batch in enumerate(self._batches)]
        watched = [self._chunk(index, batch) for index, batch in enumerate(self._batches)]
        steps = list(zip(*watched, strict=True))
        dtypes = sorted({str(state.dtype) for states in watched for state in states})
        real = [torch.cat([state[..., : self._num_dims].float().cpu() for state in step]) for step in steps]
        return Recording(losses, layers, real, dtypes, self._physical(real[-1]))

    def compare(self, reference: Recording, got: Recording, words: tuple[str, str], names: Sequence[str]) -> Comparison:
        """One recording against another.

        Args:
            words: what the reference and the other are.
            names: of the action dimensions.
        """
        loss, got_loss = (sum(recording.losses) / len(recording.losses) for recording in (reference, got))
        return Comparison(
            reference=words[0],
            got=words[1],
            num_samples=self.num_samples,
            chunk=self._compare_chunks(reference, got, names),
            loss=LossAccuracy(loss, got_loss, self._velocity_power()),
            layers=[
                _compare_layer(path, order, self._shape(path), reference.layers[path], layer)
                for order, (path, layer) in enumerate(got.layers.items(), start=1)
            ],
        )

    def _loss(
        self, index: int, batch: Batch, modules: Mapping[str, nn.Module], layers: dict[str, LayerTensors]
    ) -> float:
        watched: dict[str, list[Tensor]] = {}

        def hook(path: str) -> Callable[..., None]:
            def seen(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
                layer = layers.setdefault(path, LayerTensors())
                if arguments[0].is_floating_point():
                    layer.inputs.append(kept_rows(arguments[0]))
                layer.outputs.append(kept_rows(output))
                watched.setdefault(path, []).append(output)

            return seen

        handles = [module.register_forward_hook(hook(path)) for path, module in modules.items()]
        try:
            torch.manual_seed(self._seed + index)
            with torch.enable_grad(), DrawsInFloat32():
                loss, _ = self._policy.forward(dict(batch))
        finally:
            for handle in handles:
                handle.remove()
        _keep_gradients(loss, watched, modules, layers)
        return float(loss.detach())

    def _chunk(self, index: int, batch: Batch) -> list[Tensor]:
        """The denoising states after each step, the last one the chunk; padded dimensions included."""
        generator = torch.Generator().manual_seed(self._seed + index)
        shape = support_of(self._policy.config.type).noise_shape(self._policy, len(batch["action"]))
        noise_BTA = torch.randn(shape, generator=generator).to(self._policy.config.device)
        states: list[Tensor] = []
        self._policy.predict_action_chunk(
            dict(batch), noise=noise_BTA, observe=lambda _, state: states.append(state.clone())
        )
        return states

    def _physical(self, chunk_BTA: Tensor) -> Tensor:
        """One action at a time, as the policy acts."""
        device = self._policy.config.device
        steps = [self._postprocess(chunk_BTA[:, step].to(device)) for step in range(chunk_BTA.shape[1])]
        return torch.stack(steps, dim=1).float().cpu()

    def _compare_chunks(self, reference: Recording, got: Recording, names: Sequence[str]) -> ChunkAccuracy:
        pairs = list(zip(reference.states, got.states, strict=True))
        by_step = [cosines(one, other) for one, other in pairs]
        unit_A = self._physical(torch.ones(1, 1, self._num_dims)) - self._physical(torch.zeros(1, 1, self._num_dims))
        return ChunkAccuracy(
            cosine_by_step=[float(cosine.mean()) for cosine in by_step],
            worst_by_step=[float(cosine.min()) for cosine in by_step],
            relative_error=relative_error(*pairs[-1]),
            dimensions=action_errors(
                reference.chunks,
                got.chunks,
                unit_A[0, 0].abs(),
                names or [f"action {index}" for index in range(self._num_dims)],
            ),
            state_dtypes=got.state_dtypes,
        )

    def _velocity_power(self) -> float:
        """Mean square of noise minus action: noise has unit variance."""
        actions = torch.cat([batch["action"][..., : self._num_dims].flatten().float().cpu() for batch in self._batches])
        return 1.0 + float(actions.square().mean())

    def _shape(self, path: str) -> tuple[int, ...]:
        return tuple(self._policy.get_submodule(path).weight.shape)


class DrawsInFloat32(TorchFunctionMode):
    """Inside, ``torch.randn`` draws in float32 and rounds: in bfloat16 a stream would give other numbers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is not torch.randn or options.get("dtype") in (None, torch.float32):
            return func(*args, **options)
        dtype = options.pop("dtype")
        return func(*args, dtype=torch.float32, **options).to(dtype)


def kept_rows(tensor: Tensor) -> Tensor:
    """A float32 copy of the tensor as rows, on the CPU; of a large one, rows spread evenly."""
    rows = tensor.detach().flatten(0, -2) if tensor.dim() > 1 else tensor.detach()[None]
    num_kept = max(1, MAX_ELEMENTS // rows.shape[1])
    if len(rows) > num_kept:
        rows = rows[torch.linspace(0, len(rows) - 1, num_kept, device=rows.device).long()]
    return rows.to("cpu", torch.float32, copy=True)


def _keep_gradients(
    loss: Tensor,
    watched: Mapping[str, Sequence[Tensor]],
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, LayerTensors],
) -> None:
    """Gradients at the watched outputs and of the trained weights, without any of the policy's ``.grad``."""
    outputs = [(path, output) for path, seen in watched.items() for output in seen if output.requires_grad]
    weights: list[tuple[str, Any]] = [(path, modules[path].weight) for path in watched]
    weights = [(path, weight) for path, weight in weights if weight.requires_grad]
    wanted = [tensor for _, tensor in (*outputs, *weights)]
    if not wanted:
        return
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    for (path, _), gradient in zip(outputs, gradients[: len(outputs)], strict=True):
        if gradient is not None:
            layers[path].output_gradients.append(kept_rows(gradient))
    for (path, _), gradient in zip(weights, gradients[len(outputs) :], strict=True):
        if gradient is not None:
            kept, before = kept_rows(gradient), layers[path].weight_gradient
            layers[path].weight_gradient = kept if before is None else before + kept


def _compare_layer(
    path: str, order: int, shape: tuple[int, ...], reference: LayerTensors, got: LayerTensors
) -> LayerAccuracy:
    accuracy = LayerAccuracy(
        path=path,
        shape=shape,
        order=order,
        input_db=_sqnr_of_parts(reference.inputs, got.inputs),
        output_db=_sqnr_of_parts(reference.outputs, got.outputs),
        output_gradient_db=_sqnr_of_parts(reference.output_gradients, got.output_gradients),
    )
    one, other = reference.weight_gradient, got.weight_gradient
    if one is None or other is None:
        return accuracy
    cosine = float(cosines(one[None], other[None]))
    return replace(accuracy, weight_gradient_db=sqnr_db(one, other), weight_gradient_cosine=cosine)


def _sqnr_of_parts(reference: Sequence[Tensor], got: Sequence[Tensor]) -> float | None:
    """Of all batches together; None where one side has nothing."""
    if not reference or not got:
        return None
    return sqnr_db(torch.cat(list(reference)), torch.cat(list(got)))


def compute_dtype(policy: Any) -> torch.dtype:
    """bfloat16 where the policy holds such weights or opens bfloat16 autocast itself, else float32.

    Raises:
        ValueError: float16 weights.
    """
    dtypes = {parameter.dtype for parameter in policy.parameters()}
    if torch.float16 in dtypes:
        raise ValueError(
            "float16 is refused: flow matching was seen to leave its path in it (its range ends at 65504 and its small "
            "values vanish). Load the checkpoint in bfloat16 or float32: policy.dtype=bfloat16."
        )
    in_bfloat16 = torch.bfloat16 in dtypes or support_of(policy.config.type).own_autocast(policy.config) == "bfloat16"
    return torch.bfloat16 if in_bfloat16 else torch.float32


@contextmanager
def other_precision(policy: Any) -> Iterator[torch.dtype]:
    """The policy in bfloat16 where it computes in float32, and the other way round; put back bit for bit.

    A policy with an autocast of its own has that switched. Another one in float32 runs under autocast; one that holds
    bfloat16 weights gets them in float32, which takes their memory twice more for the duration.
    """
    own = compute_dtype(policy)
    support = support_of(policy.config.type)
    if support.own_autocast(policy.config) is not None:
        other = torch.bfloat16 if own is torch.float32 else torch.float32
        with support.switched_autocast(policy, WORDS[other]):
            yield other
    elif own is torch.float32:
        with torch.autocast(torch.device(str(policy.config.device)).type, torch.bfloat16):
            yield torch.bfloat16
    else:
        with _in_float32(policy):
            yield torch.float32


@contextmanager
def _in_float32(policy: Any) -> Iterator[None]:
    originals = [(parameter, parameter.data) for parameter in policy.parameters()]
    try:
        for parameter, data in originals:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data
