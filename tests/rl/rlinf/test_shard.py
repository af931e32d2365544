# SPDX-License-Identifier: Apache-2.0
"""A shard of an environment worker over queues of one event loop, with RLinf's containers and without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from embodix_rl.rlinf.hosts import missing

pytestmark = [
    pytest.mark.slow,  # importing RLinf takes seconds
    pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "RLinf is installed"),
]
NUM_STEPS = 3


class Channel:
    """RLinf's interface of a channel."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[Any]] = {}

    def queue(self, key: str) -> asyncio.Queue[Any]:
        return self.queues.setdefault(key, asyncio.Queue())

    def put(self, item: Any, key: str, async_op: bool) -> Any:
        return SimpleNamespace(async_wait=lambda: self.queue(key).put(item))

    def get(self, key: str, async_op: bool) -> Any:
        return SimpleNamespace(async_wait=lambda: self.queue(key).get())


class Remote:
    """Simulators that are lost when told to, without a process."""

    life = 0

    def restart(self) -> None:
        """They run again."""

    def kill(self) -> None:
        """Nothing runs."""

    def lose(self) -> None:
        from embodix_rl.rlinf.simulator_process import SimulatorLostError

        self.life += 1
        raise SimulatorLostError("The simulators of env 0 crashed")


def _worker(waits_for_all: bool, crashes: dict[int, int]) -> Any:
    """With two stages; `crashes` names the call of a stage's step that is its simulators' last."""
    from rlinf.data.embodied_io_struct import EnvOutput

    from embodix_rl.rlinf.asynchronous.supervised_simulators import SupervisedSimulators

    remote, calls = Remote(), {0: 0, 1: 0}
    flags = torch.zeros(1, 2, dtype=torch.bool)

    def seen(stage: int) -> Any:
        obs = {"states": torch.full((1, 2), float(stage))}
        return EnvOutput(obs=obs, rewards=torch.ones(1, 2), dones=flags, terminations=flags, truncations=flags)

    def step(actions: Any, stage: int) -> Any:
        calls[stage] += 1
        if crashes.get(stage) == calls[stage]:
            remote.lose()
        return seen(stage), {}

    train = {"max_episode_steps": 100, "auto_reset": True, "ignore_terminations": False}
    return SimpleNamespace(
        _source="env 0",
        _deadline_s=5.0,
        _waits_for_all=waits_for_all,
        n_train_chunk_steps=NUM_STEPS,
        train_num_envs_per_stage=1,
        cfg=OmegaConf.create({"env": {"train": train}}),
        simulators=SupervisedSimulators("env 0", remote, lambda: None),
        begin=seen,
        pending=seen,
        env_interact_step=step,
        end=lambda stage, last: None,
        compute_bootstrap_rewards=lambda seen, values, model: seen.rewards,
    )


async def _run(waits_for_all: bool, crashes: dict[int, int], *, late_leave: bool = False) -> dict[str, Any]:
    """Two trajectories of each of two shards; what came on each channel. Values count the requests of a shard.

    With `late_leave` there is none before the trajectory before was delivered.
    """
    from embodix_rl.rlinf.asynchronous.exchange import Asks, Delivered, Masked, answers_key, samples_key, tickets_key
    from embodix_rl.rlinf.workers.shard_env import Shard
    from embodix_rl.scheduling.staleness import Ticket

    inbox, requests, actor, events = Channel(), Channel(), Channel(), Channel()
    worker = _worker(waits_for_all, crashes)
    shards = [Shard(worker, stage, inbox, requests, actor, events) for stage in range(2)]
    asked = {shard.name: 0 for shard in shards}
    delivered: list[Delivered] = []

    async def infer() -> None:
        while True:
            request = (await requests.queue("requests").get())["item"]
            asked[request.client] += 1
            await inbox.queue(answers_key(request.client)).put({"item": _answer(asked[request.client])})

    async def give(shard: str, number: int) -> None:
        while late_leave and number > 1 + sum(one.ticket.who == shard for one in delivered):
            await asyncio.sleep(0)
        ticket = Ticket(number, 0, 0, shard) if number <= 2 else None
        await inbox.queue(tickets_key(shard)).put({"item": ticket})

    async def gate() -> None:
        given = {shard.name: 0 for shard in shards}
        async with asyncio.TaskGroup() as giving:
            while True:
                event = (await events.queue("events").get())["item"]
                if isinstance(event, Asks):
                    given[event.shard] += 1
                    giving.create_task(give(event.shard, given[event.shard]))
                elif isinstance(event, Delivered):
                    delivered.append(event)

    serving = [asyncio.ensure_future(work()) for work in (infer, gate)]
    await asyncio.gather(*(shard.run() for shard in shards))
    await asyncio.sleep(0.1)
    for task in serving:
        task.cancel()
    sent, values = {}, {}
    for shard in shards:
        queue = actor.queue(samples_key(shard.name))
        items = [queue.get_nowait()["item"] for _ in range(queue.qsize())]
        sent[shard.name] = [not isinstance(item, Masked) for item in items]
        values[shard.name] = [item.prev_values.flatten().tolist() for item in items if not isinstance(item, Masked)]
    valid = {name: [one.valid for one in delivered if one.ticket.who == name] for name in asked}
    return {"asked": asked, "sent": sent, "delivered": valid, "values": values}


def _answer(value: float) -> Any:
    from rlinf.data.embodied_io_struct import RolloutResult

    return RolloutResult(
        actions=torch.zeros(1, 2, 1),
        prev_logprobs=torch.zeros(1, 2, 1),
        prev_values=torch.full((1, 1), float(value)),
        bootstrap_values=torch.ones(1, 1),
        forward_inputs={"action": torch.zeros(1, 2)},
        versions=torch.zeros(1, 2, 1),
    )


@pytest.mark.parametrize("waits_for_all", [False, True])
@pytest.mark.parametrize("late_leave", [False, True])
def test_trajectories_come_whole_without_a_fault(waits_for_all, late_leave):
    came = asyncio.run(_run(waits_for_all, {}, late_leave=late_leave))
    assert came["sent"] == came["delivered"] == {"env 0 shard 0": [True, True], "env 0 shard 1": [True, True]}
    shares_an_answer = not waits_for_all and not late_leave
    first = 4.0 if shares_an_answer else 5.0
    for of_shard in came["values"].values():
        assert of_shard == [[1.0, 2.0, 3.0, 4.0], [first, first + 1, first + 2, first + 3]]
    assert set(came["asked"].values()) == {2 * (NUM_STEPS + 1) - shares_an_answer}


@pytest.mark.parametrize(("life", "value"), [(0, 7.0), (1, 8.0)])
def test_an_answer_from_before_a_restart_is_not_used(life, value):
    from embodix_rl.rlinf.workers.shard_env import Shard, _Answered

    async def first_answer() -> Any:
        inbox = Channel()
        shard = Shard(_worker(False, {}), 0, inbox, Channel(), Channel(), Channel())
        shard._answered = _Answered(_answer(7.0), life=0)
        await inbox.put({"item": _answer(8.0)}, f"answers {shard.name}", True).async_wait()
        return await shard._first_answer(_worker(False, {}).begin(0), life)

    answer = asyncio.run(first_answer())
    assert answer.prev_values.item() == value
    assert (answer.bootstrap_values is None) == (life == 0)


@pytest.mark.parametrize("waits_for_all", [False, True])
def test_a_crash_masks_what_was_under_way_and_later_ones_come_whole(waits_for_all):
    came = asyncio.run(_run(waits_for_all, {0: 2}))
    assert came["sent"] == came["delivered"]
    assert came["sent"]["env 0 shard 0"] == [False, True]
    assert came["sent"]["env 0 shard 1"][0] is False  # it was under way in the same life
    whole = 2 * (NUM_STEPS + 1)
    assert all(asked == whole if waits_for_all else asked < whole for asked in came["asked"].values())
