# SPDX-License-Identifier: Apache-2.0
"""Process that holds a Ray cluster: `python -m embodix_rl.rlinf.ray_head '<options as JSON>'`.

It prints the cluster's address as one line of JSON and keeps the cluster until its standard input ends: when the run
closes it, and also when the run is killed. Ray's servers die with this process (PR_SET_PDEATHSIG), and Ray's folder
goes with it.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys


def main() -> None:
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the run decides
    import ray

    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
        print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()
        shutil.rmtree(options["_temp_dir"], ignore_errors=True)


if __name__ == "__main__":
    main()
