# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks under DDP: the packed policies give upstream's losses, and masked losses are normalised globally."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_case import CASES

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings

RANK_SCRIPT = Path(__file__).with_name("ddp_rank.py")


@pytest.fixture(scope="module", params=list(CASES))
def policy_type(request):
    return request.param


@pytest.fixture(scope="module")
def losses_of_two_ranks(policy_type):
    """Losses by variant, one mapping a rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), policy_type, str(rank), str(port)],
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
def test_masked_losses_of_two_ranks_average_to_the_global_mean(policy_type, losses_of_two_ranks):
    case = CASES[policy_type]
    first, second = (rank["mask"] for rank in losses_of_two_ranks)
    policy = case.build()
    settings = FastPathSettings(PaddingFreePacker(), SegmentAuto(), action_pad="mask")
    case.wrapper().install(policy, settings)
    total, num_steps = 0.0, 0
    for rank in (0, 1):
        batch = case.batch(policy, rank, rank)
        torch.manual_seed(0)
        loss, _ = policy(batch)
        count = int((~batch["action_is_pad"]).sum())
        total, num_steps = total + loss.item() * count, num_steps + count
    assert (first[0] + second[0]) / 2 == pytest.approx(total / num_steps, rel=1e-5)
