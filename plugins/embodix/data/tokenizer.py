# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer that works without network, found by the hub ids that LeRobot's policies have hard-coded.

Built with Hugging Face `tokenizers`, in the manner of Gemma's: byte-pair encoding with byte fallback, spaces
as U+2581, every digit a token of its own, a beginning-of-sequence token, and Gemma's ids of special tokens.

Plain `lerobot-eval` and `lerobot-train` find it through the environment::

    HF_HUB_CACHE=<data set>/tokenizer/hub HF_HUB_OFFLINE=1 lerobot-eval --policy.path=...
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodix.data.recording_files import write_json
from embodix.policies.support import support_of, types_offering

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
SNAPSHOT = "embodix"
SPACE = "\u2581"
ALPHABET = tuple(sorted({SPACE, "\n", *map(chr, range(33, 127))}))


def build_tokenizer(
    instructions: Sequence[str],
    folder: str | Path,
    vocab_size: int,
    hub_ids: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Train a tokenizer on instructions and lay it out in `folder` as a Hugging Face hub cache.

    Args:
        instructions: the corpus; prompts add words and numbers to it.
        folder: where `hub/` is made; ready for `offline_tokenizer`.
        vocab_size: the most tokens, all ids being below it; a small corpus needs fewer.
        hub_ids: hub id -> the repository's ``config.json``; None for those of all registered policies.

    Returns:
        The folders of the tokenizer's files, one a hub id.

    Raises:
        ValueError: `vocab_size` is too small for bytes, letters and special tokens.
    """
    from transformers import PreTrainedTokenizerFast

    pad, eos, bos, unk = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train(instructions, vocab_size),
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        unk_token=unk,
    )
    hub_ids = tokenizers_of_policies() if hub_ids is None else hub_ids
    return [_lay_out(tokenizer, _repository(folder, hub_id), config) for hub_id, config in hub_ids.items()]


def tokenizers_of_policies() -> dict[str, Mapping[str, Any]]:
    """Hub id -> the repository's ``config.json``, of every registered policy that has a tokenizer hard-coded."""
    policies = [support_of(policy_type) for policy_type in types_offering("tokenizer_hub_id")]
    return {policy.tokenizer_hub_id: policy.tokenizer_config for policy in policies if policy.tokenizer_hub_id}


def _repository(folder: str | Path, hub_id: str) -> Path:
    return Path(folder) / "hub" / f"models--{hub_id.replace('/', '--')}"


def _lay_out(tokenizer: Any, repository: Path, config: Mapping[str, Any]) -> Path:
    snapshot = repository / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(snapshot)
    write_json(snapshot / "config.json", dict(config))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(SNAPSHOT)
    return snapshot


@contextmanager
def offline_tokenizer(folder: str | Path, hub_id: str | None = None) -> Iterator[Path]:
    """Make hub ids resolve to the tokenizers in `folder`, without network, here and in child processes.

    Inside, the whole Hugging Face hub is that folder and is offline; on exit everything is as before.

    Args:
        hub_id: that is asked for; None for any.

    Raises:
        ValueError: `folder` holds no such tokenizer made by `build_tokenizer`.
    """
    import huggingface_hub.constants as constants

    hub = Path(folder).resolve() / "hub"
    wanted = "models--*" if hub_id is None else _repository(folder, hub_id).name
    if not any(hub.glob(f"{wanted}/refs/main")):
        raise ValueError(
            f"{folder} holds no tokenizer{f' for {hub_id}' if hub_id else ''}. `lerobot data` builds one in "
            "<data set>/tokenizer."
        )
    before_constants = {"HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_HUB_OFFLINE": constants.HF_HUB_OFFLINE}
    before_environment = {name: os.environ.get(name) for name in before_constants}
    os.environ.update(HF_HUB_CACHE=str(hub), HF_HUB_OFFLINE="1")
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(hub), True
    try:
        yield hub
    finally:
        for name, value in before_constants.items():
            setattr(constants, name, value)
        for name, value in before_environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def require_vocab_size(vocab_size: int) -> None:
    """Check the size of a tokenizer before anything is recorded for it.

    Raises:
        ValueError: it is too small for bytes, letters and special tokens.
    """
    smallest = len(SPECIAL_TOKENS) + len(BYTE_TOKENS) + len(ALPHABET)
    if vocab_size < smallest:
        raise ValueError(f"`vocab_size` must be at least {smallest} (special tokens, bytes, ASCII), got {vocab_size}.")


def _train(instructions: Sequence[str], vocab_size: int) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors, trainers

    require_vocab_size(vocab_size)
    trained = _split_like_gemma(Tokenizer(models.BPE()))
    prompts = [f"Task: {instruction}, State: 0 1 2 3 4 5 6 7 8 9 -1;\nAction: " for instruction in instructions]
    num_reserved = len(SPECIAL_TOKENS) + len(BYTE_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_reserved, initial_alphabet=list(ALPHABET), show_progress=False
    )
    trained.train_from_iterator(prompts, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *BYTE_TOKENS])}
    vocab |= {token: index + num_reserved for token, index in model["vocab"].items()}
    merges = [tuple(merge) for merge in model["merges"]]
    _, _, bos, unk = SPECIAL_TOKENS
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token=unk, byte_fallback=True, fuse_unk=True)
    tokenizer = _split_like_gemma(Tokenizer(bpe))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _split_like_gemma(tokenizer: Tokenizer) -> Tokenizer:
    """Words keep the space before them; digits, punctuation and line ends stand alone."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    alone = Regex(r"\d|[^\w\s" + SPACE + r"]|\n")
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(alone, "isolated"), pre_tokenizers.Split(SPACE, "merged_with_next")]
    )
    return tokenizer
