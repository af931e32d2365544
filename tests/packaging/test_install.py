# SPDX-License-Identifier: Apache-2.0
"""A wheel and an editable install both find every config group and every patch, and stay light to import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

COMPOSE_EVERYTHING = """
import json
from importlib.resources import files
from pathlib import Path
from omegaconf import DictConfig, OmegaConf
from embodix.config.compose import compose

root = Path(str(files("embodix.hydra_conf")))
primaries = {p.stem: OmegaConf.load(p).get("defaults", []) for p in sorted(root.glob("*.yaml"))}
owner = {}
for primary, defaults in sorted(primaries.items(), key=lambda item: item[0] != "train"):
    for entry in defaults:
        if isinstance(entry, DictConfig):
            owner.setdefault(str(next(iter(entry))).split()[-1].lstrip("/"), primary)
composed = []
for primary in primaries:
    compose(primary, [])
    composed.append(f"{primary}.yaml")
for path in sorted(root.glob("*/**/*.yaml")):
    group, option = str(path.relative_to(root).parent), path.stem
    override = f"{group}={option}" if group in owner else f"+{group}={option}"
    of_rl = group == "experiment" and option.startswith("rl_")
    config = compose("rl" if of_rl else owner.get(group, "train"), [override])
    content = OmegaConf.load(path)
    if not path.read_text().startswith("# @package _global_") and len(content):
        assert isinstance(config[group], DictConfig), f"{override} did not land as a mapping"
        assert set(content) - {"defaults"} <= set(config[group]), f"{override} lost keys"
    composed.append(f"{group}/{option}.yaml")
print(json.dumps({"root": str(root), "composed": sorted(composed)}))
"""

APPLY_EVERY_PATCH = """
import importlib, inspect, json
from importlib.resources import files
from pathlib import Path
from omegaconf import OmegaConf
from embodix.patching import apply_patch, is_applied, patch_module, patch_names, undo_patch

def small(policy):
    config = OmegaConf.load(Path(str(files("embodix.hydra_conf"))) / "policy" / f"{policy}.yaml")
    return {"architecture": OmegaConf.to_container(config.architecture)}

OPTIONS = {
    "lerobot_pi05_sizes": small("pi05_small"),
    "lerobot_groot_sizes": small("groot_n15_small"),
    "lerobot_quantized_checkpoint": {"policy_type": "groot"},
}

def symbols(target):
    # "package: module.symbol, other.Class.method", "package.module.symbol, other_symbol" or "package.module.symbol"
    base, colon, listed = target.rpartition(": ")
    first, *others = [part.strip() for part in listed.split(",")]
    base = base or first.rpartition(".")[0]
    names = [f"{base}.{first}" if colon else first, *(f"{base}.{other}" for other in others)]
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                owner = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        # Not getattr, which binds class methods anew at each look.
        yield inspect.getattr_static(owner, parts[-1])

applied = {}
for name in patch_names():
    patch = patch_module(name).PATCH
    if "rlinf" in patch.requires:
        continue  # of an extra; tests/rl/rlinf applies these
    before = list(symbols(patch.target))
    apply_patch(name, **OPTIONS.get(name, {}))
    during = list(symbols(patch.target))
    assert is_applied(name)
    undo_patch(name)
    after = list(symbols(patch.target))
    assert not is_applied(name)
    assert all(a is b for a, b in zip(before, after)), f"{name} left {patch.target} changed"
    applied[name] = sum(a is not b for a, b in zip(before, during))
print(json.dumps(applied))
"""


@pytest.fixture(params=["wheel_environment", "editable_environment"])
def environment(request):
    return request.getfixturevalue(request.param)


def test_installed_package_is_the_one_that_was_installed(environment):
    location = environment.run_python("import embodix; print(embodix.__file__)").strip()
    inside = str(environment.folder) in location
    assert inside or location == str(REPOSITORY / "plugins" / "embodix" / "__init__.py")


def test_every_config_group_composes(environment):
    report = json.loads(environment.run_python(COMPOSE_EVERYTHING))
    wanted = sorted(str(p.relative_to(REPOSITORY / "hydra_conf")) for p in REPOSITORY.glob("hydra_conf/**/*.yaml"))
    assert report["composed"] == wanted
    assert len(wanted) > 20


def test_every_patch_applies_and_is_undone(environment):
    applied = json.loads(environment.run_python(APPLY_EVERY_PATCH).splitlines()[-1])
    assert set(applied) == {p.stem for p in REPOSITORY.glob("patches/[!_]*.py") if not p.stem.startswith("rlinf_")}
    assert applied and all(count > 0 for count in applied.values()), applied


def test_hydra_lists_embodix_on_any_search_path(environment):
    result = environment.run("lerobot", "train", "--info", "searchpath")
    assert "pkg://embodix.hydra_conf" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    "action",
    [
        "import embodix, embodix.plugins, embodix.hookspecs, embodix.patching, embodix.config.train_schema",
        "from embodix.plugins import registry; assert registry().names('packers')",
        "from embodix.config.compose import compose; compose('train', ['+plugin=embodix', 'policy=pi05_small'])",
        "from embodix.cli.main import dispatch; assert dispatch('lerobot', ['--help']) == 0",
    ],
    ids=["import", "list plugins", "compose", "help"],
)
def test_light_actions_import_no_torch_and_no_host(wheel_environment, action):
    heavy = ["torch", "lerobot", "rlinf", "transformers"]
    script = f"{action}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])"
    assert wheel_environment.run_python(script).splitlines()[-1] == "[]"
