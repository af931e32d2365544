# SPDX-License-Identifier: Apache-2.0
"""What `lerobot rl` and `lerobot bench rl` record and show."""
