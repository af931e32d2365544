# SPDX-License-Identifier: Apache-2.0
"""Whether a data set can be trained on: read once, judged by named rules, before anything is paid for."""
