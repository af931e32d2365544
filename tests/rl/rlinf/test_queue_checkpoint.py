# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps of a run of rl_vla3: nothing that is finished is lost or trained twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from embodix.config.compose import compose
from embodix_rl.rlinf.asynchronous.queue_checkpoint import (
    SavedGate,
    load_trajectories,
    read_gate,
    require_resumable,
    save_trajectories,
    whole_checkpoint,
    write_gate,
)
from embodix_rl.rlinf.run_plan import plan_run
from embodix_rl.scheduling.staleness import FinishedSample, GateSettings, StalenessGate
from embodix_rl.scheduling.virtual_clock import run_virtually

SIZES = {"num_envs": 8, "steps": 40, "max_staleness": 2}


@dataclass
class Trajectory:
    """As RLinf's: tensors, and mappings of tensors."""

    rewards: torch.Tensor
    forward_inputs: dict[str, torch.Tensor]
    max_episode_length: int = 5


def _gate(num_batches=4, first_version=0) -> StalenessGate:
    return StalenessGate(GateSettings(2, 2, num_batches=num_batches, first_version=first_version))


async def _first_batch() -> tuple[StalenessGate, list[int]]:
    """A gate with one batch trained, two samples finished (one of them masked) and two under way."""
    gate = _gate()
    tickets = [await gate.admit(f"shard {place % 2}") for place in range(6)]
    for ticket in tickets[:4]:
        await gate.finish(FinishedSample(ticket, ticket.who, valid=ticket.number != 3))
    trained = [(await gate.take()).ticket.number for _ in range(gate.settings.batch_size)]
    await gate.advance(1)
    return gate, trained


def test_a_run_goes_on_with_what_was_finished_and_generates_anew_what_was_under_way(tmp_path):
    async def run() -> None:
        gate, trained = await _first_batch()
        write_gate(tmp_path, SavedGate(gate.state(), SIZES, [[3], [4]]))
        saved = read_gate(tmp_path)
        assert saved.shards == ["shard 0", "shard 1"] and saved.episodes == [[3], [4]]
        resumed = _gate(num_batches=3, first_version=1)
        resumed.restore(saved.state)
        assert resumed.num_under_way == 2
        while not resumed.is_over:
            while resumed.may_admit():
                ticket = await resumed.admit("shard 0")
                await resumed.finish(FinishedSample(ticket, ticket.who))
            taken = [await resumed.take() for _ in range(resumed.settings.batch_size)]
            assert [one.valid for one in taken] == [True, len(trained) > 2]
            trained += [one.ticket.number for one in taken]
            await resumed.advance(resumed.version + 1)
        assert trained[:4] == [0, 1, 2, 3] and len(set(trained)) == len(trained) == 8
        assert not set(trained) & {4, 5}  # the numbers of what was under way are not used again

    run_virtually(run())


def test_trajectories_are_those_that_were_saved_in_their_order(tmp_path):
    made = [Trajectory(torch.full((2,), float(place)), {"state": torch.randn(2, 3)}) for place in range(2)]
    finished = [("b", made[0]), ("a", None), ("b", made[1])]
    save_trajectories(tmp_path, finished, {"previous": (0.5, 2.0)})
    loaded, streamer = load_trajectories(tmp_path, Trajectory)
    assert [shard for shard, _ in loaded] == ["b", "a", "b"] and loaded[1][1] is None
    assert torch.equal(loaded[2][1].forward_inputs["state"], made[1].forward_inputs["state"])
    assert loaded[0][1].max_episode_length == 5 and streamer == {"previous": (0.5, 2.0)}


def test_a_checkpoint_is_there_when_it_is_whole(tmp_path):
    folder = tmp_path / "checkpoints" / "global_step_2"
    with pytest.raises(OSError, match="disk full"), whole_checkpoint(folder) as partial:
        (partial / "actor").mkdir()
        raise OSError("disk full")
    assert not folder.exists()
    for content in ("first", "second"):
        with whole_checkpoint(folder) as partial:
            (partial / "weights").write_text(content)
    assert (folder / "weights").read_text() == "second" and list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 20}, r"of other sizes than this run's: steps=20 \(the checkpoint's run had 40\)"),
        ({"max_staleness": 1}, r"version 0 that may wait for 2 versions; runner.options.max_staleness=1 is less"),
    ],
)
def test_a_queue_that_does_not_fit_is_refused(tmp_path, changes, message):
    gate, _ = run_virtually(_first_batch())
    write_gate(tmp_path, SavedGate(gate.state(), SIZES, []))
    require_resumable(tmp_path, SIZES)
    require_resumable(tmp_path, {**SIZES, "max_staleness": 3})
    with pytest.raises(ValueError, match=message):
        require_resumable(tmp_path, {**SIZES, **changes})


def test_a_plan_looks_into_the_checkpoint_before_anything_starts(tmp_path):
    folder = tmp_path / "checkpoints" / "global_step_1"
    (folder / "actor").mkdir(parents=True)
    overrides = ["runner=rl_vla3", f"resume={folder}"]
    plan = plan_run(compose("rl", overrides), tmp_path)  # a checkpoint without a queue
    gate, _ = run_virtually(_first_batch())
    sizes = dict(plan.host.embodix.queue_sizes)
    write_gate(folder, SavedGate(gate.state(), sizes, []))
    plan_run(compose("rl", overrides), Path(tmp_path))
    with pytest.raises(ValueError, match=r"other sizes than this run's: steps=20 .*delete .*queue"):
        plan_run(compose("rl", [*overrides, "rollout.steps=20", "optim.global_batch=32"]), tmp_path)
