# SPDX-License-Identifier: Apache-2.0
"""Runs of `lerobot rl` one after another: what `lerobot bench rl` does before it reports.

`variants` composes and checks them, `processes` runs them, `prediction` asks the scheduling model.
"""
