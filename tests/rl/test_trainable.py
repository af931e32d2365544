# SPDX-License-Identifier: Apache-2.0
"""Training a part of a policy."""

import pytest
from torch import nn

from embodix_rl.flow.flow_policy import train_only


def _policy():
    return nn.ModuleDict({"expert": nn.Linear(2, 2), "action_out_proj": nn.Linear(2, 2), "vision": nn.Linear(2, 2)})


def test_parameters_that_a_pattern_is_found_in_are_trained_and_no_others():
    policy = _policy()
    policy["action_out_proj"].requires_grad_(False)
    train_only(policy, ["action_out", r"^expert\.bias$"])
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {"action_out_proj.weight", "action_out_proj.bias", "expert.bias"}


def test_patterns_that_name_nothing_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"head.*names no parameter.*action_out_proj.*vision"):
        train_only(_policy(), ["head"])
