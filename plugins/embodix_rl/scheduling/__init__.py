# SPDX-License-Identifier: Apache-2.0
"""When who does what in asynchronous reinforcement learning: pure asyncio, no host, no Ray, no tensors.

========================  ==============================================================================
`waiting`, `channels`     waits with deadlines that name who waits for whom; what a channel must offer
`batcher`, `adaptive`     which requests are computed together: B_max and T_max, fixed or chosen online
`staleness`               who may generate, and which samples a global batch is made of
`streamer`                a global batch as micro-batches, each worked on as soon as it may be
`weights`                 policy versions that come into use as a whole, beside generation
`protocol`, `conductor`   start, advance, drain and failure of the components; `supervision`: hangs, restarts
`timeline`                who did what when; busy shares, fresh frames per second, the bound
`simulation`              all of it with declared times, for predictions on a virtual clock
========================  ==============================================================================

How a host plugs in. The core needs of a host three things, each a few lines around what the host has:

- a channel: an object with ``async receive()`` (`channels.Receive`) or ``async send(item)`` (`channels.Send`). Around
  an RLinf channel, ``receive`` is ``return await channel.get(key=..., async_op=True).async_wait()`` and ``send`` is
  ``await channel.put(item, key=..., async_op=True).async_wait()``. Nothing is polled, and a receive once posted is
  never cancelled by the batcher.
- a component for the conductor (`conductor.Component`): ``start``, ``run``, ``drain``, ``kill`` of one worker. Around
  a worker group's rank, ``run`` awaits the call that does the work and raises what it raises, ``drain`` calls its
  ``stop``, ``kill`` ends its process.
- a buffer of weights (`weights.Buffer`): ``write(part)`` copies one bucket into the tensors that are not in use.

Where each object lives, for RLinf's workers:

- rollout worker: one `DynamicBatcher` on its request channel and one `WeightReceiver`. Its loop is
  ``batch = await batcher.next_batch()``, ``async with weights.use() as (version, model)``: predict, send each answer
  back with ``version``, ``batcher.observe(batch, seconds)``. Inference blocks the loop of its process; whoever sends a
  request stamps ``sent_at`` where both share a machine's clock, so that T_max counts from there all the same.
- environment worker: before each trajectory of a shard ``ticket = await gate.admit(name)``, after it
  ``await gate.finish(Finished(ticket, trajectory))``. ``None`` for a ticket means that the run needs no more. When the
  worker is restarted, its component's ``start`` calls ``gate.lose(name)``: what it had begun is masked.
- trainer: a `MicroBatchStreamer` turns what was taken off the gate into work; after the optimizer step
  ``sender.offer(version, buckets)``.
- runner (driver): the `StalenessGate`, since the trainer computes while leave is asked for. The driver takes, tells
  every training process what it took, so that all train the same samples, and calls ``await gate.advance(version)``
  before a version is offered. `Conductor` with a `RunProtocol`; `Heartbeats` fed by the workers' metric channel.

``staleness`` counts from the oldest version that a trajectory's actions can carry, which is the oldest that any rollout
worker uses when the trajectory begins: rollout workers tell the gate by ``adopt`` (`WeightReceiver`'s ``on_adopt``).
"""
