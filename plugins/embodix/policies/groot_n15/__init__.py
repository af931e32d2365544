# SPDX-License-Identifier: Apache-2.0
"""GR00T-N1.5 on upstream's ``GrootPolicy``: its sizes, its offline assets, and its packed computation."""
