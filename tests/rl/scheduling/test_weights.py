# SPDX-License-Identifier: Apache-2.0
"""Every action carries exactly one version; what is half delivered is never used."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.channels import Mailbox
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.scheduling.waiting import WaitTimeout
from embodix_rl.scheduling.weights import Part, VersionBegin, WeightMessage, WeightReceiver, WeightSender, hash_of_names

NAMES = ["vision", "language", "action"]
NUM_PARTS = 3


class Parts:
    """A buffer that keeps the version of each of its parts."""

    def __init__(self, version: int) -> None:
        self.versions = [version] * NUM_PARTS

    def write(self, part: Part) -> None:
        self.versions[part.index] = part.payload


def receiver(**options: object) -> WeightReceiver[Parts]:
    return WeightReceiver(Parts(0), Parts(-1), NAMES, **options)


class OneBuffer(WeightReceiver[Parts]):
    """Writes into the buffer that is in use, as a plain broadcast does."""

    def _write(self, part: Part) -> None:
        super()._write(part)
        self._front.write(part)


async def mixed_actions(
    weights: WeightReceiver[Parts], inference_s: list[float], part_s: list[float], train_s: list[float], depth: int
) -> tuple[int, list[int]]:
    """Generate while versions arrive; the number of actions of mixed weights, and the versions of all."""
    box = Mailbox[WeightMessage]("rollout", depth)
    sender = WeightSender([box], NAMES)
    mixed, seen = 0, []

    async def generate() -> None:
        nonlocal mixed
        for seconds in inference_s:
            async with weights.use() as (version, buffer):
                first = list(buffer.versions)
                await asyncio.sleep(seconds)
                mixed += set(buffer.versions) != {version} or buffer.versions != first
                seen.append(version)
            await asyncio.sleep(0.01)

    async def train() -> None:
        for version, seconds in enumerate(train_s, 1):
            await asyncio.sleep(seconds)
            sender.offer(version, [version] * NUM_PARTS)
        sender.close()

    async def carry() -> None:
        for _ in range(10_000):
            message = await box.receive()
            await asyncio.sleep(part_s[0] if isinstance(message, VersionBegin) else part_s[message.index % len(part_s)])
            await weights.accept(message)

    carrying = asyncio.create_task(carry())
    await asyncio.gather(generate(), train(), sender.run())
    await asyncio.sleep(100)
    carrying.cancel()
    await weights.adopt()
    assert weights.version == len(train_s)
    return mixed, seen


TIMES = st.lists(st.sampled_from([0.0, 0.03, 0.2, 1.0]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(inference_s=TIMES, part_s=TIMES, train_s=TIMES, depth=st.integers(1, 4))
def test_every_action_carries_exactly_one_version(inference_s, part_s, train_s, depth):
    adopted = []

    async def adopt(worker: str, version: int) -> None:
        adopted.append(version)

    mixed, seen = run_virtually(mixed_actions(receiver(on_adopt=adopt), inference_s, part_s, train_s, depth))
    assert mixed == 0
    assert seen == sorted(seen)
    assert adopted == sorted(set(adopted)) and set(seen) <= {0, *adopted}


def test_one_buffer_would_mix_versions():
    mixed, _ = run_virtually(mixed_actions(OneBuffer(Parts(0), Parts(-1), NAMES), [1.0] * 8, [0.3], [0.5] * 4, 2))
    assert mixed > 0


def test_half_a_version_is_never_visible():
    async def interrupt() -> None:
        weights = receiver()
        await weights.accept(VersionBegin(1, NUM_PARTS, hash_of_names(NAMES)))
        for index in range(NUM_PARTS - 1):
            await weights.accept(Part(1, index, 1))
        async with weights.use() as (version, buffer):
            assert (version, buffer.versions) == (0, [0, 0, 0])
        await weights.accept(VersionBegin(2, NUM_PARTS, hash_of_names(NAMES)))
        await weights.accept(Part(1, 2, 1))  # late: its version is given up
        assert await weights.adopt() == 0 and weights.num_interrupted == 1
        for index in range(NUM_PARTS):
            await weights.accept(Part(2, index, 2))
        async with weights.use() as (version, buffer):
            assert (version, buffer.versions) == (2, [2, 2, 2])

    run_virtually(interrupt())


def test_generation_does_not_wait_for_weights():
    """Ten inferences take ten inferences' time while versions arrive all along."""

    async def time_of_ten() -> float:
        weights = receiver()
        box = Mailbox[WeightMessage]("rollout", depth=1)
        sender = WeightSender([box], NAMES)
        loop = asyncio.get_running_loop()

        async def carry() -> None:
            while True:
                message = await box.receive()
                await asyncio.sleep(0.4)
                await weights.accept(message)

        tasks = [asyncio.create_task(sender.run()), asyncio.create_task(carry())]
        for version in range(1, 11):
            sender.offer(version, [version] * NUM_PARTS)
            async with weights.use():
                await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        assert weights.version >= 5 and sender.num_skipped >= 1
        return loop.time()

    assert run_virtually(time_of_ten()) == pytest.approx(10.0)


def test_a_version_that_does_not_come_is_named_with_what_is_there():
    async def wait() -> None:
        weights = receiver(worker="rollout 2", deadline_s=30.0)
        await weights.accept(VersionBegin(1, NUM_PARTS, hash_of_names(NAMES)))
        await weights.accept(Part(1, 0, 1))
        await weights.wait_for_version(1)

    message = r"rollout 2 waits for trainer: version 1 \(version 0 is in use, 1 of 3 parts of version 1 are here\)"
    with pytest.raises(WaitTimeout, match=message):
        run_virtually(wait())


def test_an_inference_that_never_ends_is_named():
    async def hang() -> None:
        weights = receiver(worker="rollout 2", deadline_s=30.0)
        async with weights.use():
            await weights.accept(VersionBegin(1, 1, hash_of_names(NAMES)))
            await weights.accept(Part(1, 0, 1))
            await weights.adopt()

    with pytest.raises(WaitTimeout, match="weight exchange waits for rollout 2: the end of an inference"):
        run_virtually(hang())


def test_the_channels_end_leaves_the_version_in_use():
    async def end() -> None:
        weights = receiver()
        await weights.accept(VersionBegin(1, NUM_PARTS, hash_of_names(NAMES)))
        await weights.accept(Part(1, 0, 1))
        async with weights.use() as (version, buffer):
            assert (version, buffer.versions) == (0, [0, 0, 0])

    run_virtually(end())


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([VersionBegin(1, 3, hash_of_names(NAMES[::-1]))], "Trainer and rollout must build the same model"),
        ([VersionBegin(0, 3, hash_of_names(NAMES))], "Versions only grow: 0 was announced after 0"),
        ([VersionBegin(1, 0, hash_of_names(NAMES))], "A version has at least one part"),
        (
            [VersionBegin(1, 3, hash_of_names(NAMES)), Part(1, 3, 0)],
            "Part 3 of version 1 came twice or is none of its 3",
        ),
        ([VersionBegin(1, 3, hash_of_names(NAMES)), Part(1, 0, 0), Part(1, 0, 0)], "Part 0 of version 1 came twice"),
    ],
)
def test_messages_that_make_no_sense_are_refused(messages, message):
    async def send() -> None:
        weights = receiver()
        for one in messages:
            await weights.accept(one)

    with pytest.raises(ValueError, match=message):
        run_virtually(send())
