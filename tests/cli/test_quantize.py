# SPDX-License-Identifier: Apache-2.0
"""The command line of ``lerobot quantize``: words without a name, mistakes, and sizes without a checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.cli.positions import named_arguments
from embodix.config.compose import compose

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, as far as it is looked at before anything is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"type": "pi05"}')
    return folder


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["a", "b"], ["checkpoint='a'", "output='b'"]),
        (["a", "x=y", "b"], ["checkpoint='a'", "output='b'", "x=y"]),
        (["a"], ["checkpoint='a'"]),
        (["checkpoint=a", "output=b"], ["checkpoint=a", "output=b"]),
        (["policy=pi05", "sizes=only"], ["policy=pi05", "sizes=only"]),
        (["--cfg", "job", "a"], ["--cfg", "job", "checkpoint='a'"]),
        (["a", "b", "-m", "x=1,2"], ["-m", "checkpoint='a'", "output='b/${hydra:job.num}'", "x=1,2"]),
        (["it's"], ["checkpoint='it\\'s'"]),
    ],
)  # fmt: skip
def test_words_without_a_name_are_checkpoint_and_output(words: list[str], wanted: list[str]) -> None:
    assert named_arguments("quantize", words) == wanted


def test_a_folder_whose_name_looks_like_an_override_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "lr=0.1, seed=[1]"
    folder.mkdir()
    (argument,) = named_arguments("quantize", [str(folder)])
    assert compose("quantize", [argument]).checkpoint == str(folder)


def test_a_third_word_is_refused(run_verb: Command) -> None:
    code, error = run_verb("quantize", "a", "b", "c")
    assert code == 1
    assert "lerobot quantize takes checkpoint and output; got a, b, c." in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs a checkpoint and a folder to write"),
        (["policy=pi05"], "For sizes alone, name a policy: policy=pi05 sizes=only"),
        (["nowhere", "out"], "checkpoint=nowhere holds no model"),
        (["m", "out", "quantization=none"], "lerobot quantize writes quantization=fp8_block; got none"),
        (["m", "out", "rest_dtype=float16"], "rest_dtype must be one of keep, bfloat16, float32; got 'float16'. fp16"),
        (["m", "out", "unused_heads=remove"], "unused_heads must be one of keep, quantize, drop; got 'remove'."),
        (["m", "out", "+policy.chunk_size=3"], "is quantized as it is; policy.chunk_size would change nothing."),
        (["m", "out", "sizes=no"], "sizes must be one of also, only; got 'no'."),
        (
            ["m", "out", "unused_heads=drop", "quantization.options.unused_heads=true"],
            "unused_heads=drop and quantization.options.unused_heads=true contradict each other.",
        ),
        (["m", "out", "gate.num_samples=many"], "could not be converted to Integer"),
        (["m", "out", "gates.enabled=true"], "'gates.enabled' is neither a group nor a field of quantize"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_before_anything_is_read(
    run_verb: Command, tmp_path: Path, overrides: list[str], message: str
) -> None:
    code, error = run_verb("quantize", *overrides, f"hydra.run.dir={tmp_path}")
    assert code == 1
    assert message in error


def test_a_folder_that_exists_is_kept(run_verb: Command, model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    words = ("quantize", str(model), str(mine), f"hydra.run.dir={tmp_path / 'run'}")
    code, error = run_verb(*words)
    assert code == 1
    assert f"{mine} exists. Give another folder, or replace it with overwrite=true." in error
    code, error = run_verb(*words, "overwrite=true")
    assert code == 1
    assert "overwrite=true replaces what `lerobot quantize` has written" in error
    code, error = run_verb("quantize", str(model), str(model), "overwrite=true", f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 1
    assert "needs a folder of its own; got the checkpoint's" in error
    assert (mine / "thesis.txt").read_text() == "all of it"
    code, error = run_verb(*words[:2], str(tmp_path / "out"), f"export_language_model={mine}", words[3])
    assert code == 1
    assert f"export_language_model={mine} exists." in error


def test_adapters_and_members_of_a_mixture_are_refused(run_verb: Command, model: Path, tmp_path: Path) -> None:
    (model / "adapter_model.safetensors").touch()
    out = (str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'run'}")
    refusal = run_verb("quantize", str(model), *out)[1]
    assert f"holds adapters of PEFT. Merge them and give the result: lerobot merge {model} FOLDER." in refusal
    member = model / "embodiments" / "arm"
    member.mkdir(parents=True)
    (member / "config.json").write_text('{"type": "pi05"}')
    assert f"is one embodiment of a mixture; give the whole one: {model}." in run_verb("quantize", str(member), *out)[1]


def test_another_policy_is_refused(run_verb: Command, tmp_path: Path) -> None:
    from lerobot.policies.act.configuration_act import ACTConfig
    from safetensors.torch import save_file

    ACTConfig()._save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    code, error = run_verb("quantize", str(tmp_path), str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 1
    assert "knows the language models of groot and pi05;" in error


@pytest.mark.slow
def test_sizes_at_real_size_need_no_checkpoint(
    run_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    words = ("quantize", "policy=groot_n15", "sizes=only", f"hydra.run.dir={tmp_path}")
    done = run_process("-m", "embodix", *words)
    assert done.returncode == 0, done.stderr
    assert "84 modules in FP8" in done.stdout
    assert "33.0 %" in done.stdout
    record = json.loads((tmp_path / "quantize.json").read_text())
    assert record["sizes"]["total"]["num_parameters"] == 2_724_163_520
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".json", ".html")) == [
        "quantize.html",
        "quantize.json",
    ]
