# SPDX-License-Identifier: Apache-2.0
"""One real training step of equal samples in a process of its own, and the most memory that it took.

``python -m embodix.costs.trial_step`` reads a request as JSON and prints the answer as JSON, in its last line.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.contracts import SampleShape
from embodix.report.words import memory as in_words


@dataclass(frozen=True)
class Trial:
    """What a step took.

    Attributes:
        peak: bytes; None where memory ran out.
        source: what measured them.
    """

    peak: int | None
    source: str

    @property
    def sentence(self) -> str:
        return "memory ran out" if self.peak is None else f"{in_words(self.peak)}, {self.source}"


def take_trial(config: Mapping[str, Any], parts: tuple[Any, ...], shape: SampleShape, samples: int) -> Trial:
    """Forward, backward and optimizer of a batch of equal samples, in a new process.

    Args:
        config: the composed train config, in plain containers.
        parts: what the policy is built of, arguments of ``built_policy``.

    Raises:
        RuntimeError: it failed for want of something else than memory; the message carries the end of its output.
    """
    request = {"config": config, "parts": parts, "shape": dataclasses.asdict(shape), "samples": samples}
    command = [sys.executable, "-m", "embodix.costs.trial_step"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode == -9:
        return Trial(None, "killed by the system")
    if done.returncode != 0:
        raise RuntimeError(f"The trial of {samples} samples failed:\n{done.stderr[-2000:]}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def measured_step(config: Mapping[str, Any], parts: tuple[Any, ...], shape: SampleShape, samples: int) -> Trial:
    """The step, in this process.

    Raises:
        ValueError: as building the policy and installing its features do.
    """
    import torch

    from embodix.training.memory import peak_memory

    device = torch.device(config["policy"].get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        _take_step(config, parts, shape, samples, device)
    except (torch.OutOfMemoryError, MemoryError):
        return Trial(None, "memory ran out")
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # of torch's allocator for CPUs
            raise
        return Trial(None, "memory ran out")
    found = peak_memory(device)
    return Trial(found["peak_memory_bytes"], found["peak_memory_source"])


def _take_step(
    config: Mapping[str, Any], parts: tuple[Any, ...], shape: SampleShape, samples: int, device: Any
) -> None:
    from accelerate import Accelerator
    from omegaconf import OmegaConf
    from torch import Tensor

    from embodix.costs.policy_costs import built_policy, sample_batch
    from embodix.patching import patched
    from embodix.training.features import install_features, select_training_features
    from embodix.training.host_config import decode_host_config

    cfg = OmegaConf.create(dict(config))
    host_cfg, accelerator = decode_host_config(cfg), Accelerator(cpu=device.type == "cpu")
    fields, inputs, outputs, architecture, patches, peft = parts
    policy = built_policy(fields, inputs, outputs, architecture, patches, peft, str(device))
    with patched(patches):
        install_features(policy, select_training_features(cfg), accelerator)
        given = sample_batch(policy, shape, samples)
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        preset = host_cfg.optimizer or policy.config.get_optimizer_preset()
        optimizer = preset.build(policy.get_optim_params() if host_cfg.optimizer is None else policy.parameters())
        with accelerator.autocast():
            loss = policy.forward(batch)[0]
        accelerator.backward(loss)
        optimizer.step()


def main() -> None:
    """Answer the request on the standard input."""
    request = json.load(sys.stdin)
    shape = SampleShape(**request["shape"])
    trial = measured_step(request["config"], tuple(request["parts"]), shape, request["samples"])
    print(json.dumps(dataclasses.asdict(trial)))


if __name__ == "__main__":
    main()
