# SPDX-License-Identifier: Apache-2.0
"""Files of recordings: settings that are compared, and JSON that is whole or not there."""

import json
from pathlib import Path
from typing import Any


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One sentence for each setting that differs."""
    return [
        f"{name}: wanted {wanted.get(name)!r}, found {found.get(name)!r}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside `path`, then rename."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)
