# SPDX-License-Identifier: Apache-2.0
"""A plugin that ends the process where it is imported."""

import sys

sys.exit("this package needs a licence")
