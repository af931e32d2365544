# SPDX-License-Identifier: Apache-2.0
"""When who does what in asynchronous reinforcement learning: pure asyncio, no host, no Ray, no tensors.

========================  ==============================================================================
`waiting`, `channels`     waits with deadlines that name who waits for whom; what a channel must offer
`batcher`, `adaptive`     which requests are computed together: B_max and T_max, fixed or chosen online
`staleness`               who may generate, and which samples a global batch is made of
`streamer`                a global batch as micro-batches, each worked on as soon as it may be
`weights`                 policy versions that come into use as a whole, beside generation
`protocol`, `conductor`   start, advance, drain and failure of the components
`simulation`              all of it with declared times, for predictions on a virtual clock (`virtual_clock`);
                          `timeline`: its records, busy shares, fresh frames per second, the bound
========================  ==============================================================================

How a host plugs in. The core needs of a host three things, each a few lines around what the host has:

- a channel: an object with ``async receive()`` (`channels.Receive`) or ``async send(item)`` (`channels.Send`). Nothing
  is polled, and a receive once posted is never cancelled by the batcher.
- a component for the conductor (`conductor.Component`): ``start``, ``run``, ``drain``, ``kill`` of one worker group.
- a buffer of weights (`weights.Buffer`): ``write(part)`` copies one part into the tensors that are not in use.

`embodix_rl.rlinf.asynchronous` has them around RLinf's. The gate lives in the driver, since the trainer computes while
leave is asked for. ``staleness`` counts from the oldest version that a trajectory's actions can carry, which is the
oldest that any rollout worker uses when the trajectory begins: rollout workers tell the gate by ``adopt``
(`WeightReceiver`'s ``on_adopt``).
"""
