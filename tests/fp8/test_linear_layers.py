# SPDX-License-Identifier: Apache-2.0
"""FP8 layers take the places of the policy's own, hold its parameters, and leave no trace."""

from __future__ import annotations

import copy
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.plugins import build, registry
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import gradients_of
from embodix_fp8.precision import block_scaling, torchao_float8
from embodix_fp8.precision.block_scaling import (
    BlockRoundedLinear,
    BlockScaledFp8,
    EmulatedBlocks,
    TransformerEngineKernel,
    transformer_engine_problem,
)
from embodix_fp8.precision.linear_layers import first_products_problem
from embodix_fp8.precision.torchao_float8 import TorchaoFloat8, TorchaoKernel, fp8_units_problem
from embodix_groot import testing as groot
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05 import testing as pi05
from embodix_pi05.wrapper import Pi05Wrapper

CPU = torch.device("cpu")
PRECISIONS: dict[str, Callable[[], Any]] = {
    "tensorwise": lambda: TorchaoFloat8(recipe="tensorwise"),
    "rowwise": lambda: TorchaoFloat8(recipe="rowwise"),
    "rowwise_with_gw_hp": lambda: TorchaoFloat8(recipe="rowwise_with_gw_hp"),
    "block": BlockScaledFp8,
}
POLICIES = {
    "pi05": (pi05.small_pi05, Pi05Wrapper, lambda p, **k: pi05.random_batch(p, [3, 8], **k)),
    "groot": (
        lambda: groot.small_groot(tune_llm=True, tune_visual=True),
        GrootN15Wrapper,
        lambda p, **k: groot.random_batch(
            p, [5, 5], [2, 2], **k
        ),  # unequal lengths are upstream's fault, not its reference
    ),
}
every_precision = pytest.mark.parametrize("precision", list(PRECISIONS))
every_policy = pytest.mark.parametrize("policy_type", list(POLICIES))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _step(policy: Any, batch: Any) -> tuple[float, dict[str, Any]]:
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss, _ = policy.forward(batch)
    loss.backward()
    return loss.item(), gradients_of(policy)


def _cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return nn.functional.cosine_similarity(ours.double().flatten(), theirs.double().flatten(), dim=0).item()


@every_policy
@every_precision
def test_gradients_stay_near_and_uninstalling_leaves_no_trace(policy_type: str, precision: str) -> None:
    build_policy, _, batch_of = POLICIES[policy_type]
    policy = build_policy()
    batch = batch_of(policy)
    modules, parameters = dict(policy.named_modules()), dict(policy.named_parameters())
    weights = copy.deepcopy(policy.state_dict())
    loss, wanted = _step(policy, batch)

    installation = PRECISIONS[precision]().install(policy, policy_type, CPU)
    assert list(policy.state_dict()) == list(weights)
    assert all(ours is parameters[name] for name, ours in policy.named_parameters())
    fp8_loss, got = _step(policy, batch)
    assert fp8_loss != loss
    assert fp8_loss == pytest.approx(loss, rel=0.05)
    for module in installation.describe()["converted"]:
        ours, theirs = got[module["path"] + ".weight"], wanted[module["path"] + ".weight"]
        if theirs is None or not theirs.any():
            assert ours is None or not ours.any()
        else:
            assert _cosine(ours, theirs) > 0.95, module["path"]  # a random policy this narrow averages little

    installation.uninstall()
    assert dict(policy.named_modules()) == modules
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.state_dict().items())
    again, gradients = _step(policy, batch)
    assert again == loss
    assert all(g is w is None or torch.equal(g, w) for g, w in zip(gradients.values(), wanted.values(), strict=True))


@every_policy
def test_only_the_language_models_layers_are_converted(policy_type: str) -> None:
    policy = POLICIES[policy_type][0]()
    others = {path: module for path, module in policy.named_modules() if isinstance(module, nn.Linear)}
    installation = BlockScaledFp8().install(policy, policy_type, CPU)
    described = installation.describe()
    converted = {module["path"] for module in described["converted"]}
    assert len(converted) == described["num_language_layers"] == 21
    pattern = r".*language_model\.(model\.)?layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    assert all(re.fullmatch(pattern, path) for path in converted)
    assert not any("vision" in path or "gemma_expert" in path or "action_head" in path for path in converted)
    now = dict(policy.named_modules())
    assert {path for path, module in others.items() if now[path] is not module} == converted
    assert converted | {module["path"] for module in described["skipped"]} >= set(others)


@pytest.mark.parametrize("extra", ["action_in_proj", "paligemma_with_expert.gemma_expert.model.layers.0.mlp.up_proj"])
def test_a_layer_outside_of_the_language_model_would_be_seen(extra: str) -> None:
    """Twin of the test above: with one more layer converted, the loss moves."""
    policy = pi05.small_pi05()
    batch = pi05.random_batch(policy, [3, 8])
    BlockScaledFp8().install(policy, "pi05", CPU)
    chosen = _step(policy, batch)[0]
    kernel_module = type(policy.get_submodule(_language_layer(policy))).of(policy.get_submodule(f"model.{extra}"))
    parent, _, name = f"model.{extra}".rpartition(".")
    setattr(policy.get_submodule(parent), name, kernel_module)
    assert _step(policy, batch)[0] != chosen


def _language_layer(policy: Any) -> str:
    return next(path for path, _ in policy.named_modules() if path.endswith("language_model.layers.0.self_attn.q_proj"))


@every_policy
@every_precision
def test_packed_batches_compute_what_upstreams_compute(policy_type: str, precision: str) -> None:
    """Both in FP8. Padding rows share scales with valid ones only where a scale spans rows, hence the tolerances."""
    build_policy, wrapper, batch_of = POLICIES[policy_type]
    policy = build_policy()
    batch = batch_of(policy)
    fp8 = PRECISIONS[precision]().install(policy, policy_type, CPU)
    loss, wanted = _step(policy, batch)
    packed = wrapper().install(policy, FastPathSettings(PaddingFreePacker(), SegmentAuto()))
    packed_loss, got = _step(policy, batch)
    assert packed_loss == pytest.approx(loss, rel=5e-3)
    paths = [module["path"] for module in fp8.describe()["converted"]]
    pairs = [(got[f"{path}.weight"], wanted[f"{path}.weight"]) for path in paths]
    cosines = [_cosine(ours, theirs) for ours, theirs in pairs if theirs is not None and theirs.any()]
    assert len(cosines) >= 14
    assert min(cosines) > 0.97
    packed.uninstall()
    fp8.uninstall()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_any_number_of_rows_gives_the_same_numbers(recipe: str) -> None:
    """The rows that fill a product up to a multiple of 16 change nothing."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    parent = nn.Module()
    parent.layer = layer
    fp8 = TorchaoKernel(recipe, "for the test", compiled=False).convert(layer)  # type: ignore[arg-type]
    for num_rows in (1, 7, 16, 33):
        x, slope = torch.randn(num_rows, 32), torch.randn(num_rows, 48)
        results = []
        for num_extra in (0, -num_rows % 16):
            padded_x = nn.functional.pad(x, (0, 0, 0, num_extra)).requires_grad_()
            padded_slope = nn.functional.pad(slope, (0, 0, 0, num_extra))
            layer.weight.grad = None
            out = fp8(padded_x)
            out.backward(padded_slope)
            results.append((out[:num_rows], padded_x.grad[:num_rows], layer.weight.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_compiled_layers_are_built_once_a_shape_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation: what is captured, and how often. torch stops compiling a function after eight times."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    shapes = [(32, 32), (32, 16), (32, 64), (64, 32), (48, 32)]
    layers = [nn.Linear(*sizes, bias=False) for sizes in shapes for _ in range(3)]
    plain, compiled = (TorchaoKernel("rowwise", "for the test", compiled=flag) for flag in (False, True))
    for num_rows in (7, 33, 50):
        for layer in layers:
            x = torch.randn(num_rows, layer.in_features, requires_grad=True)
            results = []
            for kernel in (plain, compiled):
                out = kernel.convert(layer)(x)
                results.append([out, *torch.autograd.grad(out.square().sum(), (x, layer.weight))])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs)
    assert counters["stats"]["unique_graphs"] == len(shapes)
    assert not counters["graph_break"]


@every_precision
def test_autocast_and_checkpointing_compose(precision: str) -> None:
    policy = pi05.small_pi05(gradient_checkpointing=True)
    batch = pi05.random_batch(policy, [3, 8])
    Pi05Wrapper().install(policy, FastPathSettings(PaddingFreePacker(), SegmentAuto()))
    policy.model.gradient_checkpointing_enable()
    PRECISIONS[precision]().install(policy, "pi05", CPU)
    loss, gradients = _step(policy, batch)
    policy.model.gradient_checkpointing_disable()
    stored_loss, stored = _step(policy, batch)
    assert loss == stored_loss
    assert all(g is s is None or torch.equal(g, s) for g, s in zip(gradients.values(), stored.values(), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        half_loss, half = _step(policy, batch)
    assert half_loss == pytest.approx(loss, rel=5e-2)
    path = _language_layer(policy) + ".weight"
    assert half[path].dtype == torch.float32
    assert half[path].any()


def test_evaluation_mode_is_taken_over_both_ways() -> None:
    policy = pi05.small_pi05()
    installation = BlockScaledFp8().install(policy, "pi05", CPU)
    policy.eval()
    installation.uninstall()
    assert not any(module.training for module in policy.modules())


def test_suspending_gives_the_policys_own_numbers_for_the_time_being() -> None:
    policy = pi05.small_pi05()
    batch = pi05.random_batch(policy, [3, 8])
    without = _step(policy, batch)[0]
    installation = BlockScaledFp8().install(policy, "pi05", CPU)
    with_fp8 = _step(policy, batch)[0]
    with installation.suspended():
        assert _step(policy, batch)[0] == without
    assert _step(policy, batch)[0] == with_fp8


@pytest.mark.parametrize(
    ("dtype", "frozen", "refused"),
    [
        (torch.float16, False, True),
        (torch.float16, True, True),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
    ],
)
def test_trained_weights_must_be_in_float32(dtype: torch.dtype, frozen: bool, refused: bool) -> None:
    policy = pi05.small_pi05()
    language_model = policy.model.paligemma_with_expert.paligemma.model.language_model
    language_model.to(dtype).requires_grad_(not frozen)
    if refused:
        with pytest.raises(ValueError, match=rf"master weights in float32.*q_proj is in {dtype}"):
            BlockScaledFp8().install(policy, "pi05", CPU)
    else:
        described = BlockScaledFp8().install(policy, "pi05", CPU).describe()
        assert described["weights"] == ["torch.bfloat16"]


def test_layers_of_no_multiple_of_sixteen_are_skipped_with_the_reason() -> None:
    sizes = {**pi05.SMALL_ARCHITECTURE["language"], "mlp_dim": 60}
    policy = pi05.small_pi05({**pi05.SMALL_ARCHITECTURE, "language": sizes})
    described = TorchaoFloat8().install(policy, "pi05", CPU).describe()
    assert {module["path"].rpartition(".")[2] for module in described["converted"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip
    reasons = {module["reason"] for module in described["skipped"] if "language_model.layers" in module["path"]}
    assert reasons == {
        "FP8 products take multiples of 16 inputs and outputs; got 32 and 60",
        "FP8 products take multiples of 16 inputs and outputs; got 60 and 32",
    }


def test_emulation_is_announced_with_its_price_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    policy = pi05.small_pi05()
    torchao_float8._announce.cache_clear()
    for precision in (TorchaoFloat8(), BlockScaledFp8()):
        caplog.clear()
        for _ in range(2):  # announced once
            precision.install(policy, "pi05", CPU).uninstall()
        BlockScaledFp8(kernel="emulated").install(policy, "pi05", CPU).uninstall()  # asked for
        (record,) = [record for record in caplog.records if record.message.startswith("precision:")]
        assert "FP8 is emulated" in record.message and "slower than without it" in record.message
    for strict in (TorchaoFloat8(strict=True), BlockScaledFp8(strict=True)):
        with pytest.raises(ValueError, match=r"strict=true refuses to emulate FP8: .*this run is on cpu"):
            strict.install(policy, "pi05", CPU)


def test_missing_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"torchao can't be imported.*install embodix\[fp8\], or set precision=none"):
        TorchaoFloat8().install(pi05.small_pi05(), "pi05", CPU)


def test_probes_give_reasons_and_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        """Transformer Engine without its CUDA libraries: importing it raises RuntimeError."""

        def find_spec(self, name: str, *rest: Any) -> None:
            if name.startswith("transformer_engine"):
                raise RuntimeError("cudart shared object not found")

    assert "this run is on cpu" in str(transformer_engine_problem(CPU))
    assert "this run is on cpu" in str(fp8_units_problem(CPU))
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    reason = transformer_engine_problem(torch.device("cuda"))
    assert reason is not None
    assert "RuntimeError: cudart shared object not found" in reason and "install embodix[te]" in reason


@pytest.fixture
def stand_in_for_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What this code calls of Transformer Engine, with its demands on shapes. Lists the recipes it was entered with."""
    entered: list[Any] = []

    class Linear(nn.Module):
        def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: Any, device: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None

        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            assert len(rows) % 128 == 0
            return nn.functional.linear(rows, self.weight, self.bias)

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        assert enabled
        entered.append(fp8_recipe)
        yield

    modules = {
        "transformer_engine.pytorch": {"Linear": Linear, "fp8_autocast": fp8_autocast},
        "transformer_engine.common.recipe": {"Float8BlockScaling": lambda: "block scaling"},
    }
    for name in ("transformer_engine", "transformer_engine.common", *modules):
        module = types.ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["transformer_engine"], "pytorch", sys.modules["transformer_engine.pytorch"], False)
    block_scaling._layer_class.cache_clear()
    yield entered
    block_scaling._layer_class.cache_clear()


@pytest.mark.parametrize("has_bias", [False, True])
def test_transformer_engines_layer_takes_any_rows_and_adds_nothing_to_checkpoints(
    stand_in_for_transformer_engine: list[Any], has_bias: bool
) -> None:
    layer = nn.Linear(128, 256, bias=has_bias)
    twin = TransformerEngineKernel().convert(layer)
    assert twin.weight is layer.weight and twin.bias is layer.bias
    assert list(twin.state_dict()) == list(layer.state_dict())
    x = torch.randn(3, 43, 128, requires_grad=True)
    ours, theirs = (torch.autograd.grad(m(x).square().sum(), (x, layer.weight)) for m in (twin, layer))
    torch.testing.assert_close(twin(x), layer(x))
    torch.testing.assert_close(ours, theirs)
    assert set(stand_in_for_transformer_engine) == {"block scaling"}
    assert "whole blocks of 128" in str(TransformerEngineKernel().shape_problem((256, 96)))


class _Broken(EmulatedBlocks):
    """Fails, or computes something else."""

    def __init__(self, factor: float | None) -> None:
        super().__init__("for the test")
        self._factor = factor

    def convert(self, layer: nn.Linear) -> nn.Module:
        twin = BlockRoundedLinear.of(layer)
        factor = self._factor
        if factor is not None:
            twin.register_forward_hook(lambda module, inputs, output: output * factor)
        else:
            twin.weight = nn.Parameter(torch.zeros(3, 3))
        return twin


def test_a_kernel_whose_first_products_fail_or_are_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.get_rng_state()
    assert first_products_problem(EmulatedBlocks("for the test"), CPU) is None
    assert "are off by 0.5" in str(first_products_problem(_Broken(0.5), CPU))
    assert "failed: RuntimeError" in str(first_products_problem(_Broken(None), CPU))
    assert torch.equal(torch.get_rng_state(), state)

    monkeypatch.setattr(block_scaling, "transformer_engine_problem", lambda device: None)
    monkeypatch.setattr(block_scaling, "TransformerEngineKernel", lambda: _Broken(0.5))
    described = BlockScaledFp8().install(pi05.small_pi05(), "pi05", CPU).describe()
    assert "are off by 0.5" in described["fallback"]
    with pytest.raises(ValueError, match=r"strict=true refuses to emulate FP8: the first products"):
        BlockScaledFp8(strict=True).install(pi05.small_pi05(), "pi05", CPU)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="recipe is one of tensorwise, rowwise, rowwise_with_gw_hp; got 'columnwise'"):
        TorchaoFloat8(recipe="columnwise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel is one of auto, emulated; got 'cutlass'"):
        BlockScaledFp8(kernel="cutlass")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"known for groot and pi05; got policy\.type=act"):
        BlockScaledFp8().install(pi05.small_pi05(), "act", CPU)


def test_every_registered_precision_can_be_built_from_its_options() -> None:
    for name in registry().names("precisions"):
        assert callable(build("precisions", name, {}).install)
