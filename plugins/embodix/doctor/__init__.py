# SPDX-License-Identifier: Apache-2.0
"""What is installed, what works here, and what a given config needs and lacks."""
