# SPDX-License-Identifier: Apache-2.0
"""Plugins load one at a time, lazily and loudly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from embodix import hookspecs, plugins
from embodix.arguments import ArgumentError
from embodix.plugins import PluginError, load_plugins

HEADER = "from embodix import Registration, hookimpl\n"


@pytest.fixture
def make_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Writes a plugin module and returns its entry point."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def make(name: str, source: str) -> EntryPoint:
        (tmp_path / f"{name}.py").write_text(HEADER + source)
        importlib.invalidate_caches()
        return EntryPoint(name=name, value=name, group=plugins.ENTRY_POINT_GROUP)

    return make


def _registering(hook: str, name: str, target: str) -> str:
    return f"@hookimpl\ndef {hook}():\n    return [Registration({name!r}, {target!r}, 'a summary')]\n"


def _check_hook(hook: str, make_plugin: Callable[[str, str], EntryPoint]) -> None:
    kind = hook.removeprefix("register_")
    source = _registering(hook, "mine", f"plugin_of_{kind}:thing") + "thing = object()\n"
    registry = load_plugins([make_plugin(f"plugin_of_{kind}", source)])
    assert registry.names(kind) == ["mine"]
    assert registry.providers[kind, "mine"] == f"plugin_of_{kind}"
    assert registry.resolve(kind, "mine") is sys.modules[f"plugin_of_{kind}"].thing
    others = {other: names for other, names in registry.implementations.items() if other != kind}
    assert not any(others.values())


def test_hook_register_packers(make_plugin):
    _check_hook("register_packers", make_plugin)


def test_hook_register_attention_backends(make_plugin):
    _check_hook("register_attention_backends", make_plugin)


def test_hook_register_policies(make_plugin):
    _check_hook("register_policies", make_plugin)


def test_hook_register_quantizers(make_plugin):
    _check_hook("register_quantizers", make_plugin)


def test_hook_register_precisions(make_plugin):
    _check_hook("register_precisions", make_plugin)


def test_hook_register_parallel_strategies(make_plugin):
    _check_hook("register_parallel_strategies", make_plugin)


def test_hook_register_runners(make_plugin):
    _check_hook("register_runners", make_plugin)


def test_hook_register_environments(make_plugin):
    _check_hook("register_environments", make_plugin)


def test_hook_register_data_sources(make_plugin):
    _check_hook("register_data_sources", make_plugin)


def test_hook_register_host_patches(make_plugin):
    _check_hook("register_host_patches", make_plugin)


def test_hook_register_verbs(make_plugin):
    _check_hook("register_verbs", make_plugin)


def test_hook_register_schemas(make_plugin):
    _check_hook("register_schemas", make_plugin)


def test_hook_register_config_packages(make_plugin):
    _check_hook("register_config_packages", make_plugin)


@pytest.mark.parametrize("hook", hookspecs.hook_names())
def test_every_hook_has_a_docstring_and_a_test(hook):
    assert getattr(hookspecs.EmbodixSpec, hook).__doc__
    assert f"test_hook_{hook}" in globals()


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("fails_to_import", "import a_package_that_nobody_installed\n", "ModuleNotFoundError"),
        ("misspells_a_hook", _registering("register_packer", "x", "m:x"), "unknown hook 'register_packer'"),
        (
            "asks_for_arguments",
            "@hookimpl\ndef register_packers(device):\n    return []\n",
            r"hookimpl definition: register_packers(device)",
        ),
        ("returns_something_else", "@hookimpl\ndef register_packers():\n    return ['x']\n", "must return"),
        ("returns_nothing", "@hookimpl\ndef register_packers():\n    pass\n", "must return a list of embodix.Reg"),
        ("returns_a_word", "@hookimpl\ndef register_packers():\n    return 'x'\n", "must return a list of embodix.Reg"),
        ("names_no_attribute", _registering("register_packers", "x", "module_only"), "package.module:attribute"),
        ("names_a_path", _registering("register_packers", "x", "my/module.py:x"), "package.module:attribute"),
        ("has_no_name", _registering("register_packers", "", "m:x"), "registrations with a name"),
        ("leaves_python", "import sys\nsys.exit('no licence')\n", "SystemExit: no licence"),
        ("leaves_python_late", "@hookimpl\ndef register_packers():\n    raise SystemExit(3)\n", "SystemExit: 3"),
        ("names_no_package", _registering("register_config_packages", "x", "nowhere_at_all:__name__"), "is not."),
        (
            "twice_in_itself",
            "@hookimpl\ndef register_packers():\n    return 2 * [Registration('x', 'm:x', 's')]\n",
            "registered by both 'twice_in_itself' and 'twice_in_itself'",
        ),
        ("raises", "@hookimpl\ndef register_packers():\n    raise RuntimeError('no driver')\n", "no driver"),
    ],
)
def test_a_broken_plugin_is_recorded_and_hides_no_other(make_plugin, name, source, reason):
    healthy = make_plugin("z_healthy", _registering("register_packers", "fine", "z_healthy:hookimpl"))
    registry = load_plugins([make_plugin(name, source), healthy])
    (broken,) = registry.broken()
    assert broken.name == name
    assert reason in broken.error
    assert "Traceback" in broken.error
    assert registry.names("packers") == ["fine"]
    with pytest.raises(PluginError, match="strict_plugins=false"):
        registry.require_healthy()


def test_a_strict_run_names_every_broken_plugin(make_plugin):
    broken = [make_plugin(f"broken_{n}", f"raise OSError('fault {n}')\n") for n in range(3)]
    with pytest.raises(PluginError, match=r"3 plugin\(s\) failed to load") as caught:
        load_plugins(broken).require_healthy()
    assert all(f"fault {n}" in str(caught.value) for n in range(3))


def test_a_name_registered_twice_leaves_the_second_plugin_out_and_names_both(make_plugin):
    one = make_plugin("first", _registering("register_packers", "same", "first:hookimpl"))
    more = _registering("register_runners", "another", "second:hookimpl")
    two = make_plugin("second", _registering("register_packers", "same", "second:hookimpl") + more)
    registry = load_plugins([one, two])
    assert registry.providers == {("packers", "same"): "first"}
    with pytest.raises(PluginError, match="packer 'same' is registered by both 'first' and 'second'"):
        registry.require_healthy()


def test_a_target_that_leaves_python_says_so(make_plugin, tmp_path):
    (tmp_path / "leaving_part.py").write_text("raise SystemExit(4)\n")
    registry = load_plugins([make_plugin("leaves", _registering("register_runners", "mine", "leaving_part:Thing"))])
    with pytest.raises(PluginError, match=r"runner 'mine' of plugin 'leaves' cannot be imported .* SystemExit: 4"):
        registry.resolve("runners", "mine")


def test_one_name_in_two_kinds_is_no_duplicate(make_plugin):
    source = _registering("register_packers", "same", "m:x") + _registering("register_runners", "same", "m:x")
    registry = load_plugins([make_plugin("both_kinds", source)])
    assert registry.names("packers") == registry.names("runners") == ["same"]


def test_an_unknown_name_lists_what_exists_and_the_nearest():
    with pytest.raises(PluginError, match=r"known: none, padding_free.* Did you mean 'padding_free'\?"):
        plugins.registry().registration("packers", "paddingfree")


def test_an_unknown_name_mentions_plugins_that_failed_to_load(make_plugin):
    registry = load_plugins([make_plugin("lost", "raise OSError('no licence')\n")])
    with pytest.raises(PluginError, match=r"Plugin 'lost' .* failed to load: OSError: no licence"):
        registry.registration("packers", "from_lost")


def test_an_unknown_kind_lists_the_kinds():
    with pytest.raises(PluginError, match="Unknown kind of implementation 'packer'; kinds: packers, "):
        plugins.registry().names("packer")


def test_a_target_is_imported_on_first_use_only(make_plugin, tmp_path):
    (tmp_path / "heavy_part.py").write_text("class Thing: ...\n")
    registry = load_plugins([make_plugin("lazy", _registering("register_runners", "mine", "heavy_part:Thing"))])
    assert "heavy_part" not in sys.modules
    assert registry.resolve("runners", "mine").__name__ == "Thing"
    assert "heavy_part" in sys.modules


@pytest.mark.parametrize("target", ["missing_module:Thing", "json:Thing"])
def test_a_target_that_cannot_be_imported_says_what_and_where(make_plugin, target):
    registry = load_plugins([make_plugin("wrong_target", _registering("register_runners", "mine", target))])
    with pytest.raises(PluginError, match=rf"runner 'mine' of plugin 'wrong_target' cannot be imported from {target}"):
        registry.resolve("runners", "mine")


def test_an_option_that_does_not_exist_is_named_with_the_nearest():
    packer = plugins.build("packers", "token_budget", {"budget": 1000})
    assert packer.name == "token_budget"
    with pytest.raises(
        ArgumentError, match=r"'token_budget' has no option 'budgett'\. Did you mean 'budget'\? Options: "
    ):
        plugins.build("packers", "token_budget", {"budgett": 1000})
    with pytest.raises(ArgumentError, match=r"'padding_free' has no option 'budget'\. Options: none"):
        plugins.build("packers", "padding_free", {"budget": 1000})


@pytest.mark.parametrize("kind", [kind.removeprefix("register_") for kind in hookspecs.hook_names()])
def test_everything_embodix_registers_can_be_imported(kind):
    registry = plugins.registry()
    assert set(registry.resolve_all(kind)) == set(registry.names(kind))


def test_embodix_registers_its_own_features_through_the_same_hooks():
    record = next(record for record in plugins.registry().plugins if record.name == "builtin")
    assert record.healthy and record.distribution.startswith("embodix ")
    assert {"none", "padding_free"} <= set(plugins.registry().names("packers"))
