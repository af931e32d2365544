# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks under DDP: the packed GR00T gives upstream's losses, and masked losses are normalised globally."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodix.attention.segment import SegmentAuto
from embodix.packing.packers import PaddingFreePacker
from embodix.policies.groot_n15.wrapper import GrootN15Wrapper
from embodix.policies.settings import FastPathSettings
from embodix.testing.groot import random_batch, small_groot

RANK_SCRIPT = Path(__file__).with_name("groot_ddp_rank.py")


@pytest.fixture(scope="module")
def losses_of_two_ranks():
    """Losses by variant, one mapping a rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    losses = []
    for process in ranks:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        line = next(line for line in output.splitlines() if line.startswith("LOSSES "))
        losses.append(json.loads(line.removeprefix("LOSSES ")))
    return losses


@pytest.mark.slow
def test_two_ranks_equal_upstreams_two_ranks(losses_of_two_ranks):
    first, second = losses_of_two_ranks
    for rank in (first, second):
        assert rank["host"] == pytest.approx(rank["upstream"], rel=1e-5)
    assert first["host"] != second["host"]


@pytest.mark.slow
def test_masked_losses_of_two_ranks_average_to_the_global_mean(losses_of_two_ranks):
    first, second = (rank["mask"] for rank in losses_of_two_ranks)
    policy = small_groot(tune_llm=True, tune_visual=True)
    settings = FastPathSettings(PaddingFreePacker(), SegmentAuto(), action_pad="mask")
    GrootN15Wrapper().install(policy, settings)
    total, num_steps = 0.0, 0
    for rank in (0, 1):
        batch = random_batch(policy, [5, 5], [2, 2], seed=rank)
        batch["action_is_pad"] = (torch.arange(16) >= (4 if rank else 11)).expand(2, -1)
        torch.manual_seed(0)
        loss, _ = policy(batch)
        count = int((~batch["action_is_pad"]).sum())
        total, num_steps = total + loss.item() * count, num_steps + count
    assert (first[0] + second[0]) / 2 == pytest.approx(total / num_steps, rel=1e-5)
