# SPDX-License-Identifier: Apache-2.0
"""Forward + backward of GR00T-N1.5: the packed fast path against upstream's batched call, in one process, alternating.

Two small models with 4 language, 9 vision and 6 DiT layers, random weights, 224 px, batch 4, fp32: every width divided
by eight with the real numbers of heads (as in the benchmark of π0.5), and one in which heads have the real size and
the vocabulary the real share. Upstream runs with the faults repaired that stop it from running, and with an
instruction a sample. Its padded batch attends to padding, so losses and gradients are compared with upstream run one
sample at a time. Time is process CPU time; a ratio is the median over repetitions of upstream / fast of the same
repetition.

    python benchmarks/groot_forward_backward.py --repetitions 3 --output benchmarks/results
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.testing.errors import compare_gradients
from embodix.training.flops import flop_counter
from embodix_groot.reference import padding_effect
from embodix_groot.testing import random_batch, run_fast, run_reference, small_groot
from embodix_groot.wrapper import GrootN15Wrapper

ONE_EIGHTH: dict[str, Any] = {
    "vision": {
        "hidden_size": 144,
        "intermediate_size": 544,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
    "language": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "vocab_size": 18960,
    },
    "vl_self_attention": {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 8},
    "action_head": {
        "num_layers": 6,
        "num_attention_heads": 32,
        "attention_head_dim": 6,
        "hidden_size": 128,
        "num_future_tokens": 32,
        "num_embodiments": 32,
        "num_inference_timesteps": 4,
    },
    "dropout": 0.0,
}
# Heads of the real size, an eighth as many. The vocabulary projection weighs against 4 of 12 language layers what the
# real one weighs against 12.
REAL_PROPORTIONS: dict[str, Any] = {
    **ONE_EIGHTH,
    "vision": {**ONE_EIGHTH["vision"], "num_attention_heads": 2},
    "language": {
        **ONE_EIGHTH["language"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "vocab_size": 6320,
    },
    "vl_self_attention": {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 64},
    "action_head": {**ONE_EIGHTH["action_head"], "num_attention_heads": 4, "attention_head_dim": 48},
}
MODELS = {"one eighth": ONE_EIGHTH, "real proportions": REAL_PROPORTIONS}


@dataclass(frozen=True)
class Scenario:
    """A batch of four, and the ratios asked of it with the backbone frozen and tuned."""

    name: str
    text_lengths: tuple[int, ...]
    num_images: tuple[int, ...]
    wanted_frozen: float
    wanted_tuned: float


SCENARIOS = (
    Scenario("same task, two cameras", (52, 52, 52, 52), (2, 2, 2, 2), 1.25, 1.2),
    Scenario("four tasks, two cameras", (45, 52, 58, 65), (2, 2, 2, 2), 1.36, 1.22),
    Scenario("one to three cameras", (45, 52, 58, 65), (1, 2, 3, 2), 2.0, 1.75),
)


def forward_backward(policy: Any, batch: dict[str, torch.Tensor]) -> float:
    """CPU seconds of one forward + backward on a fixed random stream."""
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    start = time.process_time()
    loss, _ = policy.forward(batch)
    loss.backward()
    return time.process_time() - start


def counted_flops(step: Callable[[], Any]) -> int:
    """FLOPs of a step by torch's counter, the CPU's fused attention included."""
    with flop_counter() as counter:
        step()
    return counter.get_total_flops()


def small_policy(model: str, tuned: bool) -> Any:
    """A policy; what upstream prints while it builds one is kept off the terminal."""
    with contextlib.redirect_stdout(io.StringIO()):
        return small_groot(MODELS[model], tune_llm=tuned, tune_visual=tuned, max_action_dim=32, max_state_dim=64)


def measure(policy: Any, scenario: Scenario, repetitions: int, settings: FastPathSettings) -> dict[str, Any]:
    """Alternate upstream and fast path on the same policy and batch."""
    batch = random_batch(policy, scenario.text_lengths, scenario.num_images)
    reference, effect = run_reference(policy, batch), padding_effect(policy, batch)
    upstream_flops = counted_flops(lambda: forward_backward(policy, batch))
    fast = run_fast(policy, batch, settings)
    comparison = compare_gradients(fast.gradients, reference.gradients)
    installation = GrootN15Wrapper().install(policy, settings)
    fast_flops = counted_flops(lambda: forward_backward(policy, batch))
    counts = installation.token_counts
    assert counts is not None
    installation.uninstall()
    seconds: dict[str, list[float]] = {"upstream": [], "fast": []}
    for _ in range(repetitions):
        seconds["upstream"].append(forward_backward(policy, batch))
        installation = GrootN15Wrapper().install(policy, settings)
        seconds["fast"].append(forward_backward(policy, batch))
        installation.uninstall()
    ratios = sorted(u / f for u, f in zip(seconds["upstream"], seconds["fast"], strict=True))
    return {
        "scenario": scenario.name,
        "attention": settings.describe()["attention"],
        "ratio": statistics.median(ratios),
        "ratio_lowest": ratios[0],
        "ratio_highest": ratios[-1],
        "upstream_seconds": min(seconds["upstream"]),
        "fast_seconds": min(seconds["fast"]),
        "flop_ratio": upstream_flops / fast_flops,
        "loss": reference.loss,
        "loss_relative_difference": abs(fast.loss - reference.loss) / abs(reference.loss),
        "whole_gradient_error": comparison.whole,
        "worst_gradient_error": comparison.worst,
        "gradient_structure_differences": comparison.structure,
        "padding_loss_difference": effect.relative,
        "token_utilisation_upstream": counts.valid / counts.upstream,
        "token_utilisation_fast": counts.utilisation,
        "repetitions": repetitions,
    }


def as_result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The measurements as ``write_benchmark`` lays them out."""
    return {
        "title": "GR00T-N1.5 forward + backward: packed against upstream",
        "setup": "4 language, 9 vision and 6 DiT layers, 224 px, batch 4, fp32. One eighth: every width divided by "
        "eight, head counts and 1/8 of the vocabulary kept. Real proportions: heads of the real size and a vocabulary "
        "whose projection has the real share of the language model. Ratios are upstream's process CPU time over the "
        "fast path's: the median of alternating repetitions in one process, with the lowest and the highest. Loss and "
        "gradients are compared with upstream one sample at a time.",
        "ratios": [
            {
                "model": row["model"],
                "batch": row["scenario"],
                "backbone": row["backbone"],
                "speed ratio": f"**{row['ratio']:.2f}x** ({row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f})",
                "FLOP ratio": f"{row['flop_ratio']:.2f}x",
                "valid tokens": f"{row['token_utilisation_upstream']:.1%}",
                "loss error": f"{row['loss_relative_difference']:.1e}",
                "gradient error": f"{row['whole_gradient_error']:.1e}",
                "attended padding moves upstream's loss by": f"{row['padding_loss_difference']:.1e}",
            }
            for row in rows
        ],
        "reading": "What is saved is padding, the vocabulary logits that upstream computes and discards, and on a CPU "
        "attention: at one eighth heads have 6 to 16 channels, with which torch's fused kernel is slow and the GEMMs "
        "of segment_auto are not. The real model has 48 to 128, where that gains only in causal segments, so the "
        "rows with real proportions say more about it. Nothing here says anything about a GPU.",
        "measurements": rows,
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row that is asked for, printed as it is measured."""
    settings = FastPathSettings(PaddingFreePacker(), SegmentAuto())
    rows: list[dict[str, Any]] = []
    for model in MODELS if options.model is None else (options.model,):
        for tuned in (False, True):
            policy = small_policy(model, tuned)
            for scenario in SCENARIOS if options.scenario is None else (SCENARIOS[options.scenario],):
                wanted = (scenario.wanted_tuned if tuned else scenario.wanted_frozen) if model == "one eighth" else None
                described = {"model": model, "backbone": "tuned" if tuned else "frozen", "wanted_ratio": wanted}
                row = {**described, **measure(policy, scenario, options.repetitions, settings)}
                rows.append(row)
                print(
                    f"{model}, {row['backbone']}, {scenario.name}: {row['ratio']:.2f}x ({row['ratio_lowest']:.2f} to "
                    f"{row['ratio_highest']:.2f}; wanted {wanted}), {row['upstream_seconds']:.2f} s -> "
                    f"{row['fast_seconds']:.2f} s, FLOPs {row['flop_ratio']:.2f}x, loss "
                    f"{row['loss_relative_difference']:.1e}, gradients {row['whole_gradient_error']:.1e} (worst "
                    f"{row['worst_gradient_error']:.1e}), padding {row['padding_loss_difference']:.1e}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", choices=tuple(MODELS), help="one of them; default both")
    parser.add_argument("--scenario", type=int, choices=range(len(SCENARIOS)), help="one of them; default all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    require_quotable(options.allow_dirty)
    write_benchmark(options.output / "groot_forward_backward", as_result(run(options)), options.allow_dirty)


if __name__ == "__main__":
    main()
