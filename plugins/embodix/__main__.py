# SPDX-License-Identifier: Apache-2.0
"""``python -m embodix <verb>``: the entry that torchrun and ``accelerate launch`` start on every rank."""

from embodix.cli.main import embodix_main

if __name__ == "__main__":
    embodix_main()
