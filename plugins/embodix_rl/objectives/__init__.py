# SPDX-License-Identifier: Apache-2.0
"""What reinforcement learning optimises, in plain torch: advantages, PPO and GRPO for fresh and stale samples."""
