# SPDX-License-Identifier: Apache-2.0
"""Every experiment decodes to a config that upstream accepts, and the two demos draw the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from embodix import hydra_conf
from embodix.schema.compose import compose
from embodix.training.host_config import decode_host_config, require_landed_groups

EXPERIMENTS = sorted(p.stem for folder in hydra_conf.__path__ for p in Path(folder).glob("experiment/*.yaml"))


@pytest.mark.parametrize("plugin", ["none", "embodix"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_decodes(name: str, plugin: str) -> None:
    cfg = compose("train", [f"experiment={name}", f"+plugin={plugin}", "train.output_dir=null"])
    require_landed_groups(cfg)
    assert decode_host_config(cfg).steps == cfg.train.steps


def test_both_demos_train_on_the_same_samples() -> None:
    demo, groot = (compose("train", [f"experiment={name}"]) for name in ("demo", "groot_demo"))
    for node in ("dataset", "env", "eval"):
        assert OmegaConf.to_container(demo[node]) == OmegaConf.to_container(groot[node])
    for name in ("batch_size", "seed"):
        assert demo.train[name] == groot.train[name]
