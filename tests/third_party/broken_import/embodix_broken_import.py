# SPDX-License-Identifier: Apache-2.0
"""A plugin whose dependency is not installed."""

import a_package_that_nobody_installed  # noqa: F401
