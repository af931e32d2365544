# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer in the manner of Qwen's, with the special tokens of the Eagle processor at fixed ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodix.data.recording_files import write_json
from embodix_groot.architecture import SPECIAL_TOKENS

NUM_BYTES = 256

# Each image becomes `<image-1>`, which the Eagle processor replaces by the image's tokens; the text follows.
CHAT_TEMPLATE = """\
{%- set images = namespace(count=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'image' -%}
{%- set images.count = images.count + 1 -%}
{{ '<image-' ~ images.count ~ '>' }}
{%- elif content['type'] == 'text' -%}
{{ content['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def write_tokenizer(folder: Path, instructions: Sequence[str], vocab_size: int) -> None:
    """Train byte-level BPE on the instructions and write every file that upstream's Eagle folder has for it.

    Args:
        folder: an existing folder.
        instructions: the corpus; any other text is covered byte by byte.
        vocab_size: the most tokens, all ids being below it; a small corpus needs fewer.

    Raises:
        ValueError: ``vocab_size`` is too small for the special tokens and all bytes.
    """
    from transformers import Qwen2Tokenizer

    smallest = len(SPECIAL_TOKENS) + NUM_BYTES
    if vocab_size < smallest:
        raise ValueError(
            f"architecture.language.vocab_size must be at least {smallest}, for {len(SPECIAL_TOKENS)} special tokens "
            f"and {NUM_BYTES} bytes; got {vocab_size}."
        )
    vocab, merges = _train(instructions, vocab_size)
    endoftext, _, im_end, *_ = SPECIAL_TOKENS
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=endoftext,
        pad_token=endoftext,
        eos_token=im_end,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    write_json(folder / "vocab.json", vocab)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(merge) for merge in merges)]) + "\n")
    write_json(folder / "added_tokens.json", {token: vocab[token] for token in SPECIAL_TOKENS})
    write_json(folder / "special_tokens_map.json", {"eos_token": im_end, "pad_token": endoftext})
    write_json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def _train(instructions: Sequence[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: special tokens first, then bytes, then what the corpus is made of."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import Qwen2Tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = _splitting(Qwen2Tokenizer())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=_bytes(), show_progress=False
    )
    # Upstream's processor writes an instruction as a list of one: "['reach the goal']".
    tokenizer.train_from_iterator([str([instruction]) for instruction in instructions], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _splitting(qwen: Any) -> tuple[Any, Any]:
    """Qwen's own normaliser and word boundaries."""
    backend = qwen.backend_tokenizer
    return backend.normalizer, backend.pre_tokenizer


def _bytes() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
