# SPDX-License-Identifier: Apache-2.0
"""How many tokens a text is, by the tokenizer that a run would take, before the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodix.contracts import PolicySupport


def token_counter(config: Mapping[str, Any], support: PolicySupport) -> tuple[Callable[[str], int], str]:
    """A function that counts tokens, and a sentence on how it does.

    Takes the tokenizer that the run would take, else estimates: one token a word, digit and punctuation mark, and one
    to begin with.
    """
    path, hub_id = tokenizer_file(config, support), support.tokenizer_hub_id
    if path is None:
        return _estimate, (
            f"Prompt lengths are estimates: the tokenizer{f' of {hub_id}' * (hub_id is not None)} is not on this "
            "machine, so each word, digit and punctuation mark counts as one token."
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return (lambda text: len(tokenizer.encode(text).ids)), f"Prompt lengths are counted with the tokenizer {path}."


def _estimate(text: str) -> int:
    return 1 + len(re.findall(r"<[|/\w ]+>|[^\W\d_]+|\d|[^\w ]|_", text))


def _hub_file(hub_id: str, directory: str | None) -> Path | None:
    if directory is not None:
        folder = Path(directory) / "hub" / f"models--{hub_id.replace('/', '--')}" / "snapshots"
        return max(folder.glob("*/tokenizer.json"), default=None)
    from huggingface_hub import try_to_load_from_cache

    cached: Any = try_to_load_from_cache(hub_id, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None


def tokenizer_file(config: Mapping[str, Any], support: PolicySupport) -> Path | None:
    """``tokenizer.json`` of a composed config on this machine, None where it has none."""
    directory = (config.get("tokenizer") or {}).get("directory")
    hub_id = support.tokenizer_hub_id
    return _hub_file(hub_id, directory) if hub_id is not None else support.tokenizer_file(config)
