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
from embodix.config.compose import compose, config_packages

roots = {package: Path(str(files(package))) for package in config_packages()}
primaries = {p.stem: OmegaConf.load(p).get("defaults", []) for r in roots.values() for p in sorted(r.glob("*.yaml"))}
owner = {}
for primary, defaults in sorted(primaries.items(), key=lambda item: item[0] != "train"):
    for entry in defaults:
        if isinstance(entry, DictConfig):
            owner.setdefault(str(next(iter(entry))).split()[-1].lstrip("/"), primary)
for primary in primaries:
    compose(primary, [])
composed = []
for package, root in roots.items():
    composed += [f"{package}/{path.name}" for path in root.glob("*.yaml")]
    for path in sorted(root.glob("*/**/*.yaml")):
        group, option = str(path.relative_to(root).parent), path.stem
        override = f"{group}={option}" if group in owner else f"+{group}={option}"
        of_rl = group == "experiment" and option.startswith("rl_")
        config = compose("rl" if of_rl else owner.get(group, "train"), [override])
        content = OmegaConf.load(path)
        if not path.read_text().startswith("# @package _global_") and len(content):
            assert isinstance(config[group], DictConfig), f"{override} did not land as a mapping"
            assert set(content) - {"defaults"} <= set(config[group]), f"{override} lost keys"
        composed.append(f"{package}/{group}/{option}.yaml")
print(json.dumps({"composed": sorted(composed)}))
"""

APPLY_EVERY_PATCH = """
import importlib, inspect, json
from importlib.resources import files
from pathlib import Path
from omegaconf import OmegaConf
from embodix.patching import apply_patch, is_applied, patch_module, patch_names, undo_patch

def small(package, policy):
    config = OmegaConf.load(Path(str(files(f"{package}.hydra_conf"))) / "policy" / f"{policy}.yaml")
    return {"architecture": OmegaConf.to_container(config.architecture)}

OPTIONS = {
    "lerobot_pi05_sizes": small("embodix_pi05", "pi05_small"),
    "lerobot_groot_sizes": small("embodix_groot", "groot_n15_small"),
    "lerobot_quantized_checkpoint": {"policy_type": "groot"},
    "lerobot_peft_alpha": {"lora_alpha": 16},
    "lerobot_sharded_resume": {"read_groups": None},
}

def symbols(target):
    # "package: module.symbol, other.Class.method", "package.module.symbol, other_symbol", two whole names or one
    base, colon, listed = target.rpartition(": ")
    first, *others = [part.strip() for part in listed.split(",")]
    base = base or first.rpartition(".")[0]
    whole = [other if other.startswith("lerobot.") else f"{base}.{other}" for other in others]
    names = [f"{base}.{first}" if colon else first, *whole]
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
    folders = {"embodix": REPOSITORY / "hydra_conf"}
    folders |= {path.parent.name: path for path in REPOSITORY.glob("plugins/embodix_*/hydra_conf")}
    wanted = {f"{name}.hydra_conf/{p.relative_to(f)}" for name, f in folders.items() for p in f.glob("**/*.yaml")}
    assert report["composed"] == sorted(wanted)
    assert len(wanted) > 80


def test_every_patch_applies_and_is_undone(environment):
    applied = json.loads(environment.run_python(APPLY_EVERY_PATCH).splitlines()[-1])
    files = [*REPOSITORY.glob("patches/[!_]*.py"), *REPOSITORY.glob("plugins/embodix_*/patches/[!_]*.py")]
    assert set(applied) == {path.stem for path in files if not path.stem.startswith("rlinf_")}
    assert len(applied) > 10 and all(count > 0 for count in applied.values()), applied


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
