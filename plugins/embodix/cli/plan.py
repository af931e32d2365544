# SPDX-License-Identifier: Apache-2.0
"""``lerobot plan``: what a run will cost, from config and metadata, before anything is trained.

``--json`` prints the plan as JSON and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embodix.cli.hydra_app import run_hydra_app
from embodix.report.manifest import write_text_atomically
from embodix.report.words import memory, percent, quantity, ratio

if TYPE_CHECKING:
    from embodix.costs.plan import TrainingPlan
    from embodix.costs.rank_plan import RankPlan
    from embodix.costs.workload import TaskPrompt

PLAN_FILE = "plan.json"
WIDEST = 1000


def run(argv: list[str]) -> int:
    as_json = "--json" in argv

    def plan_task(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        if as_json:
            logging.disable(logging.WARNING)  # Hydra's log goes to the standard output, too
        from embodix.checks.guard import require_sound_data
        from embodix.costs.batch_size import settle_batch_size
        from embodix.costs.plan import plan_training
        from embodix.costs.rank_plan import planned_processes
        from embodix.training.config_checks import notes_of, sound_host_config
        from embodix.training.features import named_choice, run_traits, select_training_features
        from embodix.training.run_data import read_choices

        cfg, _ = settle_batch_size(cfg, [], confirm=False)
        host_cfg = sound_host_config(cfg)
        traits = run_traits(cfg, host_cfg, select_training_features(cfg))
        processes = planned_processes(cfg.plan.processes, cfg.plan.parallel, named_choice(cfg.parallel), traits)
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        read_choices(config)
        report = require_sound_data(host_cfg, config, may_be_absent=True)
        plan = plan_training(config, processes)
        path = Path(HydraConfig.get().runtime.output_dir) / PLAN_FILE
        content = dataclasses.asdict(plan) | {"check": report and dataclasses.asdict(report)}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_text_atomically(path, text)
        if as_json:
            print(text, end="")
        else:
            print_plan(plan, Console())
            print(f"Data: {report.verdict if report else 'not checked (check=off)'}")
            print("".join(f"Note: {note}\n" for note in notes_of(host_cfg)), end="")
            print(f"As JSON: {path}")

    return run_hydra_app("plan", plan_task, [argument for argument in argv if argument != "--json"])


def print_plan(plan: TrainingPlan, console: Console) -> None:
    """Print the plan as tables with a sentence for each."""
    cameras = f"{len(plan.real_cameras)} cameras, {len(plan.blank_cameras)} blank"
    console.print(
        f"[bold]{plan.dataset}[/]: {plan.num_episodes} episodes, {plan.num_frames} frames, {len(plan.prompts)} tasks, "
        f"{cameras}. {plan.policy} with {quantity(plan.num_parameters)} parameters, {quantity(plan.num_trained)} "
        f"trained, {plan.dtype}, batch {plan.batch_size}.",
        highlight=False,
    )
    features = ", ".join(f"{name}={value}" for name, value in plan.features.items() if value not in (None, []))
    console.print(f"Active: {features} (variant: {plan.chosen})\n", highlight=False)
    if plan.tokens:
        _print_whole(_token_table(plan), console)
    _print_whole(_prompt_table(plan), console)
    for sentence in _too_long(plan):
        console.print(sentence, highlight=False)
    console.print(plan.prompt_source + "\n", highlight=False, soft_wrap=True)
    _print_whole(_variant_table(plan), console)
    console.print(
        "Bounds are ratios of operations against upstream, forward and backward; forward alone: "
        f"{ratio(max(variant.forward_bound for variant in plan.variants))} at this size. "
        + (f"Real size is {plan.real_name}; measure small, promise by that.\n" if plan.real_name else "\n"),
        highlight=False,
    )
    _print_whole(_memory_table(plan), console)
    console.print(_fitting_gpus(plan), highlight=False)
    for remedy in plan.remedies:
        kind = "same function" if remedy.exact else "changes training"
        fits = "" if remedy.gpu_gigabytes is None else f", fits {remedy.gpu_gigabytes} GB"
        console.print(f"  {remedy.setting}: {memory(remedy.total)}{fits}; {kind}; {remedy.price}", highlight=False)
    if plan.ranks:
        _print_ranks(plan, console)
    console.print(
        f"\nAction padding: {percent(plan.padded_action_share, 1)} of the loss lies after the end of episodes; "
        "action_pad=mask leaves it out (changes what is learned).",
        highlight=False,
    )


def _print_whole(table: Table, console: Console) -> None:
    """Print a table with all its digits: closer where the console is narrow, and beyond its edge before any is cut."""
    for column in table.columns:
        column.no_wrap = True
    if _width(table, console) > console.width:
        table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 0, 0, 0), False
    width = max(console.width, _width(table, console))
    Console(width=width, file=console.file, force_terminal=console.is_terminal).print(table)


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=WIDEST)).maximum


def _token_table(plan: TrainingPlan) -> Table:
    total = sum(plan.tokens.values())
    table = Table(
        title=f"Tokens a sample, as upstream computes them: {percent(plan.waste, 1)} waste", title_justify="left"
    )
    table.add_column("what")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    names = {
        "images": "real images",
        "blank_images": "blank images (waste)",
        "prompt_padding": "prompt padding (waste)",
    }
    for name, tokens in plan.tokens.items():
        table.add_row(names.get(name, name), f"{tokens:.0f}", percent(tokens / total, 1))
    table.add_section()
    table.add_row("all", f"{total:.0f}", "")
    return table


def _prompt_table(plan: TrainingPlan) -> Table:
    table = Table(title="Prompt length by task, in tokens, those of images left out", title_justify="left")
    table.add_column("task", max_width=60, no_wrap=True, overflow="ellipsis")
    table.add_column("frames", justify="right", min_width=6)
    table.add_column("tokens", justify="right", min_width=7)
    shown = sorted(plan.prompts, key=lambda prompt: -prompt.num_frames)
    for prompt in shown[:20]:
        table.add_row(prompt.task, str(prompt.num_frames), _lengths([prompt]))
    if len(shown) > 20:
        rest = shown[20:]
        table.add_row(f"{len(rest)} more tasks", str(sum(p.num_frames for p in rest)), _lengths(rest))
    return table


def _too_long(plan: TrainingPlan) -> list[str]:
    """A sentence for each task with prompts that the policy does not take whole."""
    return [
        f"[bold]Too long[/]: about {percent(prompt.share_too_long)} of the {prompt.num_frames} frames of "
        f"{escape(repr(prompt.task))} have prompts longer than the {prompt.longest} tokens that the policy takes, by "
        f"up to {prompt.excess}; what is cut off is not trained on."
        for prompt in plan.prompts
        if prompt.excess
    ]


def _variant_table(plan: TrainingPlan) -> Table:
    table = Table(title="Variants: work of a sample, and bound on the speed ratio", title_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in ("tokens", "valid", "images", "FLOPs\nforward", "FLOPs\nbackward", "bound", "bound,\nreal size"):
        table.add_column(column, justify="right")
    for variant in plan.variants:
        table.add_row(
            variant.name,
            "-" if variant.tokens is None else f"{variant.tokens:.0f}",
            "-" if variant.utilisation is None else percent(variant.utilisation),
            f"{variant.images:.3g}",
            quantity(variant.forward_flops),
            quantity(variant.backward_flops),
            ratio(variant.bound),
            "-" if variant.real_bound is None else ratio(variant.real_bound),
            style="bold" if variant.name == plan.chosen else None,
        )
    return table


def _memory_table(plan: TrainingPlan) -> Table:
    checkpointing = ", activation checkpointing" if plan.checkpointing else ""
    table = Table(
        title=f"Memory of one process, counted: AdamW, {plan.dtype}, {plan.batch_size} samples{checkpointing}",
        title_justify="left",
    )
    table.add_column("variant", no_wrap=True)
    for column in ("weights", "gradients", "optimizer", "activations", "all"):
        table.add_column(column, justify="right")
    for variant in plan.variants:
        need = variant.memory
        cells: Iterable[float] = (need.parameters, need.gradients, need.optimizer, need.activations, need.total)
        table.add_row(variant.name, *map(memory, cells), style="bold" if variant.name == plan.chosen else None)
    return table


def _fitting_gpus(plan: TrainingPlan) -> str:
    """The smallest common GPU for each variant, a tenth of it left to CUDA and between allocations."""
    sizes = sorted({variant.gpu_gigabytes or 0 for variant in plan.variants}, key=lambda size: size or float("inf"))
    names = {size: [v.name for v in plan.variants if (v.gpu_gigabytes or 0) == size] for size in sizes}
    parts = [f"{f'a GPU of {size} GB' if size else 'no single GPU'} for {', '.join(names[size])}" for size in sizes]
    return f"Fits: {'; '.join(parts)}."


def _print_ranks(plan: TrainingPlan, console: Console) -> None:
    """One of several processes under each strategy, and what the others say."""
    console.print()
    _print_whole(_rank_table(plan), console)
    for rank in plan.ranks:
        if rank.counted is None:
            console.print(f"{rank.strategy}: {escape(rank.reason or '')}", highlight=False)
        elif rank.counted.sent:
            parts = ", ".join(f"{what} {memory(sent)}" for what, sent in rank.counted.sent.items())
            console.print(f"{rank.strategy} sends from a process in a step: {parts}.", highlight=False)


def _rank_table(plan: TrainingPlan) -> Table:
    table = Table(
        title=f"Memory of one of several processes ({plan.chosen}), counted: AdamW, {plan.dtype}, {plan.batch_size} "
        "samples each",
        title_justify="left",
    )
    table.add_column("strategy")
    columns = ("weights,\ncut", "weights,\nwhole", "gradients", "optimizer", "exchange", "activations", "all", "GPU")
    for column in columns:
        table.add_column(column, justify="right")
    for rank in plan.ranks:
        if rank.counted is None:
            continue
        counted, placed = rank.counted, rank.counted.placed
        held = (placed.sharded, placed.replicated, counted.gradients, placed.optimizer, counted.exchange)
        cells = map(memory, (*held, rank.activations, rank.total))
        gpu = "none" if rank.gpu_gigabytes is None else f"{rank.gpu_gigabytes} GB"
        table.add_row(_arranged(rank), *cells, gpu)
    return table


def _arranged(rank: RankPlan) -> str:
    """A strategy with the dimensions of its ranks."""
    sizes = dataclasses.asdict(rank.layout) if rank.layout is not None else {}
    shown = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    return f"{rank.strategy} ({shown})" if shown else rank.strategy


def _lengths(prompts: Sequence[TaskPrompt]) -> str:
    """Shortest to longest, and where the policy takes no more."""
    low, high = min(prompt.shortest for prompt in prompts), max(prompt.longest + prompt.excess for prompt in prompts)
    words = str(low) if low == high else f"{low}-{high}"
    cut = next((prompt.longest for prompt in prompts if prompt.excess), None)
    return words if cut is None else f"{words}, cut at {cut}"
