# SPDX-License-Identifier: Apache-2.0
"""RLinf's workers with embodix in force: one module a role, so that a process imports what its role needs."""
