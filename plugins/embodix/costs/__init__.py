# SPDX-License-Identifier: Apache-2.0
"""What a training step costs, counted on torch's meta device before anything is run."""
