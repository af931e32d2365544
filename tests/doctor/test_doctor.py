# SPDX-License-Identifier: Apache-2.0
"""The doctor names each fault that stops the given config, and only those."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from importlib.util import find_spec

import pytest
import torch

from embodix.cli import doctor
from embodix.config.compose import compose
from embodix.contracts import SimulatorStatus
from embodix.doctor import needs as needs_module
from embodix.doctor.findings import (
    AttentionTarget,
    MachineFinding,
    find_environments,
    find_implementations,
    find_patches,
    find_versions,
    inspect_machine,
)
from embodix.doctor.needs import attention_target, missing_places
from embodix.patching import patch_names
from embodix.plugins import ENTRY_POINT_GROUP, PluginRecord, load_plugins, registry
from embodix.simulation.rendering import GL_BACKENDS, probe_gl_backend
from embodix_libero.environment import EmbodixLiberoConfig
from embodix_rlinf_sims import environment as rlinf_sims

HEALTHY_MACHINE = MachineFinding(
    python="3.12", system="Linux", cpu="a CPU", num_cores=2, memory_gib=8.0, rendering={"egl": None, "osmesa": "absent"}
)


@pytest.fixture
def a_machine(monkeypatch):
    """Lets a test say what machine the doctor sees."""

    def see(**changes):
        finding = MachineFinding(**(vars(HEALTHY_MACHINE) | changes))
        monkeypatch.setattr(needs_module, "inspect_machine", lambda: finding)

    see()
    return see


def _needs(capsys, *overrides: str) -> list[str]:
    code = doctor.run([*overrides, "--json"])
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert code == bool(needs)
    return needs


def test_a_healthy_config_needs_nothing(a_machine, capsys):
    assert _needs(capsys, "policy=pi05_small", "+plugin=embodix") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend may run here")
def test_a_backend_that_cannot_run_is_named_with_its_reason(a_machine, capsys):
    (need,) = _needs(capsys, "policy=pi05_small", "attention=flash_attn_2")
    assert "attention_backends 'flash_attn_2': can't run on cpu" in need and "needs a CUDA device" in need


@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 units may be here")
def test_a_quantizer_and_its_options_are_tried(a_machine, capsys):
    assert _needs(capsys, "policy=pi05_small", "quantization=fp8_block") == []
    (need,) = _needs(capsys, "policy=pi05_small", "quantization=fp8_block", "quantization.options.kernel=fast")
    assert need.startswith("quantization 'fp8_block': quantization.options.kernel is one of auto, scaled_mm")
    (need,) = _needs(capsys, "policy=pi05_small", "quantization.name=fp9_block")
    assert "Did you mean 'fp8_block'?" in need


def test_a_precision_that_would_be_emulated_is_a_fault_only_where_that_is_forbidden(a_machine, capsys):
    assert _needs(capsys, "policy=pi05_small", "precision=fp8") == []
    (need,) = _needs(capsys, "policy=pi05_small", "precision=fp8_tensorwise", "precision.options.strict=true")
    assert need.startswith("precision 'torchao': emulated on cpu: FP8 products need a CUDA device")


def test_missing_torchao_is_named_with_what_to_install(a_machine, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    (need,) = _needs(capsys, "policy=pi05_small", "precision=fp8")
    assert "torchao can't be imported" in need and "install embodix[fp8]" in need


def test_a_backend_that_no_plugin_registers_is_named_with_the_nearest(a_machine, capsys):
    (need,) = _needs(capsys, "policy=pi05_small", "attention.name=segment_gem")
    assert "Did you mean 'segment_gemm'?" in need


def test_auto_without_a_single_backend_gives_every_reason(a_machine, capsys, monkeypatch):
    monkeypatch.setattr(AttentionTarget, "problem_of", lambda self, backend: f"{backend.name} has no kernel")
    (need,) = _needs(capsys, "policy=pi05_small", "attention=auto")
    assert "choose attention=upstream" in need
    assert "segment_gemm has no kernel" in need and "flex has no kernel" in need


def test_a_misspelt_override_is_a_fault_and_the_rest_is_still_shown(a_machine, capsys):
    assert doctor.run(["packing=paddingfree", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "padding_free" in found["needs"][0]
    assert found["implementations"] and found["patches"]


def test_a_host_out_of_range_says_wanted_found_and_what_to_do(a_machine, capsys, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0" if name == "lerobot" else real(name))
    needs = _needs(capsys, "policy=pi05_small")
    assert any("wanted lerobot==0.5.1, found 0.6.0; install it: pip install 'lerobot==0.5.1'" in n for n in needs)
    assert any(n.startswith("patch ") for n in needs), "patches hold for a range of lerobot too"


def test_a_patch_that_does_not_exist_is_named(a_machine, capsys):
    (need,) = _needs(capsys, "policy=pi05_small", "+patches.mend_everything={}")
    assert "No patch is called 'mend_everything'" in need


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["policy=pi05"], ("float32", 256)),
        (["policy=pi05_small", "policy.dtype=bfloat16"], ("bfloat16", 16)),
        (["policy=groot_n15"], ("bfloat16", 128)),
        (["policy=groot_n15_small"], ("float32", 16)),
    ],
)
def test_attention_is_tried_in_the_policys_dtype_and_head_size(overrides, wanted):
    target = attention_target(compose("train", overrides))
    assert (target.dtype, target.head_dim) == wanted


def test_groot_says_what_it_imports(a_machine, capsys, monkeypatch):
    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    assert _needs(capsys, "policy=groot_n15_small") == []
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    (need,) = _needs(capsys, "policy=groot_n15_small")
    assert "patch 'lerobot_groot_runs' does not fit: wanted peft>=0.18,<1, found none; install it: pip install" in need
    assert _needs(capsys, "policy=pi05_small") == []


def test_a_wrapper_is_asked_for_only_when_something_is_wrapped(a_machine, capsys):
    overrides = ["policy=pi05_small", "policy.type=act"]
    assert _needs(capsys, *overrides) == []
    (need,) = _needs(capsys, *overrides, "packing=padding_free")
    assert "policies 'act'" in need and "known: groot, pi05" in need


def test_cuda_without_a_gpu_is_a_fault(a_machine, capsys):
    a_machine(gpu_problem="torch sees no CUDA device")
    needs = _needs(capsys, "policy=pi05_small", "policy.device=cuda")
    assert any("policy.device=cuda cannot be used: torch sees no CUDA device" in need for need in needs)


def test_an_env_needs_one_backend_that_renders(a_machine, capsys):
    overrides = ["policy=pi05_small", "+env={type: somewhere}"]
    assert _needs(capsys, *overrides) == []
    a_machine(rendering={"egl": "no driver", "osmesa": "no library"})
    (need,) = _needs(capsys, *overrides)
    assert "egl: no driver; osmesa: no library" in need


@pytest.mark.parametrize("env", ["env=libero", "+env={type: libero}"])
def test_libero_is_needed_only_when_it_is_asked_for(a_machine, capsys, monkeypatch, env):
    status = SimulatorStatus("hf-libero 0.1.3", "its assets are missing. Run `make libero`.")
    monkeypatch.setattr(EmbodixLiberoConfig, "status", staticmethod(lambda: status))
    assert _needs(capsys, "policy=pi05_small") == []
    (need,) = _needs(capsys, "policy=pi05_small", env)
    assert "its assets are missing. Run `make libero`" in need
    monkeypatch.setattr(EmbodixLiberoConfig, "status", staticmethod(lambda: SimulatorStatus("hf-libero 0.1.3", None)))
    assert _needs(capsys, "policy=pi05_small", env) == []


def test_an_environment_tells_what_there_is_of_its_simulator(a_machine, capsys, monkeypatch):
    (name,) = find_environments(registry())
    assert name == "embodix_libero"
    status = SimulatorStatus("hf-libero 0.1.3, assets from the hub", "its configuration is missing")
    monkeypatch.setattr(EmbodixLiberoConfig, "status", staticmethod(lambda: status))
    doctor.run(["policy=pi05_small", "--json"])
    assert json.loads(capsys.readouterr().out)["environments"] == {name: vars(status)}
    doctor.run(["policy=pi05_small"])
    shown = capsys.readouterr().out
    assert status.found in shown and status.problem in shown


def test_an_environment_whose_plugin_is_hidden_is_said_to_be_missing(a_machine, capsys, monkeypatch):
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    without = load_plugins(point for point in points if point.name != "libero")
    monkeypatch.setattr(doctor, "load_plugins", lambda: without)
    (need,) = _needs(capsys, "policy=pi05_small", "+env={type: embodix_libero}")
    assert "env.type=embodix_libero is not there: No environment is called 'embodix_libero'" in need
    assert "known: embodix_isaaclab, embodix_maniskill, embodix_metaworld" in need
    assert _needs(capsys, "policy=pi05_small", "env=metaworld") == []


@pytest.mark.parametrize(("option", "simulator"), [("maniskill", "maniskill_lacks"), ("isaaclab", "isaaclab_lacks")])
def test_a_gpu_simulator_names_all_that_it_lacks(a_machine, capsys, monkeypatch, option, simulator):
    monkeypatch.setattr(rlinf_sims, simulator, lambda *backend: ["no package", f"no driver {backend}"])
    needs = _needs(capsys, "policy=pi05_small", f"env={option}")
    backend = ("gpu",) if option == "maniskill" else ()
    assert f"env.type=embodix_{option} can't run: no package" in needs
    assert f"env.type=embodix_{option} can't run: no driver {backend}" in needs


def test_a_duplicate_registration_is_named_and_the_rest_is_shown(a_machine, capsys, monkeypatch):
    found = load_plugins()
    error = "embodix.plugins.PluginError: packer 'same' is registered by both 'one' and 'two', so 'two' is left out"
    found.plugins.append(PluginRecord("two", "second 1.0", "second", error))
    monkeypatch.setattr(doctor, "load_plugins", lambda: found)
    assert doctor.run(["policy=pi05_small", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert any("'two' of second 1.0" in need and "by both 'one' and 'two'" in need for need in printed["needs"])
    assert "padding_free" in {each["name"] for each in printed["implementations"]}


def test_people_see_every_part(a_machine, capsys):
    assert doctor.run(["policy=pi05_small"]) == 0
    shown = capsys.readouterr().out
    for part in ("builtin", "padding_free", "lerobot_atomic_checkpoint", "transformers", "a CPU", "osmesa"):
        assert part in shown
    assert "Everything that policy=pi05_small needs is here." in shown


def test_a_target_that_fails_to_import_is_reported_not_raised(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "heavy_dependent.py").write_text(
        "from embodix import Registration, hookimpl\n@hookimpl\ndef register_attention_backends():\n"
        "    return [Registration('heavy', 'needs_a_missing_library:Backend', 'a backend')]\n"
    )
    (tmp_path / "needs_a_missing_library.py").write_text("import a_missing_library\n")
    point = importlib.metadata.EntryPoint("heavy_dependent", "heavy_dependent", "embodix")
    (found,) = find_implementations(load_plugins([point]), AttentionTarget("cpu", "float32"))
    assert found.problem == "cannot import: No module named 'a_missing_library'"


def test_a_backend_that_computes_the_wrong_numbers_is_reported(monkeypatch):
    backend = registry().resolve("attention_backends", "segment_gemm")
    monkeypatch.setattr(
        backend, "__call__", lambda self, q_NHD, k, v, segments, **options: q_NHD + 0 * k.sum() * v.sum()
    )
    problem = AttentionTarget("cpu", "float32", 16).problem_of(backend())
    assert problem is not None and "self-check is off" in problem


def test_every_patch_is_listed_and_fits():
    found = find_patches()
    assert [patch.name for patch in found] == patch_names()
    problems = {patch.name: patch.problem for patch in found if patch.problem}
    without_rlinf = {name for name in patch_names() if name.startswith("rlinf_") and find_spec("rlinf") is None}
    assert set(problems) == without_rlinf
    assert all("wanted rlinf>=0.3.0,<0.3.1, found none; install it" in problem for problem in problems.values())
    assert all(patch.requires and patch.target for patch in found)


def test_ranges_come_from_the_metadata_of_embodix_and_lerobot():
    versions = {version.distribution: version for version in find_versions()}
    assert versions["lerobot"].wanted == "==0.5.1" and versions["lerobot"].required
    assert versions["transformers"].wanted and versions["transformers"].required
    assert {"metaworld", "mujoco", "hf-libero", "peft", "torchao", "ray", "rlinf"} <= set(versions)
    assert "pytest" not in versions
    assert versions["flash-attn"].wanted and not versions["flash-attn"].required
    assert all(version.problem is None for version in versions.values() if version.found)


def test_rendering_is_tried_for_real():
    assert "no_such_backend" in (probe_gl_backend("no_such_backend") or "")


def test_this_machine_is_described():
    found = inspect_machine()
    assert found.num_cores >= 1 and found.memory_gib > 0 and found.cpu
    assert bool(found.gpus) != bool(found.gpu_problem)
    assert set(found.rendering) == set(GL_BACKENDS)
    assert found.egl_devices


def test_folders_that_the_overrides_name_are_looked_for(tmp_path):
    overrides = [f"dataset.root={tmp_path}/nowhere"]
    faults = list(missing_places(compose("train", ["policy=pi05_small", *overrides]), overrides))
    assert faults[0].startswith(f"No LeRobotDataset at dataset.root={tmp_path}/nowhere (meta/info.json is missing).")
    assert faults[1].startswith(f"tokenizer.directory={tmp_path}/nowhere/tokenizer is not there.")
    (tmp_path / "nowhere" / "meta").mkdir(parents=True)
    (tmp_path / "nowhere" / "meta" / "info.json").write_text("{}")
    (tmp_path / "nowhere" / "tokenizer").mkdir()
    assert list(missing_places(compose("train", ["policy=pi05_small", *overrides]), overrides)) == []
    assert list(missing_places(compose("train", ["policy=pi05_small"]), [])) == []
