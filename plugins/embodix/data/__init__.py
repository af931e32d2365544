# SPDX-License-Identifier: Apache-2.0
"""Episodes to samples: recording demonstrations, instructions, cameras and tokenizers."""
