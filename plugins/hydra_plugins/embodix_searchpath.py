# SPDX-License-Identifier: Apache-2.0
"""Makes the config groups of embodix and of its plugins available to any Hydra application in this environment.

``hydra_plugins`` is a namespace package that Hydra scans at start-up, so this module stays cheap to import.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class EmbodixSearchPath(SearchPathPlugin):
    """Appends ``pkg://embodix.hydra_conf``, then every package of the hook ``register_config_packages``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from embodix.config.compose import config_packages

        for package in config_packages():
            search_path.append("embodix", f"pkg://{package}")
