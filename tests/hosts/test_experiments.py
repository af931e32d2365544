# SPDX-License-Identifier: Apache-2.0
"""Every experiment of `lerobot train` decodes to a config of upstream, and those that belong together agree."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from embodix.config.compose import compose, options_of
from embodix.training.host_config import decode_host_config, require_landed_groups
from embodix_metaworld.tasks import instruction_for, task_names

# Those of `lerobot rl` are composed by tests/rl/test_bench.py.
EXPERIMENTS = [name for name in options_of("experiment") if not name.startswith("rl_")]


def test_every_experiment_is_among_them() -> None:
    expected = {"demo", "groot_demo", "learn_metaworld", "libero_demo", "mixture", "parallel_strategies"}
    assert expected <= set(EXPERIMENTS)


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


def test_learn_metaworld_trains_on_its_own_recording() -> None:
    cfg, recording = compose("train", ["experiment=learn_metaworld"]), compose("data", ["data=learn_metaworld"])
    assert (cfg.dataset.root, cfg.dataset.repo_id) == (recording.root, recording.repo_id)
    assert cfg.dataset.episodes is None, "every recorded task is trained"
    assert cfg.env.task.split(",") == list(recording.tasks)
    for name in ("cameras", "state", "image_size"):
        assert cfg.env[name] == recording[name]


def test_learn_metaworld_has_four_tasks_with_different_instructions() -> None:
    tasks = list(compose("data", ["data=learn_metaworld"]).tasks)
    assert len(tasks) >= 4
    assert set(tasks) <= set(task_names())
    assert len({instruction_for(task) for task in tasks}) == len(tasks)
