# SPDX-License-Identifier: Apache-2.0
"""How a run ends before its last step: by itself, since going on would lose or spoil something, or by Ctrl-C."""

from __future__ import annotations


class RunStoppedError(RuntimeError):
    """The run has ended itself; the message says why, what is kept and what to do. The command's exit code is 1."""


class RunInterrupted(KeyboardInterrupt):
    """The run has ended after a whole step because it was asked to; the message says how it is resumed."""
