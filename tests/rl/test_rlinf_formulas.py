# SPDX-License-Identifier: Apache-2.0
"""Numbers of RLinf's own algorithms beside ours, where RLinf is there.

Its ``algorithms`` import little: they are taken from an installed ``rlinf``, or from the checkout in ``RLINF_CHECKOUT``
with a stand-in for the package's heavy ``__init__``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from embodix_rl.objectives.objective import ValueLossSettings, value_loss
from embodix_rl.objectives.policy_loss import PolicyLossSettings, policy_loss


def rlinf_folder():
    checkout = os.environ.get("RLINF_CHECKOUT")
    if checkout:
        return Path(checkout) / "rlinf"
    spec = importlib.util.find_spec("rlinf")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@pytest.fixture(scope="module")
def rlinf():
    """``losses`` of RLinf, loaded by itself; ``sys.modules`` is put back."""
    folder = rlinf_folder()
    if folder is None:
        pytest.skip("needs RLinf: the extra rl, or RLINF_CHECKOUT=<folder of a checkout>")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "rlinf"}
    try:
        for package in ("rlinf", "rlinf.algorithms", "rlinf.utils"):
            module = types.ModuleType(package)
            module.__path__ = [str(folder.joinpath(*package.split(".")[1:]))]
            sys.modules[package] = module
        utilities = types.ModuleType("rlinf.utils.utils")
        utilities.masked_mean, utilities.masked_mean_ratio = masked_means(folder)
        sys.modules["rlinf.utils.utils"] = utilities
        yield types.SimpleNamespace(losses=importlib.import_module("rlinf.algorithms.losses"))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "rlinf"]:
            del sys.modules[name]
        sys.modules.update(before)


def masked_means(folder):
    """The two functions of ``rlinf/utils/utils.py``, whose other imports need accelerators."""
    import ast

    tree = ast.parse((folder / "utils" / "utils.py").read_text())
    wanted = ("masked_mean", "masked_mean_ratio")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names = {"torch": torch}
    exec(compile(ast.Module(functions, []), "utils.py", "exec"), names)
    return [names[name] for name in wanted]


def drawn(seed=0, num_chunks=64):
    torch.manual_seed(seed)
    behaviour = torch.randn(num_chunks)
    current, proximal = (behaviour + 0.4 * torch.randn(num_chunks) for _ in range(2))
    return current.requires_grad_(), behaviour, proximal, torch.randn(num_chunks), torch.rand(num_chunks) < 0.8


def slope(loss, leaf):
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def test_ppo(rlinf):
    current, behaviour, _, advantages, valid = drawn()
    wanted, metrics = rlinf.losses.compute_ppo_actor_loss(
        current, behaviour, 0.2, 0.28, advantages, loss_mask=valid, clip_ratio_c=3.0
    )
    got, statistics = policy_loss(current, behaviour, advantages, valid, PolicyLossSettings(0.2, 0.28, 3.0))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope(got, current), slope(wanted, current), rtol=1e-5, atol=1e-7)
    assert statistics.metrics()["ratio_mean"] == pytest.approx(float(metrics["actor/ratio"]), rel=1e-5)
    assert statistics.metrics()["clip_fraction"] == pytest.approx(float(metrics["actor/clip_fraction"]), abs=1e-6)


def test_decoupled_ppo(rlinf):
    current, behaviour, proximal, advantages, valid = drawn()
    wanted, metrics = rlinf.losses.compute_decoupled_ppo_actor_loss(
        current,
        behaviour,
        0.2,
        0.28,
        advantages,
        proximal_logprobs=proximal,
        versions=torch.arange(64) % 4,
        current_version=3,
        loss_mask=valid,
        clip_ratio_c=3.0,
        behave_weight_threshold=1.2,
    )
    settings = PolicyLossSettings(0.2, 0.28, 3.0, behaviour_cap=1.2)
    kept = (proximal - behaviour).exp() <= 1.2
    got, statistics = policy_loss(current, behaviour, advantages, valid, settings, proximal_log_probs=proximal)
    # RLinf leaves out the chunks beyond the cap and divides by those within; embodix gives them the cap as weight.
    beyond, _ = policy_loss(
        current,
        behaviour,
        advantages,
        valid & ~kept,
        settings,
        proximal_log_probs=proximal,
        num_valid=float(valid.sum()),
    )
    share = 1.0 - float(metrics["actor/behav_clip_fraction"])
    assert share < 1.0
    torch.testing.assert_close(got - beyond, wanted * share, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(slope(got - beyond, current), slope(wanted, current) * share, rtol=1e-5, atol=1e-7)
    assert statistics.metrics()["cap_fraction"] == pytest.approx(1.0 - share, abs=1e-6)


def test_value_loss(rlinf):
    torch.manual_seed(0)
    values, returns, before = torch.randn(64).requires_grad_(), 5 * torch.randn(64), torch.randn(64)
    valid = torch.rand(64) < 0.8
    wanted, _ = rlinf.losses.compute_ppo_critic_loss(values, returns, before, 0.2, 1.5, loss_mask=valid)
    got = value_loss(values, returns, before, valid, ValueLossSettings(0.2, 1.5))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope(got, values), slope(wanted, values), rtol=1e-5, atol=1e-7)
