# SPDX-License-Identifier: Apache-2.0
"""embodix: exact, fast training of vision-language-action models inside upstream hosts.

Importing this package imports no torch and no host; it offers the plugin marker and the registration record.
"""

from embodix.hookspecs import Registration, hookimpl

__version__ = "0.1.0"
__all__ = ["Registration", "__version__", "hookimpl"]
