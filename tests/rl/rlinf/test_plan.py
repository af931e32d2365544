# SPDX-License-Identifier: Apache-2.0
"""From the command line to RLinf's config, without RLinf."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from embodix.config.compose import compose
from embodix.plugins import PluginError
from embodix_rl.rlinf import hosts
from embodix_rl.rlinf.rl_run import run_rl
from embodix_rl.rlinf.run_plan import plan_run
from embodix_rl.rlinf.task_config import flow_settings


def _plan(folder, *overrides):
    return plan_run(compose("rl", list(overrides)), folder)


def test_defaults_are_a_synchronous_run_on_declared_times(tmp_path):
    plan = _plan(tmp_path)
    host = plan.host
    assert plan.sizes.frames_per_step == 8 * 40
    assert host.runner.logger.log_path == str(tmp_path)
    assert host.cluster.component_placement == {"env": "0:0", "rollout": "0:0", "actor": "0:0"}
    assert host.env.train.embodix.environment == "latency"
    assert host.env.train.max_episode_steps == 40
    assert host.actor.model.model_type == "embodix_latency"
    assert host.actor.model.inference_s == {1: 0.05, 8: 0.1}
    assert host.weight_syncer.bucket.bucket_device == "cpu"
    assert not host.runner.get("use_training_pipeline", False)
    OmegaConf.to_container(host, resolve=True, throw_on_missing=True)


def test_runners_change_what_they_say(tmp_path):
    assert _plan(tmp_path, "runner=pipeline").host.runner.use_training_pipeline
    overrides = ["runner=rlinf_async", "runner.options.decoupled=true", "placement.env_workers=4"]
    plan = _plan(tmp_path, *overrides)
    assert plan.host.runner.enable_decoupled_mode
    assert plan.host.algorithm.loss_type == "decoupled_actor_critic"
    assert plan.host.algorithm.rollout_store_size_per_rank == 4  # as much data as a synchronous step
    assert plan.host.cluster.component_placement.env == "0:0-3"


def test_grpo_has_groups_and_no_value_head(tmp_path):
    host = _plan(tmp_path, "algorithm=grpo").host
    assert (host.algorithm.adv_type, host.algorithm.group_size, host.env.train.group_size) == ("grpo", 4, 4)
    assert not host.actor.model.add_value_head and not host.env.train.auto_reset


def test_host_nodes_are_merged_last(tmp_path):
    host = _plan(tmp_path, "+host.actor.fsdp_config.gradient_checkpointing=true").host
    assert host.actor.fsdp_config.gradient_checkpointing
    assert host.actor.fsdp_config.strategy == "fsdp2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.num_envs=7", "placement.env_workers=2"], r"nearest: 6 or 8"),
        (["rl.steps=0"], r"at least 1"),
        (["rl.save_every=0"], r"rl.save_every counts training steps"),
        (["rl.save_every=5", "rl.eval_every=2"], r"multiple of rl.eval_every=2; nearest: 4 or 6"),
        (["runner=rlinf_async", "rl.eval_every=2"], r"does not evaluate while it trains"),
        (["runner=pipeline", "algorithm=grpo"], r"GAE"),
        (["runner=rlinf_async", "algorithm=grpo", "rollout.auto_reset=true"], r"PPO only"),
        (["runner=rlinf_async", "runner.options.staleness_threshold=-1"], r"staleness_threshold"),
        (["runner=rlinf_async", "runner.options.decoupled=true", "rollout.stages=2"], r"one stage"),
        (["env.step_s={mean_s: 1, kind: normal}"], r"constant, lognormal"),
        (["+env.speed=3"], r"env=latency has no field speed"),
        (["env=none"], r"needs an environment"),
        (["optim.lr=-1"], r"optim.lr is a positive learning rate; got -1"),
        (["optim.value_lr=0"], r"optim.value_lr is a positive learning rate; got 0"),
        (["rl.seed=-1"], r"rl.seed is a seed from 0 on; got -1"),
        (["policy.inference_s=0.5"], r"seconds by batch size"),
        (["+policy.depth=3"], r"policy=latency has no field depth"),
        (["env=metaworld"], r"acts in env=latency only"),
        (["env=metaworld", "policy=pi05_small"], r"checkpoint=outputs/train"),
        (["policy=pi05_small"], r"sees images"),
        (
            ["env=metaworld", "policy=upstream", "policy.type=act"],
            r"knows policies of type latency, (groot and pi05|pi05 and groot); got policy.type=act",
        ),
        (["env=metaworld", "policy=pi05_small", "checkpoint=/absent"], r"holds no model"),
        (["env=metaworld", "reward.source=luck", "policy=pi05_small"], r"success, simulator, progress; got 'luck'"),
        (["optim.lr_schedule=linear"], r"optim\.lr_schedule is one of constant, cosine; got 'linear'"),
        (["placement.env_workers=0"], r"at least 1"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        _plan(tmp_path, *overrides)


def test_unknown_runner_names_the_registered_ones(tmp_path):
    with pytest.raises(PluginError, match=r"No runner is called 'fast'; known: pipeline, rl_vla3, rlinf_async, sync"):
        _plan(tmp_path, "runner.name=fast")


def test_a_checkpoint_gives_the_policy_its_sizes(tmp_path):
    model = tmp_path / "run" / "checkpoints" / "last" / "pretrained_model"
    model.mkdir(parents=True)
    config = {"type": "pi05", "chunk_size": 10, "output_features": {"action": {"shape": [4]}}}
    (model / "config.json").write_text(json.dumps(config))
    overrides = ["env=metaworld", "policy=pi05_small", f"checkpoint={tmp_path / 'run'}", "rollout.steps=50"]
    plan = _plan(tmp_path, *overrides, "rollout.chunk=5", "optim.global_batch=80")
    assert plan.host.actor.model.action_dim == 4 and plan.host.actor.model.num_action_chunks == 5
    assert plan.host.env.train.embodix.env.type == "embodix_metaworld"
    assert plan.host.env.train.max_episode_steps == 150  # the environment's own
    assert plan.host.env.eval.embodix.seed == 100_000
    with pytest.raises(ValueError, match="more than the 10 that the policy"):
        _plan(tmp_path, *overrides, "rollout.chunk=25", "optim.global_batch=16")
    with pytest.raises(ValueError, match="of type pi05, not groot"):
        _plan(tmp_path, *overrides[:1], "policy=groot_n15_small", *overrides[2:], "optim.global_batch=80")


def test_what_every_worker_would_stumble_over_is_found_before_they_start(tmp_path):
    config = {"type": "pi05", "chunk_size": 10, "output_features": {"action": {"shape": [4]}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = ["env=metaworld", "policy=pi05_small", f"checkpoint={tmp_path}", "rollout.chunk=5", "rollout.steps=50"]
    overrides.append("optim.global_batch=80")
    with pytest.raises(ValueError, match=r"'rech-v3' is no MetaWorld task"):
        _plan(tmp_path, *overrides, "env.task=rech-v3")
    with pytest.raises(ValueError, match=r"env.episode_length must be at least 1; got 0"):
        _plan(tmp_path, *overrides, "env.episode_length=0")
    (tmp_path / "policy_preprocessor.json").write_text('{"steps": []}')
    with pytest.raises(ValueError, match=r"policy_postprocessor.json, which is missing"):
        _plan(tmp_path, *overrides)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "policy_preprocessor.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        _plan(tmp_path, *overrides)


def test_a_run_is_resumed_from_its_last_checkpoint(tmp_path):
    for step in (2, 10):
        (tmp_path / "run" / "checkpoints" / f"global_step_{step}" / "actor").mkdir(parents=True)
    last = tmp_path / "run" / "checkpoints" / "global_step_10"
    (tmp_path / "run" / "checkpoints" / "global_step_11").mkdir()  # of a run that was killed while it saved
    for given in (tmp_path / "run", last):
        assert _plan(tmp_path, f"resume={given}").host.runner.resume_dir == str(last)
    with pytest.raises(ValueError, match=r"holds no checkpoint .*rl.save_every"):
        _plan(tmp_path, f"resume={tmp_path}")


def test_a_run_without_rlinf_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "version_problem", lambda name, wanted: f"wanted {name}{wanted}, found none")
    with pytest.raises(ValueError, match=r"runs in RLinf: wanted rlinf>=0.3.0.*wanted ray.*`make rl`"):
        run_rl(compose("rl", []), [], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+algorithm.gama=0.9", r"algorithm.gama is not known of RLinf; did you mean algorithm.gamma\?"),
        ("+algorithm.clip_ratio_hi=0.3", "did you mean algorithm.clip_ratio_high"),
        ("runner.options.streaming=maybe", "runner 'rl_vla3', option 'streaming', is true or false; got 'maybe'"),
        ("+runner.options.stream=no", r"runner 'rl_vla3' has no option 'stream'. Did you mean 'streaming'\?"),
    ],
)
def test_misspelt_fields_of_open_nodes_are_refused(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        _plan(tmp_path, "runner=rl_vla3", override)


def test_words_of_switches_are_read_and_other_fields_of_rlinf_are_passed_on(tmp_path):
    plan = _plan(tmp_path, "runner=rl_vla3", "runner.options.streaming=no", "+algorithm.rollout_top_k=3")
    assert plan.host.embodix.rl_vla3.streaming is False
    assert plan.host.algorithm.rollout_top_k == 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"sampler": {"noise_levl": 0.3}}, "sampler has no option 'noise_levl'. Did you mean 'noise_level'"),
        ({"sampler": {"noise_level": "much"}}, "sampler, option 'noise_level', is a number; got 'much'"),
        ({"value": {"detached": "maybe"}}, "value, option 'detached', is true or false; got 'maybe'"),
        ({"value": {"features": "prefixes"}}, "is one of prefix, action; got 'prefixes'. Did you mean prefix"),
    ],
)
def test_settings_of_a_flow_are_checked_before_workers_start(node, message):
    cfg = OmegaConf.merge(compose("rl", []), node)
    with pytest.raises(ValueError, match=message):
        flow_settings(cfg)


def test_settings_of_a_flow_are_typed():
    cfg = OmegaConf.merge(compose("rl", []), {"value": {"detached": "no"}, "sampler": {"candidate_steps": [0, "1"]}})
    assert flow_settings(cfg) == {"sampler": {"candidate_steps": (0, 1)}, "value": {"detached": False}}
