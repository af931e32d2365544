# SPDX-License-Identifier: Apache-2.0
"""Command line: ``lerobot <verb>`` and ``embodix <verb>``, one thin file a verb."""
