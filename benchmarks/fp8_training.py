# SPDX-License-Identifier: Apache-2.0
"""FP8 training against float32 on the same samples and random stream: loss, gradients and rounding of every layer.

A small π0.5 on the four tasks of `lerobot data learn_metaworld`, packed, by `lerobot train`'s own loop: one variant in
float32, one in bfloat16 for scale, one a recipe, emulated on a CPU, one step of each in turn. At several of the float32
variant's checkpoints every recipe then computes the gradients of one batch, with float32's weights and random stream:
of the whole policy in FP8, and of each layer by itself, from the inputs and output gradients that float32 gives it.

    python benchmarks/fp8_training.py --start outputs/learn/embodix_1000 --output benchmarks/results

Without `--start` the policy is trained from random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_model
from torch import Tensor, nn

from embodix import plugins
from embodix.config.compose import compose_train
from embodix.contracts import PrecisionInstallation, TrainingPrecision
from embodix.quantization.accuracy import sqnr_db
from embodix.quantization.selection import choose_modules
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.training.checkpoint import find_checkpoint
from embodix.training.features import select_features
from embodix.training.host_context import host_context
from embodix.training.lockstep import compose_variants, train_side_by_side
from embodix.training.session import TrainingSession

RECIPES = {
    "rowwise": "fp8",
    "tensorwise": "fp8_tensorwise",
    "rowwise, weight gradients in high precision": "fp8_rowwise_gw_hp",
    "blocks": "fp8_block_emulated",
}
BFLOAT16, NOT_SAVED = "bfloat16", "train.save_checkpoint=false"
LOSS_TOLERANCE, COSINE = 0.01, 0.995
MEASURES = ("weight", "output", "output gradient", "weight gradient")
Layer = dict[str, float]


@dataclass(frozen=True)
class Gradients:
    """Loss of a batch, and what :func:`recorded` keeps of each layer."""

    loss: float
    layers: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class AtStep:
    """One recipe at float32's weights of one step: relative difference of the loss, and each layer's measures."""

    loss_difference: float
    layers: dict[str, Layer]


Measured = dict[str, dict[int, AtStep]]


def train(num_steps: int, start: Path | None, save_freq: int, folder: Path) -> list[TrainingSession]:
    """Sessions of float32, of π0.5's own bfloat16 and of every recipe, in that order, trained and still open."""
    overrides = [
        "experiment=learn_metaworld",
        "+plugin=embodix",
        f"train.steps={num_steps}",
        "policy.scheduler_warmup_steps=10",
    ]
    if start is not None:
        overrides.append(f"policy.pretrained_path={find_checkpoint(start).config_path.parent}")
    variants = {"float32": [f"train.save_freq={save_freq}"], BFLOAT16: [f"policy.dtype={BFLOAT16}", NOT_SAVED]}
    variants |= {name: [f"precision={group}", NOT_SAVED] for name, group in RECIPES.items()}
    composed = compose_variants(OmegaConf.create({"variants": variants}), overrides, folder)
    with host_context(composed[0].cfg):
        return train_side_by_side(composed)


def loss_row(reference: TrainingSession, session: TrainingSession) -> dict[str, Any]:
    """How the losses of a variant lie beside those of float32."""
    theirs, ours = ([record.loss for record in s.records] for s in (reference, session))
    differences = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    tail = max(1, len(ours) // 10)
    return {
        "mean_loss": statistics.fmean(ours),
        "mean_loss_difference": statistics.fmean(ours) / statistics.fmean(theirs) - 1,
        "mean_loss_last_tenth_difference": statistics.fmean(ours[-tail:]) / statistics.fmean(theirs[-tail:]) - 1,
        "largest_difference_of_a_step": max(differences),
        "mean_difference_of_a_step": statistics.fmean(differences),
        "cpu_seconds_a_step": statistics.median(sum(record.cpu_s.values()) for record in session.records[1:]),
        "losses": ours,
    }


def gradient_rows(session: TrainingSession, batch_size: int) -> tuple[Measured, list[float]]:
    """Recipe -> step -> layer -> measures, each at the float32 variant's weights of that step.

    Beside them the cosines of float32's own gradients of two batches, layer by layer: how much of a gradient is noise
    of its batch.
    """
    policy = session.policy
    paths = [choice.path for choice in choose_modules(policy, policy.config.type) if choice.convert]
    measured: Measured = {recipe: {} for recipe in RECIPES}
    between_batches: list[float] = []
    generator = torch.Generator().manual_seed(0)
    for checkpoint in sorted((session.output_dir / "checkpoints").glob("[0-9]*")):
        step = int(checkpoint.name)
        load_model(policy, checkpoint / "pretrained_model" / "model.safetensors")
        batches = [_batch(session, batch_size, generator) for _ in range(2)]
        reference, other = (_gradients(policy, batch, step, paths) for batch in batches)
        trained = [path for path in paths if _is_trained(reference.layers[path])]
        between_batches += [_cosine(*(r.layers[p]["weight gradient"] for r in (reference, other))) for p in trained]
        for recipe in RECIPES:
            installed = _install(policy, recipe)
            own = _gradients(policy, batches[0], step, paths)
            measured[recipe][step] = AtStep(
                own.loss / reference.loss - 1,
                {p: _measures(policy.get_submodule(p), reference.layers[p], own.layers[p]) for p in trained},
            )
            installed.uninstall()
    return measured, between_batches


def _batch(session: TrainingSession, batch_size: int, generator: torch.Generator) -> Mapping[str, Any]:
    """Samples of the run's data, preprocessed as its loader does."""
    dataset, collate = session.data.dataset, session.data.collate
    assert collate is not None
    chosen = torch.randint(len(dataset), (batch_size,), generator=generator)
    batch: Mapping[str, Any] = collate([dataset[index] for index in chosen.tolist()])
    return batch


def _install(policy: Any, recipe: str) -> PrecisionInstallation:
    choice = select_features(compose_train([f"precision={RECIPES[recipe]}"])).precision
    precision: TrainingPrecision = plugins.build("precisions", choice.name, choice.options)
    return precision.install(policy, policy.config.type, torch.device("cpu"))


def _gradients(policy: Any, batch: Mapping[str, Any], seed: int, paths: Sequence[str]) -> Gradients:
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with recorded(policy, paths) as layers:
        loss, _ = policy.forward(batch)
        loss.backward()
    return Gradients(loss.item(), layers)


def _is_trained(record: Mapping[str, Tensor]) -> bool:
    """Whether the loss depends on the layer: the last layer's query, output and MLP never reach π0.5's actions."""
    return "weight gradient" in record and bool(record["weight gradient"].any())


@contextmanager
def recorded(policy: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Input, output, its gradient and the weight's gradient of each layer in one forward and backward pass."""
    records: dict[str, dict[str, Tensor]] = {path: {} for path in paths}

    def keep(record: dict[str, Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            record["input"], record["output"] = inputs[0].detach(), output.detach()
            output.register_hook(lambda slope: record.__setitem__("output gradient", slope.detach()))

        return hook

    handles = [policy.get_submodule(path).register_forward_hook(keep(records[path])) for path in paths]
    yield records
    for handle in handles:
        handle.remove()
    for path in paths:
        gradient = policy.get_submodule(path).weight.grad
        if gradient is not None:
            records[path]["weight gradient"] = gradient.detach().clone()


def _measures(layer: nn.Module, reference: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Layer:
    """SQNR in dB and cosines of the weight's gradient, errors of other layers included except where it says itself."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():  # the unit vectors pass exactly: what comes out is the rounded weight
        rounded = layer(torch.eye(weight.shape[1])).t()
    (by_itself,) = torch.autograd.grad(layer(reference["input"]), weight, reference["output gradient"])
    return {
        "weight": sqnr_db(weight, rounded),
        **{name: sqnr_db(reference[name], own[name]) for name in MEASURES[1:]},
        "cosine of the policy": _cosine(reference["weight gradient"], own["weight gradient"]),
        "cosine of the layer itself": _cosine(reference["weight gradient"], by_itself),
    }


def _cosine(one: Tensor, other: Tensor) -> float:
    return nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0).item()


def table_row(recipe: str, losses: Mapping[str, Any], steps: Mapping[int, AtStep]) -> dict[str, Any]:
    """One line a recipe, and whether it keeps what is demanded."""
    every = [layer for at in steps.values() for layer in at.layers.values()]
    policy, itself = ([layer[f"cosine of the {which}"] for layer in every] for which in ("policy", "layer itself"))
    return {
        "recipe": recipe,
        "mean loss against float32's": f"{losses['mean_loss_difference']:+.2%}",
        "mean loss within 1 %": abs(losses["mean_loss_difference"]) <= LOSS_TOLERANCE,
        "largest difference of a step": f"{losses['largest_difference_of_a_step']:.2%}",
        "the same at float32's weights": f"{max(abs(at.loss_difference) for at in steps.values()):.2%}",
        "smallest gradient cosine of a layer by itself": f"{min(itself):.4f}",
        "at least 0.995": min(itself) >= COSINE,
        "with the whole policy in FP8": f"{min(policy):.4f}",
        "of which below 0.995": f"{sum(c < COSINE for c in policy)} of {len(policy)}",
        **{f"{name} SQNR, dB": _range([layer[name] for layer in every]) for name in MEASURES},
        "CPU ms a step": f"{1e3 * losses['cpu_seconds_a_step']:.0f}",
    }


def layer_rows(steps: Mapping[int, AtStep]) -> list[dict[str, Any]]:
    """The smallest of each measure over the steps, layer by layer."""
    first = next(iter(steps.values())).layers
    return [
        {
            "layer": path.partition("language_model.layers.")[2],
            **{name: min(at.layers[path][name] for at in steps.values()) for name in first[path]},
        }
        for path in first
    ]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def as_result(
    start: Path | None,
    losses: Mapping[str, Mapping[str, Any]],
    gradients: Measured,
    between_batches: Sequence[float],
) -> dict[str, Any]:
    num_steps = len(losses["float32"]["losses"])
    steps = list(next(iter(gradients.values())))
    num_layers = len(next(iter(gradients.values()))[steps[0]].layers)
    return {
        "title": "FP8 training, emulated, against float32 on the same samples",
        "setup": f"π0.5 small (experiment=learn_metaworld, +plugin=embodix), {num_steps} steps from "
        f"{'a trained checkpoint' if start else 'random weights'}, same samples, order and random stream, learning "
        "rate up to 1e-3 after 10 steps of warm-up. Gradients: one batch at float32's weights of steps "
        f"{', '.join(map(str, steps))}, the {num_layers} language-model layers that the loss depends on.",
        "how_losses_are_compared": "Mean: the mean loss of all steps over float32's. A step: the loss of one step over "
        "float32's of the same step; trajectories part, since every update differs by its rounding.",
        "recipes": [table_row(name, losses[name], gradients[name]) for name in RECIPES],
        "gradients": "A layer by itself: its weight's gradient from the inputs and output gradients that float32 gives "
        "it, which is what the recipe's three products do. With the whole policy in FP8 the rounding of the forward "
        "pass also moves the point at which the gradient is taken. For scale: float32's own gradients of two batches "
        f"have a cosine of {statistics.median(between_batches):.2f} (median over layers and steps; "
        f"{min(between_batches):.2f} to {max(between_batches):.2f}).",
        "for_scale": f"π0.5's own bfloat16 (policy.dtype=bfloat16, no FP8) on the same samples: mean loss "
        f"{losses[BFLOAT16]['mean_loss_difference']:+.2%} against float32's, largest difference of a step "
        f"{losses[BFLOAT16]['largest_difference_of_a_step']:.2%}.",
        "float32_cpu_ms_a_step": 1e3 * losses["float32"]["cpu_seconds_a_step"],
        "smallest_of_each_layer": {name: layer_rows(rows) for name, rows in gradients.items()},
        "losses": [{"variant": name, **row} for name, row in losses.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, help="run folder or checkpoint to start from")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    require_quotable(options.allow_dirty)
    with tempfile.TemporaryDirectory() as folder:
        sessions = train(options.steps, options.start, max(1, options.steps // 5), Path(folder))
        losses = {session.name: loss_row(sessions[0], session) for session in sessions}
        gradients, between_batches = gradient_rows(sessions[0], sessions[0].host_cfg.batch_size)
        for session in sessions:
            session.close()
    result = as_result(options.start, losses, gradients, between_batches)
    for row in result["recipes"]:
        print(row)
    name = "fp8_training" if options.start else "fp8_training_from_scratch"
    write_benchmark(options.output / name, result, options.allow_dirty)


if __name__ == "__main__":
    main()
