# SPDX-License-Identifier: Apache-2.0
"""The LeRobot host: upstream's own ``train()`` run from a Hydra config, its accelerator carrying the features."""
