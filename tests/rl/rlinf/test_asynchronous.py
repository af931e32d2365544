# SPDX-License-Identifier: Apache-2.0
"""What is embodix's own in ``runner=rl_vla3``, without RLinf: the gate by messages, components, weights, the update."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from embodix.config.compose import compose
from embodix_rl.objectives.objective import SampledChunks
from embodix_rl.rlinf.asynchronous.components import DriverComponent, WorkersComponent, finished
from embodix_rl.rlinf.asynchronous.exchange import (
    EVENTS,
    Adopted,
    Asks,
    ChannelReceive,
    ChannelSend,
    Delivered,
    ModelBuffer,
    answers_key,
    split_weights,
    tickets_key,
)
from embodix_rl.rlinf.asynchronous.gate_service import GateService
from embodix_rl.rlinf.asynchronous.version_update import ShardSamples, StreamedUpdate, objective_of
from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.rlinf.run_plan import plan_run
from embodix_rl.scheduling.staleness import GateSettings, StalenessGate
from embodix_rl.scheduling.streamer import AdvantageMoments
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.scheduling.waiting import WaitTimeout
from embodix_rl.scheduling.weights import Part
from embodix_rl.testing.rl_updates import PPO_ALGORITHM


class Channel:
    """RLinf's interface of a channel over queues of one event loop."""

    def __init__(self) -> None:
        self._queues: defaultdict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)

    def put(self, item: Any, key: str, async_op: bool) -> Work:
        assert async_op
        return Work(self._queues[key].put(item))

    def get(self, key: str, async_op: bool) -> Work:
        assert async_op
        return Work(self._queues[key].get())


class Work:
    def __init__(self, coroutine: Any) -> None:
        self._task = asyncio.ensure_future(coroutine)

    async def async_wait(self) -> Any:
        return await self._task


def test_a_channel_keeps_its_keys_apart_and_carries_anything():
    async def talk() -> None:
        channel = Channel()
        for key, item in {"one": None, "other": torch.ones(2)}.items():
            await ChannelSend(channel, key).send(item)
        assert torch.equal(await ChannelReceive(channel, "other").receive(), torch.ones(2))
        assert await ChannelReceive(channel, "one").receive() is None

    run_virtually(talk())
    assert tickets_key("env 0 shard 1") != answers_key("env 0 shard 1")


@settings(max_examples=60, deadline=None)
@given(
    num_batches=st.integers(1, 3),
    staleness=st.integers(0, 4),
    epochs=st.integers(1, 2),
    seconds=st.lists(st.floats(0.01, 5.0), min_size=6, max_size=6),
)
def test_every_run_ends_and_each_sample_is_trained_once_and_in_time(num_batches, staleness, epochs, seconds):
    """Three shards, one trainer and one rollout worker at any speeds, all by messages."""
    train_s, weights_s, message_s, *shard_s = seconds

    async def run() -> StalenessGate:
        gate = StalenessGate(GateSettings(3 * epochs, staleness, num_batches=num_batches))
        events, tickets = Channel(), Channel()
        tell = ChannelSend(events, EVENTS)
        service = GateService(
            gate, ChannelReceive(events, EVENTS), lambda shard: ChannelSend(tickets, tickets_key(shard))
        )
        serving = asyncio.ensure_future(service.run())
        version_in_use = 0

        async def shard(name: str, trajectory_s: float) -> None:
            while True:
                await asyncio.sleep(message_s)
                await tell.send(Asks(name))
                ticket = await ChannelReceive(tickets, tickets_key(name)).receive()
                if ticket is None:
                    return
                assert ticket.version <= version_in_use
                await asyncio.sleep(trajectory_s)
                await tell.send(Delivered(ticket, {"env/return": [float(ticket.number)]}))

        async def trainer() -> None:
            nonlocal version_in_use
            while not gate.is_over:
                for finished_one in [await gate.take() for _ in range(gate.settings.batch_size)]:
                    assert 0 <= gate.version - finished_one.ticket.version <= staleness
                await asyncio.sleep(train_s)
                await gate.advance(gate.version + 1)
                await asyncio.sleep(weights_s)
                version_in_use = gate.version
                await tell.send(Adopted("rollout 0", version_in_use))

        await tell.send(Adopted("rollout 0", 0))
        await asyncio.gather(trainer(), *(shard(f"env {n}", each) for n, each in enumerate(shard_s)))
        serving.cancel()
        metrics = service.pop_metrics()
        total = 3 * epochs * num_batches
        assert metrics == {"env/return": pytest.approx((total - 1) / 2), "env/num_trajectories": total}
        assert service.pop_metrics() == {}
        return gate

    counts = run_virtually(run()).counts
    assert counts.admitted == counts.finished == counts.taken == 3 * epochs * num_batches
    assert counts.discarded == 0


def test_leave_that_does_not_come_names_who_waits_for_whom():
    async def run() -> None:
        events, tickets = Channel(), Channel()
        gate = StalenessGate(GateSettings(1, 0, num_batches=2), deadline_s=5.0)
        service = GateService(gate, ChannelReceive(events, EVENTS), lambda shard: ChannelSend(tickets, shard))
        for _ in range(2):
            await ChannelSend(events, EVENTS).send(Asks("env 3 shard 1"))
        await service.run()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(run())
    (timeout,) = caught.value.exceptions
    assert isinstance(timeout, WaitTimeout) and "waits for trainer: room for 1 samples" in str(timeout)


class Call:
    """A call of a worker group: it fails, or returns at `release`."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails, self.release = fails, threading.Event()

    def wait(self) -> list[int] | None:
        self.release.wait(10)
        return None if self._fails else [1]

    def done(self) -> bool:
        return not self._fails


def test_a_failed_call_of_workers_fails_its_component():
    async def run() -> None:
        good, bad = Call(), Call(fails=True)
        good.release.set()
        assert await finished(good, "env workers") == [1]
        bad.release.set()
        with pytest.raises(WorkerFailedError, match="A process of env workers failed"):
            await finished(bad, "env workers")

    asyncio.run(run())


@pytest.mark.parametrize("ends_alone", [True, False])
def test_workers_are_stopped_when_they_do_not_end_by_themselves(ends_alone):
    async def run() -> list[str]:
        work, asked = Call(), []

        def stop() -> Call:
            asked.append("stop")
            work.release.set()
            stopped = Call()
            stopped.release.set()
            return stopped

        component = WorkersComponent("rollout workers", None, lambda: work, stop, ends_alone=ends_alone)
        await component.start()
        running = asyncio.ensure_future(component.run())
        await component.drain("finish")
        if ends_alone:
            assert not asked
            await component.drain("cut")
        await running
        return asked

    assert asyncio.run(run()) == ["stop"]


def test_what_runs_in_the_driver_is_cut_off_or_fails():
    async def run() -> None:
        endless = DriverComponent(lambda: asyncio.sleep(1e9))
        running = asyncio.ensure_future(endless.run())
        await asyncio.sleep(1)
        await endless.drain("finish")
        await running

        async def fail() -> None:
            raise ValueError("used twice")

        with pytest.raises(ValueError, match="used twice"):
            await DriverComponent(fail).run()

    run_virtually(run())


def test_weights_arrive_whole_and_do_not_follow_the_trainer():
    torch.manual_seed(0)
    trained, serving = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    parts = split_weights(trained.state_dict(), part_bytes=96)
    assert [list(part) for part in parts] == [["0.weight"], ["0.bias", "1.weight"], ["1.bias"]]
    before = {name: weight.clone() for name, weight in trained.state_dict().items()}
    with torch.no_grad():
        trained[0].weight.zero_()
    buffer = ModelBuffer(serving)
    for index, part in enumerate(parts):
        buffer.write(Part(1, index, part))
    assert all(torch.equal(weight, before[name]) for name, weight in serving.state_dict().items())
    with pytest.raises(KeyError, match=r"2\.weight"):
        buffer.write(Part(2, 0, {"2.weight": torch.zeros(1)}))


class Gaussian(nn.Module):
    """Actions of 2 steps and 3 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(5, 6), nn.Linear(5, 1)

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        normal = torch.distributions.Normal(self.mean(inputs["states"]).view(-1, 2, 3), 0.5)
        log_probs = normal.log_prob(inputs["action"])
        return {"logprobs": log_probs, "entropy": normal.entropy(), "values": self.value(inputs["states"])}


def _samples(policy: Gaussian, num: int, generator: torch.Generator) -> ShardSamples:
    inputs = {
        "states": torch.randn(num, 5, generator=generator),
        "action": torch.randn(num, 2, 3, generator=generator),
    }
    with torch.no_grad():
        now = policy(inputs)
    drawn = {name: torch.randn(num, generator=generator) for name in ("advantages_B", "returns_B", "values_B")}
    behaviour = now["logprobs"] + 0.05 * torch.randn(num, 2, 3, generator=generator)
    valid = torch.rand(num, generator=generator) > 0.3
    return ShardSamples(inputs, SampledChunks(behaviour, valid_B=valid, **drawn))


def test_a_streamed_gradient_is_that_of_the_whole_batch():
    torch.manual_seed(1)
    policy, generator = Gaussian(), torch.Generator().manual_seed(2)
    several = [_samples(policy, 6, generator) for _ in range(2)]
    moments = several[0].moments + several[1].moments
    scale, parameters = moments.scale(), list(policy.parameters())

    def gradient(parts: list[ShardSamples], micro_batch: int) -> list[torch.Tensor]:
        policy.zero_grad()
        update = StreamedUpdate(policy, objective_of(PPO_ALGORITHM, 5.0), micro_batch)
        for part in parts:
            update.train(part, scale)
        metrics = update.finish(parameters)
        assert metrics["actor/behaviour_weight_mean"] != 1.0 and metrics["actor/clip_fraction"] == 0.0
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    whole_inputs = {name: torch.cat([part.inputs[name] for part in several]) for name in several[0].inputs}
    columns = [name for name, value in vars(several[0].sampled).items() if value is not None]
    sampled = {name: torch.cat([getattr(part.sampled, name) for part in several]) for name in columns}
    whole = ShardSamples(whole_inputs, SampledChunks(**sampled))
    torch.testing.assert_close(torch.tensor(vars(whole.moments.scale()).popitem()[1]), torch.tensor(scale.deviation))
    expected = gradient([whole], 12)
    assert len(expected) == 4 and all(bool(one.abs().sum() > 0) for one in expected)
    for micro_batch in (1, 2, 3):
        for other in (several, several[::-1]):
            for got, wanted in zip(gradient(other, micro_batch), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_fresh_samples_have_no_correction_and_stale_ones_are_weighted():
    policy, generator = Gaussian(), torch.Generator().manual_seed(3)
    samples = _samples(policy, 8, generator)
    with torch.no_grad():
        exact = policy(samples.inputs)["logprobs"]
    fresh = ShardSamples(samples.inputs, SampledChunks(**{**vars(samples.sampled), "log_probs_BTA": exact}))
    stale = ShardSamples(samples.inputs, SampledChunks(**{**vars(samples.sampled), "log_probs_BTA": exact - 1.0}))
    weights = []
    for one in (fresh, stale):
        update = StreamedUpdate(policy, objective_of(PPO_ALGORITHM, 5.0), 8)
        update.train(one, AdvantageMoments().scale())
        weights.append(update.finish(policy.parameters()))
    assert weights[0]["actor/behaviour_weight_mean"] == pytest.approx(1.0)
    assert weights[0]["actor/cap_fraction"] == 0.0 and weights[1]["actor/cap_fraction"] == 1.0


def _plan(folder, *overrides):
    return plan_run(compose("rl", ["runner=rl_vla3", *overrides]), folder)


def test_all_switches_off_are_the_synchronous_run(tmp_path):
    off = [f"runner.options.{name}=false" for name in ("async_train", "dynamic_batching", "streaming")]
    plan = _plan(tmp_path, *off, "rl.eval_every=1")
    sync = plan_run(compose("rl", ["runner=sync", "rl.eval_every=1"]), tmp_path)
    assert plan.host == sync.host and plan.runner.evaluates


def test_the_workers_are_told_how_to_run(tmp_path):
    node = _plan(tmp_path, "runner.options.max_staleness=3", "runner.options.streaming=false").host.embodix.rl_vla3
    assert node.max_staleness == 3 and node.dynamic_batching and not node.streaming


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.global_batch=48"], r"does not divide; nearest global_batch: 32 or 64"),
        (
            ["algorithm=grpo", "rollout.num_envs=12", "placement.env_workers=2"],
            r"rollout.num_envs=12 is no multiple of 8, .* group_size=4 .* nearest: 8 or 16",
        ),
        (["algorithm=grpo", "rollout.auto_reset=true"], r"set rollout.auto_reset=false \(got True\)"),
        (
            ["rl.eval_every=2", "evaluation.num_envs=6", "placement.env_workers=2", "rollout.stages=2"],
            r"evaluation.num_envs=6 must be a multiple of 4, .* nearest: 4 or 8",
        ),
        (["rl.eval_every=2", "evaluation.steps=7"], r"evaluation.steps=7 must be a multiple of 5, .* nearest: 5 or 10"),
        (["algorithm.adv_type=raw"], r"It trains by PPO and GRPO; got algorithm.adv_type=raw"),
        (["algorithm.reward_type=action_level"], r"reward_type=chunk_level, not action_level"),
        (["placement.actor_workers=2"], r"placement.actor_workers=1 \(got 2\)"),
        (["runner.options.dynamic_batching=false", "rollout.stages=2"], r"rollout.stages=1 \(got 2\)"),
        (["runner.options.dynamic_batching=false", "placement.rollout_workers=2"], r"rollout_workers=1 \(got 2\)"),
        (["runner.options.queue_depth=1", "rollout.stages=2"], r"leaves some of the 2 shards idle; nearest: 2"),
        (["runner.options.max_staleness=-1"], r"max_staleness is at least 0; got -1"),
        (["runner.options.max_wait_s=-1"], r"max_wait_s is a number of seconds"),
        (["runner.options.deadline_s=0"], r"deadline_s is a positive number"),
        (["runner.options.restarts_per_hour=-1"], r"restarts_per_hour is at least 0; got -1"),
        (["runner.options.deadline_s=100"], r"found after 300 s at a reset.*Set simulator_deadline_s below 20"),
        (["runner.options.normalization=batch"], r"one of exact, previous; got 'batch'"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_starts(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        _plan(tmp_path, *overrides)
