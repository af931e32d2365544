# SPDX-License-Identifier: Apache-2.0
"""The variants of a bench, composed and checked before the first one starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from embodix.config.compose import compose
from embodix_rl.rlinf.run_plan import RunPlan, plan_run

VARIANTS_FOLDER = "variants"
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
# Overrides of the bench that its runs do not get.
_OF_THE_BENCH = ("bench.", "bench=", "hydra.", "hydra/", "experiment=")


@dataclass(frozen=True)
class BenchVariant:
    """A variant that can run.

    Attributes:
        name: of the variant, and of its folder.
        overrides: of `lerobot rl`.
        baseline: the variant it is compared with; None for a baseline.
        folder: of its run.
        config: composed, as plain containers.
        plan: of its run.
    """

    name: str
    overrides: list[str]
    baseline: str | None
    folder: Path
    config: dict[str, Any]
    plan: RunPlan


def compose_variants(
    settings: DictConfig, experiment: str | None, overrides: Sequence[str], folder: Path
) -> list[BenchVariant]:
    """Compose every variant that is to run, and check all of them.

    Args:
        settings: the node ``bench``.
        experiment: the choice of the group, which also holds what the variants share.
        overrides: of the command line; those of `lerobot rl` come after a variant's own.
        folder: of the bench.

    Raises:
        ValueError: no variant, a name that is none, or variants that can't run; the message names all of these.
    """
    names = [str(name) for name in settings.variants]
    _require_names(names, names if settings.only is None else settings.only)
    chosen = [name for name in names if settings.only is None or name in settings.only]
    shared = [f"experiment={experiment}"] if experiment else []
    common = [word for word in overrides if not word.lstrip("+~").startswith(_OF_THE_BENCH)]
    variants, faults = [], []
    for name in chosen:
        words = [*shared, *map(str, settings.variants[name]), *common]
        try:
            variants.append(_variant(name, words, _baseline(name, chosen, settings), folder))
        except ValueError as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise ValueError("Nothing was started, because not every variant can run.\n" + "\n".join(faults))
    return variants


def same_config(variant: BenchVariant, recorded: dict[str, Any]) -> bool:
    """Whether a run's recorded config is the variant's; what a run does not read does not count."""
    return _comparable(variant.config) == _comparable(recorded)


def _variant(name: str, words: list[str], baseline: str | None, folder: Path) -> BenchVariant:
    run_folder = folder / VARIANTS_FOLDER / name
    cfg = compose("rl", words)
    if cfg.rl.steps <= cfg.rl.warmup_steps:
        raise ValueError(
            f"a rate needs steps after warm-up; got rl.steps={cfg.rl.steps} and rl.warmup_steps={cfg.rl.warmup_steps}."
        )
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return BenchVariant(name, words, baseline, run_folder, config, plan_run(cfg, run_folder))


def _baseline(name: str, chosen: Sequence[str], settings: DictConfig) -> str | None:
    """The variant's own baseline, else the first that is run; None for those that others are compared with."""
    named = settings.against.get(name)
    if named is not None:
        return str(named) if named in chosen else None
    is_baseline = name == chosen[0] or name in settings.against.values()
    return None if is_baseline else chosen[0]


def _require_names(names: Sequence[str], chosen: Sequence[str]) -> None:
    if not chosen:
        raise ValueError("A bench needs variants; choose experiment=rl_runners, or add '+bench.variants.name=[...]'.")
    odd = [name for name in names if not _NAME.fullmatch(name)]
    if odd:
        raise ValueError(f"A variant's name is also a folder's, of letters, digits and _.+-; got {', '.join(odd)}.")
    unknown = [str(name) for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"No variant is called {', '.join(unknown)}; there are {', '.join(names)}.")


def _comparable(config: dict[str, Any]) -> Any:
    return json.loads(json.dumps({name: value for name, value in config.items() if name != "bench"}))
