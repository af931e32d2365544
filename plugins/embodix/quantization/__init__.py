# SPDX-License-Identifier: Apache-2.0
"""`lerobot quantize`: which modules, in which format, and whether the policy still acts alike."""
