# SPDX-License-Identifier: Apache-2.0
"""The config selects exactly the features it names, and refuses names that nobody registered."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodix.config.compose import compose
from embodix.plugins import PluginError
from embodix.training.features import FeatureSelection, install_features, select_features, select_training_features
from embodix_pi05.testing import small_pi05


def selected(*overrides: str) -> FeatureSelection:
    return select_features(compose("train", ["train.output_dir=x", *overrides]))


def test_the_base_config_is_upstream_everywhere() -> None:
    assert selected().is_upstream
    assert selected("+plugin=none").is_upstream


def test_the_plugin_selects_every_exact_fast_path() -> None:
    selection = selected("+plugin=embodix")
    assert (selection.packing.name, selection.attention.name) == ("padding_free", "auto")
    assert (selection.vision_tokens, selection.action_pad, selection.flow_samples) == ("valid", "host", 1)


@pytest.mark.parametrize("order", itertools.permutations(["+plugin=embodix", "attention=upstream"]))
def test_one_group_can_be_put_back_in_either_order(order: tuple[str, ...]) -> None:
    selection = selected(*order)
    assert (selection.packing.name, selection.attention.name) == ("padding_free", "upstream")
    assert not selection.is_upstream


@pytest.mark.parametrize("group", ["action_pad=mask", "flow_samples=2", "vision_tokens=valid", "packing=padding_free"])
def test_a_single_group_is_no_longer_upstream(group: str) -> None:
    assert not selected(group).is_upstream


def test_a_precision_alone_leaves_upstreams_computation_in_place() -> None:
    selection = selected("precision=fp8_tensorwise")
    assert selection.is_upstream
    assert (selection.precision.name, selection.precision.options["recipe"]) == ("torchao", "tensorwise")


def test_float16_and_fp8_are_refused_together() -> None:
    accelerator: Any = SimpleNamespace(mixed_precision="fp16", device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"refuses float16.*mixed_precision=fp16\. Take bf16 or no"):
        install_features(small_pi05(), selected("precision=fp8"), accelerator)


def test_an_unregistered_name_lists_what_exists() -> None:
    with pytest.raises(PluginError, match=r"No packer is called 'padding_fre'.*padding_free.*Did you mean"):
        selected("packing.name=padding_fre")
    with pytest.raises(PluginError, match="segment_gemm"):
        selected("attention.name=segment_gem")


def test_choices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="flow_samples must be at least 1; got 0"):
        selected("flow_samples=0")
    with pytest.raises(ValueError, match="action_pad must be one of host, mask; got 'drop'"):
        selected("action_pad.name=drop")


@pytest.mark.parametrize("group", ["quantization", "precision"])
def test_low_precision_alone_keeps_upstreams_computation(group: str) -> None:
    """It is installed without the packed wrapper."""
    assert getattr(selected(), group).name == "none"
    with pytest.raises(PluginError, match=rf"No {group.replace('zation', 'zer')} is called 'fp9'"):
        selected(f"{group}.name=fp9")


def test_weights_without_gradient_are_not_trained() -> None:
    cfg = compose("train", ["train.output_dir=x", "quantization=fp8_block"])
    assert select_features(cfg).is_upstream
    assert select_features(cfg).quantization.options["kernel"] == "auto"
    with pytest.raises(ValueError, match=r"quantization=fp8_block is for evaluation and rollout.*precision=fp8 trains"):
        select_training_features(cfg)
