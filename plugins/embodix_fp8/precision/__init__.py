# SPDX-License-Identifier: Apache-2.0
"""Training precisions: the matrix products of the language model in FP8, its weights and their optimizer in float32."""
