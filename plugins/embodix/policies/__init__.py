# SPDX-License-Identifier: Apache-2.0
"""Host policies computing on a packed batch: the settings, and what a wrapper has to offer."""
