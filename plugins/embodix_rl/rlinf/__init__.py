# SPDX-License-Identifier: Apache-2.0
"""RLinf (0.3.0) as a host: LeRobot's policies and embodix's environments in its workers and runners.

RLinf and Ray are imported where they run, never with this package: composing a config, checking its sizes and
`lerobot rl --help` need neither.
"""
