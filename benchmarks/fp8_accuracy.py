# SPDX-License-Identifier: Apache-2.0
"""What block-scaled FP8 does to trained policies: the accuracy gate on each recipe, and success in simulation.

The gate compares action chunks after all denoising steps, on samples of the policy's own data set, with the checkpoint
as it is; bfloat16 on the same samples stands beside. Recipes that must be refused are run too: one weight a million
root mean squares large under one scale a tensor, a scale of one block that is off by two, weights rounded to 2 mantissa
bits, and the action head in FP8. Success is read from what ``lerobot eval`` left for a checkpoint and its quantized
copy on the same episodes.

    lerobot quantize outputs/learn/embodix_1000 outputs/fp8/pi05_fp8 --gate
    lerobot eval 'checkpoint={float32: outputs/learn/embodix_1000, fp8: outputs/fp8/pi05_fp8}' \\
        eval.n_episodes=40 hydra.run.dir=outputs/fp8/eval_pi05
    python benchmarks/fp8_accuracy.py --checkpoint pi05=outputs/learn/embodix_1000:data/metaworld_learn \\
        --evaluation pi05=outputs/fp8/eval_pi05
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodix.checkpoints.model_folder import find_model
from embodix.quantization.accuracy_gate import GatedCheckpoint, GateResult, JudgedQuantizer, gated_checkpoint
from embodix.quantization.gate_rules import RecipeNumbers
from embodix.quantization.selection import choose_modules
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.report.evaluation import Evaluation, pair_success, read_evaluation, success_by_task
from embodix.report.quantization_page import cosine
from embodix.report.words import success_words
from embodix.schema.gate import AccuracyGateSettings
from embodix_fp8.blocks import BLOCK, quantize_blocks
from embodix_fp8.fp8_block import Fp8BlockQuantizer

RECIPES: dict[str, dict[str, Any]] = {
    "weights": {"activations": "high"},
    "weights, activations 1x128": {"activations": "fp8"},
    "weights, embeddings": {"activations": "high", "embeddings": True},
    "weights, embeddings, activations 1x128": {"activations": "fp8", "embeddings": True},
}
WIDE_RANGE = 1e6
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BrokenInstallation:
    """Weights replaced by wrongly rounded ones."""

    policy: nn.Module
    originals: Mapping[str, nn.Parameter]

    def describe(self) -> dict[str, Any]:
        converted = [{"path": path, "kernel": "broken"} for path in self.originals]
        return {"name": "broken", "converted": converted}

    def uninstall(self) -> None:
        for path, weight in self.originals.items():
            self.policy.get_submodule(path).weight = weight


@dataclass(frozen=True)
class BrokenQuantizer:
    """Rounds the weights of the language model, or of the action head, by a function that is not to be trusted."""

    round: Round
    kind: str = "language_linear"

    def recipe_numbers(self, description: Mapping[str, Any]) -> RecipeNumbers:
        """As if it were sound e4m3."""
        return RecipeNumbers()

    def install(self, policy: nn.Module, policy_type: str) -> BrokenInstallation:
        paths = [choice.path for choice in choose_modules(policy, policy_type) if choice.kind == self.kind]
        originals = {path: policy.get_submodule(path).weight for path in paths}
        for path, weight in originals.items():
            policy.get_submodule(path).weight = nn.Parameter(self.round(weight.detach()), requires_grad=False)
        return BrokenInstallation(policy, originals)


def in_blocks(weight_NK: Tensor) -> Tensor:
    """Sound rounding, for modules that must not be rounded."""
    return quantize_blocks(weight_NK, BLOCK).dequantize(weight_NK.dtype)


def with_wrong_scale(weight_NK: Tensor) -> Tensor:
    """The first block is twice as large."""
    rounded = in_blocks(weight_NK)
    rounded[: BLOCK[0], : BLOCK[1]] *= 2
    return rounded


def in_two_mantissa_bits(weight_NK: Tensor) -> Tensor:
    """e5m2: the format of gradients."""
    scale = weight_NK.abs().max() / torch.finfo(torch.float8_e5m2).max
    return (weight_NK / scale).to(torch.float8_e5m2).to(weight_NK.dtype) * scale


def per_tensor(weight_NK: Tensor) -> Tensor:
    """One scale for all."""
    return quantize_blocks(weight_NK, (weight_NK.shape[0], weight_NK.shape[1])).dequantize(weight_NK.dtype)


BROKEN: dict[str, BrokenQuantizer] = {
    "one block's scale doubled": BrokenQuantizer(with_wrong_scale),
    "weights in e5m2": BrokenQuantizer(in_two_mantissa_bits),
    "action head in FP8 too": BrokenQuantizer(in_blocks, kind="action_head"),
}


@contextmanager
def one_weight_of_a_wide_range(policy: nn.Module, policy_type: str) -> Iterator[None]:
    """The policy with one weight a layer made ``WIDE_RANGE`` root mean squares large: another policy, whose other
    weights one scale a tensor pushes out of the format. It is compared with its own quantized self."""
    weights = [
        policy.get_submodule(choice.path).weight for choice in choose_modules(policy, policy_type) if choice.convert
    ]
    kept = [weight.detach()[0, 0].clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight[0, 0] = WIDE_RANGE * weight.square().mean().sqrt()
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight[0, 0] = value


def gate_row(name: str, recipe: str, result: GateResult) -> dict[str, Any]:
    """What the gate measured, a row of the table."""
    chunk, layers = result.comparison.chunk, result.comparison.layers
    return {
        "policy": name,
        "recipe": recipe,
        "passes": result.passed,
        "cosine": cosine(chunk.cosine),
        "worst sample": cosine(chunk.worst_cosine),
        "bfloat16": cosine(result.yardstick.chunk.cosine),
        "error of chunk": chunk.relative_error,
        "largest action error, normalised": max(d.largest / d.unit for d in chunk.dimensions),
        "loss change": result.comparison.loss.relative_change,
        "weight error": max(layer.weight_error or 0.0 for layer in layers),
        "least weight SQNR": min(layer.weight_db for layer in layers if layer.weight_db is not None),
        "least output SQNR": min(layer.output_db for layer in layers if layer.output_db is not None),
        "least gradient SQNR": min((x.output_gradient_db for x in layers if x.output_gradient_db), default=None),
    }


def refusal_row(name: str, recipe: str, result: GateResult) -> dict[str, Any]:
    """Which rules refuse a recipe."""
    broken = [rule.rule.name for rule in result.rules if rule.failing]
    chunk = result.comparison.chunk
    return {
        "policy": name,
        "recipe": recipe,
        "refused": not result.passed,
        "cosine": cosine(chunk.cosine),
        "by": broken,
    }


def judge_checkpoint(name: str, gated: GatedCheckpoint) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every recipe, then those that must be refused."""
    rows = [gate_row(name, recipe, gated.judge(Fp8BlockQuantizer(**options))) for recipe, options in RECIPES.items()]
    refusals = [refusal_row(name, recipe, gated.judge(quantizer)) for recipe, quantizer in BROKEN.items()]
    wide: dict[str, JudgedQuantizer] = {
        "one scale a tensor": BrokenQuantizer(per_tensor),
        "128 x 128 blocks, of which a layer has 1 or 2": Fp8BlockQuantizer(activations="high"),
    }
    with one_weight_of_a_wide_range(gated.policy, gated.policy.config.type):
        for recipe, quantizer in wide.items():
            words = f"one weight a layer {WIDE_RANGE:.0e} root mean squares large, {recipe}"
            refusals.append(refusal_row(name, words, gated.judge(quantizer)))
    return rows, refusals


def read_pair(folder: Path) -> tuple[Evaluation, Evaluation]:
    """The checkpoint and its quantized copy in a folder of ``lerobot eval``: ``float32`` or ``bfloat16``, and ``fp8``.

    Raises:
        ValueError: not both are there.
    """
    found = {name: read_evaluation(folder / name / "results.json") for name in ("float32", "bfloat16", "fp8")}
    reference, quantized = found["float32"] or found["bfloat16"], found["fp8"]
    if reference is None or quantized is None:
        raise ValueError(f"{folder} must hold the evaluations float32 (or bfloat16) and fp8, as in this script's help.")
    return reference, quantized


def success_rows(name: str, pair: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Success of each task before and after, and the pairs of all."""
    reference, quantized = pair
    before, after = success_by_task(reference.episodes), success_by_task(quantized.episodes)
    most_steps = reference.details["env"]["episode_length"]
    return [
        {
            "policy": name,
            "task": task,
            "steps at most": most_steps,
            reference.name: success_words(before[task]),
            "fp8": success_words(after[task]),
        }
        for task in before
    ]


def paired_row(name: str, pair: Sequence[Evaluation]) -> dict[str, Any]:
    """Exact McNemar test and the 95 % score interval of the difference, FP8 minus the checkpoint as it is."""
    paired = pair_success(*pair)
    assert paired is not None, "both ran the same episodes"
    return {"policy": name, **asdict(paired)}


def named(argument: str) -> tuple[str, str]:
    """``name=value``."""
    name, _, value = argument.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"expected name=value, got {argument!r}")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", action="append", type=named, default=[], help="name=run:data set")
    parser.add_argument("--evaluation", action="append", type=named, default=[], help="name=folder of lerobot eval")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fp8_accuracy")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    refusals: list[dict[str, Any]] = []
    samples: dict[str, str] = {}
    for name, value in options.checkpoint:
        run, _, root = value.partition(":")
        source = find_model(run)
        cfg = source.compose_run(source.policy_type(), [])
        settings = AccuracyGateSettings(num_samples=options.num_samples, dataset_root=root or None)
        tokenizer = str(Path(root) / "tokenizer") if root else None
        with gated_checkpoint(source, cfg, settings, tokenizer=tokenizer) as gated:
            samples[name] = f"{len(gated.samples.episodes)} samples of {gated.samples.description}"
            measured, refused = judge_checkpoint(name, gated)
        rows += measured
        refusals += refused
    pairs = {name: read_pair(Path(folder)) for name, folder in options.evaluation}
    result = {
        "title": "Block-scaled FP8 and trained policies",
        "setting": "language model's decoder in e4m3 with 128 x 128 block scales, all else as it was; action chunks "
        "after all denoising steps from the same noise, against the checkpoint as it is (float32)",
        "samples": samples,
        "accuracy": rows,
        "recipes that must be refused": refusals,
        "success": [row for name, pair in pairs.items() for row in success_rows(name, pair)],
        "pairs on the same episodes": [paired_row(name, pair) for name, pair in pairs.items()],
    }
    for path in write_benchmark(options.output, result, options.allow_dirty):
        print(path)


if __name__ == "__main__":
    main()
