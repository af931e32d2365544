# SPDX-License-Identifier: Apache-2.0
"""Variants of a comparison share data, seed and steps, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodix.config.compose import compose
from embodix.training.lockstep import Variant, compose_variants


def variants(tmp_path: Path, *overrides: str) -> list[Variant]:
    return compose_variants(compose("compare", list(overrides)).compare, list(overrides), tmp_path)


def test_default_variants_are_upstream_and_embodix(tmp_path: Path) -> None:
    upstream, embodix = variants(tmp_path, "policy=pi05_small", "train.steps=5", "compare.measure_memory=false")
    assert (upstream.name, embodix.name) == ("upstream", "embodix")
    assert upstream.cfg.packing.name == "none"
    assert embodix.cfg.packing.name == "padding_free"
    assert upstream.cfg.train.steps == embodix.cfg.train.steps == 5
    assert upstream.cfg.train.output_dir == str(tmp_path / "variants" / "upstream")
    assert upstream.overrides == ["policy=pi05_small", "train.steps=5", "+plugin=none"]


def test_a_group_put_back_stays_put_back(tmp_path: Path) -> None:
    _, embodix = variants(tmp_path, "attention=upstream")
    assert (embodix.cfg.attention.name, embodix.cfg.packing.name) == ("upstream", "padding_free")


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("train.seed=7", "train.seed"),
        ("train.batch_size=2", "train.batch_size"),
        ("policy=pi05_small", "architecture"),
        ("dataset.root=elsewhere", "dataset"),
        ("patches=none", "patches"),
    ],
)
def test_variants_that_would_do_other_work_are_refused(tmp_path: Path, own: str, named: str) -> None:
    with pytest.raises(ValueError, match=rf"on the same samples, so {named} must be the same.*'other' has"):
        variants(tmp_path, f"+compare.variants.other=['{own}']")


def test_one_variant_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least two variants"):
        variants(tmp_path, "~compare.variants.embodix")
