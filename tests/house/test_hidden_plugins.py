# SPDX-License-Identifier: Apache-2.0
"""With a plugin hidden, every verb that does not need it works, and one that does says what is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embodix.report.steps import read_steps
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
VERBS = ("train", "compare", "plan", "eval", "quantize", "data", "rl", "bench rl")
# Plugin -> a command that needs it, and what the error names.
NEEDS = {
    "pi05": (["train", "policy=pi05_small"], "'pi05_small' is no option of group 'policy'"),
    "groot": (["train", "policy=groot_n15_small"], "'groot_n15_small' is no option of group 'policy'"),
    "fp8": (["eval", "quantization=fp8_block"], "'fp8_block' is no option of group 'quantization'"),
    "deepspeed": (["train", "parallel=zero2"], "'zero2' is no option of group 'parallel'"),
    "rl": (["rl"], "no verb is called 'rl'"),
    "metaworld": (["train", "env=metaworld"], "'metaworld' is no option of group 'env'"),
    "libero": (["train", "env=libero"], "'libero' is no option of group 'env'"),
    "pusht": (["train", "env=pusht"], "'pusht' is no option of group 'env'"),
    "rlinf_sims": (["train", "env=maniskill"], "'maniskill' is no option of group 'env'"),
}
# What a command takes by default from a plugin, and what is chosen instead where that is hidden.
INSTEAD = {
    "pi05": {verb: ["policy=groot_n15"] for verb in ("train", "compare", "plan")},
    "metaworld": {verb: ["dataset=lerobot"] for verb in ("train", "compare", "plan")} | {"data": ["data=libero"]},
    "fp8": {"quantize": ["quantization=none"]},
}


@pytest.fixture(scope="module")
def environment(new_environment: Callable, wheel: Path) -> Any:
    environment = new_environment("hidden_plugins")
    environment.install(wheel)
    return environment


@contextmanager
def hidden(environment: Any, *plugins: str) -> Iterator[None]:
    """The environment without the entry points of these plugins."""
    (path,) = environment.folder.glob("lib/python*/site-packages/embodix-*.dist-info/entry_points.txt")
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    kept = [line for line in lines if line.partition(" = ")[0] not in plugins or "embodix_" not in line]
    assert len(lines) - len(kept) == len(plugins)
    path.write_text("".join(kept))
    try:
        yield
    finally:
        path.write_text(whole)


def test_every_plugin_that_ships_is_hidden_once():
    shipped = {point.name for point in importlib.metadata.entry_points(group="embodix")} - {"builtin"}
    assert set(NEEDS) == shipped


@pytest.mark.parametrize("plugin", NEEDS)
def test_other_verbs_work_and_one_that_needs_it_says_so(environment: Any, plugin: str) -> None:
    with hidden(environment, plugin):
        verbs = [verb for verb in VERBS if plugin != "rl" or verb not in ("rl", "bench rl")]
        assert len(verbs) >= 6
        for verb in verbs:
            result = environment.run("lerobot", *verb.split(), *INSTEAD.get(plugin, {}).get(verb, []), "--cfg", "job")
            assert result.returncode == 0, f"{verb} without {plugin}: {result.stderr}"
        assert environment.run("lerobot", "--help").returncode == 0
        command, says = NEEDS[plugin]
        result = environment.run("lerobot", *command)
        assert result.returncode != 0
        assert says in result.stderr, result.stderr


@pytest.mark.parametrize(("policy", "options"), [("pi05", small_run), ("groot", small_groot_run)])
def test_a_policy_trains_packed_without_any_other_plugin(
    environment: Any, demonstrations: Path, tmp_path: Path, policy: str, options: Callable[..., list[str]]
) -> None:
    folders = [f"train.output_dir={tmp_path}/run", f"hydra.run.dir={tmp_path}/hydra", "train.save_checkpoint=false"]
    data = ["dataset=lerobot", "dataset.repo_id=embodix/metaworld", f"tokenizer.directory={demonstrations}/tokenizer"]
    overrides = options(demonstrations, "+plugin=embodix", "train.steps=1", *data, *folders)
    with hidden(environment, *(set(NEEDS) - {policy})):
        result = environment.run("lerobot", "train", *overrides)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert len(read_steps(tmp_path / "run" / "steps.jsonl")) == 1
