# SPDX-License-Identifier: Apache-2.0
"""Makes embodix's config groups available to any Hydra application in which embodix is installed.

``hydra_plugins`` is a namespace package that Hydra scans at start-up, so this module stays cheap to import.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class EmbodixSearchPath(SearchPathPlugin):
    """Appends ``pkg://embodix.hydra_conf`` after the application's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("embodix", "pkg://embodix.hydra_conf")
