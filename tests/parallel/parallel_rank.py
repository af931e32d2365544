# SPDX-License-Identifier: Apache-2.0
"""One gloo rank, of ``torch.distributed.run``: trains each policy under each strategy of a JSON file.

``parallel_rank.py PLANS.json FOLDER``: a plan is ``[label, policy, strategy, options]``; rank 0 writes what each came
to as ``FOLDER/<label>.pt``, or the error as ``FOLDER/<label>.txt``.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_cases import CASES, as_plain, layout_of, train_placed

from embodix import plugins


def main(plans: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for label, policy, name, options in json.loads(plans.read_text()):
        strategy = plugins.build("parallel_strategies", name, options)

        def place(policy, optimizer, support, strategy=strategy):
            return strategy.place(policy, optimizer, torch.device("cpu"), layout_of(strategy), support)

        try:
            done = as_plain(train_placed(CASES[policy], place))
            if dist.get_rank() == 0:
                torch.save(done, folder / f"{label}.pt")
        except Exception:
            (folder / f"{label}.txt").write_text(traceback.format_exc())
            raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
