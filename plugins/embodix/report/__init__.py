# SPDX-License-Identifier: Apache-2.0
"""Reports: step records, manifests, comparisons, tables and HTML. Knows no host and imports no torch."""
