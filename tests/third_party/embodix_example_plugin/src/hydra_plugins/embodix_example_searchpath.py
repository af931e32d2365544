# SPDX-License-Identifier: Apache-2.0
"""Puts this plugin's Hydra choices beside embodix's own."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class EmbodixExampleSearchPath(SearchPathPlugin):
    """Appends ``pkg://embodix_example_plugin.hydra_conf``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("embodix-example-plugin", "pkg://embodix_example_plugin.hydra_conf")
