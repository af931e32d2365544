# SPDX-License-Identifier: Apache-2.0
"""``runner=rl_vla3``: RL-VLA3's three levels of asynchrony (arXiv 2602.05765) in RLinf's workers.

`embodix_rl.scheduling` decides when who does what; here it meets RLinf's channels and processes:

====================  ==================================================================================
`rl_vla3`             the runner as it is chosen and checked, without RLinf
`exchange`            RLinf's channels as the core's, and what travels on them: messages, weights in parts
`gate_service`        the staleness gate in the driver, reached by messages
`components`          the conductor's components around calls of worker groups; evaluations beside training
`driver`              the runner class
`version_update`      what trains one policy version: gradients as samples arrive, one optimizer step or several
====================  ==================================================================================

The workers are `embodix_rl.rlinf.workers.shard_env`, `batching_rollout` and `streaming_actor`. The gate lives in the
driver, not in the training process: that one computes while leave to generate is asked for, and a driver outlives it.
"""
