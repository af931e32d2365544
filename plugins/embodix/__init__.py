# SPDX-License-Identifier: Apache-2.0
"""embodix: exact, fast training of vision-language-action models inside upstream LeRobot and RLinf.

Importing this package imports no torch and no host; it offers the plugin marker and the registration record.
"""

from pathlib import Path

from embodix.hookspecs import Registration, hookimpl

__version__ = "0.1.0"
__all__ = ["Registration", "__version__", "hookimpl"]

# A wheel carries hydra_conf/ and patches/ inside this package; in a checkout they stand beside plugins/, and an
# editable install cannot map them (both setuptools' and hatchling's mapping fail silently). Extending the package
# path makes embodix.hydra_conf and embodix.patches importable in both.
_checkout = Path(__file__).resolve().parents[2]
if not (Path(__file__).parent / "hydra_conf").is_dir() and (_checkout / "hydra_conf" / "__init__.py").is_file():
    __path__.append(str(_checkout))
