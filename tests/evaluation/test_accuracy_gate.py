# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate on small policies: it passes sound block FP8, refuses what is broken, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from embodix import plugins
from embodix.policies.settings import FastPathSettings
from embodix.quantization.accuracy_gate import GateResult, run_gate, run_low_precision_gate
from embodix.quantization.gate_rules import RecipeNumbers
from embodix.quantization.held_out import HeldOutBatches
from embodix.quantization.selection import choose_modules
from embodix.schema.gate import AccuracyGateSettings
from embodix_fp8.block_weight import BlockScaledWeight
from embodix_fp8.blocks import ScaledWeight, quantize_blocks
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_fp8.precision.block_scaling import BlockScaledFp8
from embodix_groot import testing as groot
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05 import testing as pi05
from embodix_pi05.wrapper import Pi05Wrapper

SETTINGS = AccuracyGateSettings(num_samples=6, batch_size=3)
EPISODES = [0, 0, 1, 1, 2, 2]
UNITS = torch.tensor([0.1, 0.2, 0.3, 1.0])
WRAPPERS = {"pi05": Pi05Wrapper, "groot": GrootN15Wrapper}


def postprocess(actions_BA: torch.Tensor) -> torch.Tensor:
    """From normalised units to metres, one action at a time."""
    assert actions_BA.dim() == 2
    return actions_BA * UNITS


def small_policy(policy_type: str) -> Any:
    if policy_type == "pi05":
        return pi05.small_pi05()
    return groot.small_groot(tune_llm=True, tune_visual=True)


def held_out(policy: Any, episodes: list[int] = EPISODES) -> HeldOutBatches:
    if policy.config.type == "pi05":
        batches = [pi05.random_batch(policy, [5, 9, 12], seed=seed) for seed in range(2)]
    else:
        batches = [groot.random_batch(policy, [5, 9, 7], [1, 2, 2], seed=seed) for seed in range(2)]
    return HeldOutBatches(batches, episodes, "random samples", ["x", "y", "z", "grip"])


def gate(policy: Any, quantizer: Any, samples: HeldOutBatches | None = None, **settings: Any) -> GateResult:
    samples = samples or held_out(policy)
    return run_gate(policy, policy.config.type, postprocess, samples, quantizer, replace(SETTINGS, **settings))


@dataclass
class Tampered:
    """The block quantizer, then something done to the policy, which ``tamper`` returns the undoing of."""

    tamper: Callable[[Any], Callable[[], None]]
    says: dict[str, Any] | None = None
    recipe_numbers: ClassVar = Fp8BlockQuantizer().recipe_numbers

    def install(self, policy: Any, policy_type: str) -> Any:
        installation = Fp8BlockQuantizer(activations="high").install(policy, policy_type)
        undo = self.tamper(policy)
        uninstall, described = installation.uninstall, installation.describe()
        if self.says:
            described["converted"].append(self.says)

        def both() -> None:
            undo()
            uninstall()

        installation.uninstall, installation.describe = both, lambda: described
        return installation


def language_paths(policy: Any) -> list[str]:
    return [choice.path for choice in choose_modules(policy, policy.config.type) if choice.convert]


@pytest.fixture(scope="module", params=["pi05", "groot"])
def policy(request) -> Any:
    return small_policy(request.param)


@pytest.fixture(scope="module")
def passed(policy) -> GateResult:
    return gate(policy, Fp8BlockQuantizer(activations="high"))


def test_sound_block_fp8_passes_and_everything_is_measured(policy, passed):
    assert passed.passed, passed.failures
    num_layers = len(language_paths(policy))
    assert len(passed.comparison.layers) == num_layers == 21
    assert all(28.85 < layer.weight_db < 34 and layer.weight_error < 0.03 for layer in passed.comparison.layers)
    computed = [layer for layer in passed.comparison.layers if layer.order is not None]
    # Of π0.5's last layer the prefix needs keys and values alone.
    assert len(computed) == (num_layers - 5 if policy.config.type == "pi05" else num_layers)
    assert all(15 < layer.output_db < 60 and 0 < layer.output_gradient_db < 60 for layer in computed)
    assert computed[0].input_db == float("inf") and all(10 < layer.input_db < 60 for layer in computed[3:])
    assert 0 < passed.comparison.loss.relative_change < 0.05
    chunk = passed.comparison.chunk
    assert 0.999 < chunk.cosine < 1 and chunk.worst_cosine <= chunk.cosine
    assert len(chunk.cosine_by_step) == passed.numbers["num_steps"]
    assert chunk.state_dtypes == ["torch.float32"]


def test_errors_of_actions_are_physical(passed):
    dimensions = passed.comparison.chunk.dimensions
    assert [dimension.name for dimension in dimensions] == ["x", "y", "z", "grip"]
    assert [dimension.unit for dimension in dimensions] == pytest.approx(UNITS.tolist())
    assert all(0 < dimension.rms < dimension.largest < dimension.unit / 8 for dimension in dimensions)


def test_bfloat16_stands_beside_it(passed):
    yardstick = passed.yardstick
    assert (yardstick.reference, yardstick.got) == ("float32", "bfloat16")
    assert passed.comparison.chunk.cosine < yardstick.chunk.cosine < 1
    assert passed.comparison.loss.reference == yardstick.loss.reference
    assert all(layer.weight_db is None for layer in yardstick.layers)


def test_the_result_is_json(passed):
    record = json.loads(json.dumps(passed.to_json(), allow_nan=False))
    assert record["passed"] and record["samples"] == {"source": "random samples", "num_samples": 6, "num_episodes": 3}
    assert {row["name"] for row in record["rules"]} >= {"chunk_cosine", "weight_sqnr", "action_error"}
    assert record["comparison"]["layers"][0]["input_db"] == "exact"


def test_nothing_is_left_behind(policy):
    policy.train()
    policy.eval()
    next(policy.parameters()).grad = torch.ones_like(next(policy.parameters()))
    modes = [module.training for module in policy.modules()]
    parameters = {name: (id(p), p.detach().clone(), p.requires_grad) for name, p in policy.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    gate(policy, Fp8BlockQuantizer(activations="fp8", embeddings=True))
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in policy.modules()]
    assert not {"forward", "predict_action_chunk"} & set(vars(policy))
    for name, parameter in policy.named_parameters():
        identity, values, trained = parameters[name]
        assert id(parameter) == identity and torch.equal(parameter, values) and parameter.requires_grad == trained, name
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert torch.equal(gradients[0], torch.ones_like(gradients[0])) and all(g is None for g in gradients[1:])
    next(policy.parameters()).grad = None


def test_the_same_seed_gives_the_same_figures_and_another_other_ones(policy, passed):
    again = gate(policy, Fp8BlockQuantizer(activations="high"))
    assert again.to_json() == passed.to_json()
    assert gate(policy, Fp8BlockQuantizer(activations="high"), seed=1).comparison != passed.comparison


def test_one_observation_or_one_episode_is_refused(policy):
    samples = held_out(policy)
    with pytest.raises(ValueError, match=r"two episodes at least: one observation says nothing.*Got 6 of 1"):
        gate(policy, Fp8BlockQuantizer(), replace(samples, episodes=[4] * 6))
    with pytest.raises(ValueError, match=r"Got 1 of 1"):
        gate(policy, Fp8BlockQuantizer(), replace(samples, episodes=[4]))
    with pytest.raises(ValueError, match=r"num_samples must be at least 2"):
        AccuracyGateSettings(num_samples=1)


def test_a_threshold_can_be_replaced_and_fails_by_name(policy):
    result = gate(policy, Fp8BlockQuantizer(activations="high"), thresholds={"chunk_cosine": 1.0, "weight_sqnr": "35"})
    assert not result.passed
    (weight,) = [failure for failure in result.failures if failure.startswith("weight_sqnr: ")]
    assert weight.endswith(" dB and must be at least 35 dB = 35; 20 more fail, too")
    (chunk,) = [failure for failure in result.failures if failure.startswith("chunk_cosine: ")]
    assert "must be at least 1 = 1.0" in chunk


def failing_rules(result: GateResult) -> set[str]:
    return {rule.rule.name for rule in result.rules if rule.failing}


def test_a_doubled_scale_of_one_block_is_refused(policy):
    path = language_paths(policy)[0]

    def tamper(policy: Any) -> Callable[[], None]:
        module = policy.get_submodule(path)
        scaled = module.weight.scaled
        scale = scaled.scale_inv.clone()
        scale[0, 0] *= 2
        wrong = ScaledWeight(scaled.values, scale, scaled.block)
        module.weight = torch.nn.Parameter(BlockScaledWeight(wrong, module.weight.dtype, module.weight.kernel), False)
        return lambda: None

    result = gate(policy, Tampered(tamper))
    assert {"weight_sqnr", "weight_row_sqnr", "output_sqnr"} <= failing_rules(result)
    assert all(path in failure for failure in result.failures if failure.startswith("weight_"))


@pytest.mark.parametrize("said", [True, False])
def test_quantizing_the_action_head_is_refused(policy, said):
    pattern = {"pi05": "gemma_expert.model.layers.0.mlp.up_proj", "groot": "action_head.model.transformer_blocks.0"}
    (path, *_) = [
        choice.path
        for choice in choose_modules(policy, policy.config.type)
        if choice.kind == "action_head" and pattern[policy.config.type] in choice.path
    ]

    def tamper(policy: Any) -> Callable[[], None]:
        module = policy.get_submodule(path)
        original = module.weight
        module.weight = torch.nn.Parameter(quantize_blocks(original).dequantize(original.dtype), requires_grad=False)

        def undo() -> None:
            module.weight = original

        return undo

    result = gate(policy, Tampered(tamper, {"path": path, "kernel": "dequantize"} if said else None))
    assert "protected_modules" in failing_rules(result)
    assert (path in [layer.path for layer in result.comparison.layers]) == said
    assert any(path in failure for failure in result.failures)


def test_float16_is_refused(policy):
    head = next(reversed(list(policy.parameters())))
    values = head.data
    head.data = values.half()
    try:
        with pytest.raises(ValueError, match="float16 is refused"):
            gate(policy, Fp8BlockQuantizer())
    finally:
        head.data = values


def test_a_quantizer_that_converts_nothing_is_refused(policy):
    class Nothing:
        recipe_numbers = Fp8BlockQuantizer().recipe_numbers

        def install(self, policy, policy_type):
            return self

        def describe(self):
            return {"converted": []}

        def uninstall(self):
            pass

    with pytest.raises(ValueError, match="converted no module"):
        gate(policy, Nothing())


def test_a_state_in_bfloat16_is_refused(policy):
    settings = FastPathSettings(plugins.build("packers", "padding_free", {}), None)
    installation = WRAPPERS[policy.config.type]().install(policy, settings)
    sample = policy.predict_action_chunk

    def rounds_the_state(batch, *, noise, observe):
        return sample(batch, noise=noise, observe=lambda step, state: observe(step, state.bfloat16()))

    policy.predict_action_chunk = rounds_the_state
    try:
        result = gate(policy, Fp8BlockQuantizer(activations="high"))
    finally:
        policy.predict_action_chunk = sample
        installation.uninstall()
    assert "denoising_state" in failing_rules(result)
    assert result.comparison.chunk.state_dtypes == ["torch.bfloat16"]


@pytest.mark.parametrize("policy_type", ["pi05", "groot"])
def test_a_bfloat16_policy_is_its_own_reference(policy_type):
    policy = small_policy("pi05") if policy_type == "pi05" else groot.small_groot(use_bf16=True)
    if policy_type == "pi05":
        policy.model.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    result = gate(policy, Fp8BlockQuantizer(activations="high"))
    assert result.comparison.reference == "bfloat16"
    assert (result.yardstick.reference, result.yardstick.got) == ("float32", "bfloat16")
    assert result.yardstick.chunk.cosine < 1 and result.comparison.chunk.state_dtypes == ["torch.float32"]
    assert result.passed, result.failures
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == before[name].dtype and torch.equal(parameter, before[name]), name


def test_an_installed_fast_path_is_measured_as_it_is(policy, passed):
    settings = FastPathSettings(plugins.build("packers", "padding_free", {}), None)
    installation = WRAPPERS[policy.config.type]().install(policy, settings)
    method = policy.predict_action_chunk
    try:
        result = gate(policy, Fp8BlockQuantizer(activations="high"))
        assert policy.predict_action_chunk == method
    finally:
        installation.uninstall()
    assert result.comparison == passed.comparison


def test_a_training_precision_is_judged_by_its_gradients(policy):
    precision, numbers = BlockScaledFp8(kernel="emulated"), RecipeNumbers(num_operands=2, num_gradient_operands=1)
    policy_type = policy.config.type

    def install() -> Any:
        return precision.install(policy, policy_type, torch.device("cpu"))

    result = run_low_precision_gate(
        policy, policy_type, postprocess, held_out(policy), install, lambda _: numbers, SETTINGS
    )
    assert result.passed, result.failures
    computed = [layer for layer in result.comparison.layers if layer.order is not None]
    assert len(computed) == (16 if policy_type == "pi05" else 21)
    assert all(layer.weight_gradient_cosine > 0.95 and layer.weight_gradient_db > 8 for layer in computed)
    assert all(layer.weight_db is None for layer in computed)  # master weights are what they were
    by_rule = {rule.rule.name: rule for rule in result.rules}
    assert len(by_rule["weight_gradient_sqnr"].verdicts) == len(computed)
    assert not by_rule["weight_sqnr"].verdicts


def test_what_is_rounded_counts():
    recipe_numbers = Fp8BlockQuantizer().recipe_numbers
    linear = {"path": "layers.0.q_proj", "kernel": "dequantize"}
    embedding = {"path": "language_model.embed_tokens", "kernel": "dequantize_rows"}
    assert recipe_numbers({"converted": [linear]}).num_operands == 1
    assert recipe_numbers({"converted": [linear, embedding]}).num_operands == 2
    assert recipe_numbers({"converted": [{**linear, "kernel": "scaled_mm"}, embedding]}).num_operands == 3
