# SPDX-License-Identifier: Apache-2.0
"""π0.5 (Physical Intelligence, 2025) of LeRobot on packed batches.

Everything here computes what ``lerobot/policies/pi05/modeling_pi05.py`` computes, on the rows that exist.
"""
