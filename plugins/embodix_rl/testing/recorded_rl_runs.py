# SPDX-License-Identifier: Apache-2.0
"""Run folders of `lerobot rl` with a known schedule, by the writers that a run itself uses.

As a program it is a `lerobot rl` that takes no time: ``python -m embodix_rl.testing.recorded_rl_runs``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodix.config.compose import compose
from embodix.report.manifest import collect_manifest
from embodix_rl.report.rl_steps import RlStep, append_rl_step
from embodix_rl.report.spans import Span, TimelineWriter

BEGIN_S = 1_000.0
STEP_S, INFER_S, TRAIN_S, WEIGHTS_S = 1.0, 0.5, 2.0, 0.25
NUM_ENVS, CHUNK, ROUNDS, NUM_STEPS = 8, 5, 2, 5
FRAMES = NUM_ENVS * CHUNK * ROUNDS
SIZES = {
    "num_envs": NUM_ENVS,
    "num_stages": 1,
    "steps_per_epoch": CHUNK * ROUNDS,
    "rollout_epochs": 1,
    "chunk": CHUNK,
    "env_workers": 2,
    "rollout_workers": 1,
    "actor_workers": 1,
}


def record_run(
    folder: Path, config: dict[str, Any], *, overlapped: bool, reuse: int = 1, wasted_rounds: int = 0
) -> None:
    """A run of `NUM_STEPS` training steps.

    Args:
        overlapped: training runs beside the next rollout instead of before it.
        reuse: each rollout is trained on in so many steps.
        wasted_rounds: chunk steps after each rollout that nothing is trained on.
    """
    collect_manifest("recorded", seed=1, config=config, settings={"sizes": SIZES}).save(folder / "manifest.json")
    groups = [*(("EnvGroup", rank) for rank in (0, 1)), ("RolloutGroup", 0), ("ActorGroup", 0)]
    writers = {f"{name}:{rank}": TimelineWriter(folder / "timeline", f"{name}:{rank}") for name, rank in groups}

    def write(worker: str, activity: str, begin: float, seconds: float) -> float:
        writers[worker].write(Span(worker, activity, begin, begin + seconds))
        return begin + seconds

    now, trained_at, step = BEGIN_S, BEGIN_S, 0
    while step < NUM_STEPS * reuse:
        for _ in range(ROUNDS + wasted_rounds):
            now = write("RolloutGroup:0", "infer", now, INFER_S)
            for rank in (0, 1):
                ended = write(f"EnvGroup:{rank}", "step", now, STEP_S)
            now = ended
        at = now
        for use in range(reuse):
            begun, at = trained_at, write("ActorGroup:0", "train", at, TRAIN_S)
            trained_at = at = write("ActorGroup:0", "weights", at, WEIGHTS_S)
            metrics = {"env/return": float(step), "env/success_once": 0.0}
            append_rl_step(
                folder / "metrics.jsonl",
                RlStep(step, begun, at, FRAMES, 0 if use else FRAMES, 2, {use: FRAMES}, True, metrics),
            )
            step += 1
        now = now if overlapped else at


def main(words: list[str]) -> int:
    """What the overrides say; ``rl.seed=13`` fails."""
    folder = Path(next(word.removeprefix("hydra.run.dir=") for word in words if word.startswith("hydra.run.dir=")))
    cfg = compose("rl", [word for word in words if not word.startswith("hydra.")])
    print("began", flush=True)
    if cfg.rl.seed == 13:
        print("the simulator is on fire", file=sys.stderr)
        return 3
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    record_run(folder, config, overlapped=cfg.runner.name != "sync", reuse=2 if cfg.runner.name == "rlinf_async" else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
