# SPDX-License-Identifier: Apache-2.0
"""When who does what in asynchronous reinforcement learning: pure asyncio, no host, no Ray, no tensors."""
