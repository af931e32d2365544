# SPDX-License-Identifier: Apache-2.0
"""FP8 weights with block scales: formats, which modules they are for, and the kernels that compute with them."""
