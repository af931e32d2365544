# SPDX-License-Identifier: Apache-2.0
"""A policy whose result shows everything that could go wrong in a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy

from embodix.evaluation.actors import PolicyActor
from embodix.testing.simulators import IMAGE_SIZE, PointSimulators


class SeeingPolicy(PreTrainedPolicy):
    """Goes where it sees the goal, with noise and a network whose rounding depends on the batch."""

    name = "seeing"
    config_class = PreTrainedConfig

    def __init__(self, n_action_steps=3, chunk_size=5):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(n_action_steps=n_action_steps, n_obs_steps=1, device="cpu")
        self.chunk_size = chunk_size
        self.seen = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = (torch.nn.Linear(3 * IMAGE_SIZE**2 + 2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
            self.network = torch.nn.Sequential(*layers, torch.nn.Dropout(0.5))

    def reset(self):
        self.num_resets = getattr(self, "num_resets", 0) + 1

    def predict_action_chunk(self, batch):
        image, state = batch["observation.images.front"], batch["observation.state"]
        self.seen.append(batch)
        disturbance = self.network(torch.cat([image.flatten(1), state], dim=1))
        goal = image[:, 1].flatten(1).argmax(dim=1)
        places = torch.stack([goal // IMAGE_SIZE, goal % IMAGE_SIZE], dim=1) / (IMAGE_SIZE - 1) * 2 - 1
        noise = torch.randn(len(image), self.chunk_size, 2)
        return (2 * (places - state) + 0.3 * disturbance)[:, None] + 0.7 * noise

    def select_action(self, batch):
        raise NotImplementedError

    forward = get_optim_params = select_action


def identity(value):
    return value


@pytest.fixture
def make_actor():
    """A `PolicyActor` of a `SeeingPolicy` on `PointSimulators`; keyword arguments go to the actor."""

    def make(policy=None, **options):
        return PolicyActor(policy or SeeingPolicy(), identity, identity, PointSimulators().env_cfg, **options)

    return make


@pytest.fixture
def seeing_policy():
    return SeeingPolicy
