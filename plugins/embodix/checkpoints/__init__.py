# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a policy: found, described, loaded."""
