# SPDX-License-Identifier: Apache-2.0
"""What a GR00T-N1.5 of any size needs on disk, made without network: Eagle's config, tokenizer and processor, and a
base model with random weights, so that plain upstream LeRobot loads a checkpoint of that size.

A folder is named after its contents' settings. It is written beside and renamed, and used again as long as its files
are the ones that were written::

    <parent>/<digest>/               policy.tokenizer_assets_repo
        config.json, tokenizer.json, processor_config.json, ...
        base_model/                  policy.base_model_path
            config.json, model.safetensors
        embodix_assets.json          the settings and a digest of each file
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from omegaconf import DictConfig, OmegaConf

from embodix.data.recording_files import write_json
from embodix.patching import patched
from embodix_groot.architecture import (
    IMAGE_TOKEN,
    SPECIAL_TOKENS,
    eagle_config,
    groot_config,
    tokens_per_image,
    validate_architecture,
)

RECORD_FILE, BASE_MODEL = "embodix_assets.json", "base_model"
LAYOUT = 1  # counts changes of what is written for the same settings
BASE_MODEL_SEED = 0


@dataclass(frozen=True)
class AssetSettings:
    """What the files of a folder are made from.

    Attributes:
        architecture: the sizes; see ``embodix_groot.architecture``.
        instructions: the tokenizer's corpus.
        max_state_dim, max_action_dim, chunk_size: those of the ``GrootConfig``.
    """

    architecture: Mapping[str, Any]
    instructions: Sequence[str]
    max_state_dim: int
    max_action_dim: int
    chunk_size: int

    def to_json(self) -> dict[str, Any]:
        corpus = sorted(set(self.instructions))
        return {**asdict(self), "instructions": corpus, "eagle": _eagle_files(self.architecture), "layout": LAYOUT}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]


def prepare_assets(parent: Path, settings: AssetSettings) -> Path:
    """The folder of these settings in ``parent``, written unless it is there.

    Returns:
        Its absolute path.

    Raises:
        ValueError: sizes that upstream can't compute with, or a folder whose files were changed.
    """
    validate_architecture(settings.architecture)
    folder = parent.resolve() / settings.digest
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=parent) as stage:
            unfinished = Path(stage) / "assets"
            write_files(unfinished, folder, settings)
            with contextlib.suppress(OSError):  # another process was faster; its folder is checked below
                unfinished.rename(folder)
    require_unchanged(folder)
    return folder


def require_unchanged(folder: Path) -> None:
    """Check that a folder's files are those that were written.

    Raises:
        ValueError: files that are missing or changed, by name.
    """
    record = folder / RECORD_FILE
    written = json.loads(record.read_text())["files"] if record.is_file() else {RECORD_FILE: "missing"}
    found = _file_digests(folder)
    changed = sorted(name for name, digest in written.items() if found.get(name) != digest)
    if changed:
        raise ValueError(
            f"GR00T-N1.5's assets in {folder} are not what was written: {', '.join(changed)} missing or changed. "
            "Delete the folder; it is made again by the next run."
        )


def write_files(folder: Path, final: Path, settings: AssetSettings) -> None:
    from lerobot.policies.groot.groot_n1 import DEFAULT_VENDOR_EAGLE_PATH

    # Upstream looks for its own Python files beside the processor's settings.
    shutil.copytree(DEFAULT_VENDOR_EAGLE_PATH, folder, ignore=shutil.ignore_patterns("__pycache__"))
    architecture = settings.architecture
    corpus = settings.to_json()["instructions"]
    write_tokenizer(folder, corpus, architecture["language"]["vocab_size"])
    for name, content in _eagle_files(architecture).items():
        write_json(folder / name, content)
    write_base_model(folder, final, settings)
    write_json(folder / RECORD_FILE, {"settings": settings.to_json(), "files": _file_digests(folder)})


def _eagle_files(architecture: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """File name -> content. Each ``auto_map`` names the class of upstream's file that plain upstream loads."""
    image_size = architecture["vision"]["image_size"]
    image_processor = "image_processing_eagle2_5_vl_fast.Eagle25VLImageProcessorFast"
    processor_map = {"AutoProcessor": "processing_eagle2_5_vl.Eagle25VLProcessor"}
    model_map = {
        "AutoConfig": "configuration_eagle2_5_vl.Eagle25VLConfig",
        "AutoModel": "modeling_eagle2_5_vl.Eagle25VLForConditionalGeneration",
    }
    return {
        "config.json": {**eagle_config(architecture), "auto_map": model_map},
        "generation_config.json": {},
        "preprocessor_config.json": {
            "auto_map": {"AutoImageProcessor": image_processor, **processor_map},
            "image_processor_type": "Eagle25VLImageProcessorFast",
            "processor_class": "Eagle25VLProcessor",
            "size": {"height": image_size, "width": image_size},
        },
        "processor_config.json": {
            "auto_map": processor_map,
            "processor_class": "Eagle25VLProcessor",
            "image_token": IMAGE_TOKEN,
            "video_token": IMAGE_TOKEN,
            "tokens_per_tile": tokens_per_image(architecture),
        },
    }


def write_base_model(folder: Path, final: Path, settings: AssetSettings) -> None:
    import torch
    from lerobot.policies.groot.groot_n1 import GR00TN15, GR00TN15Config

    sizes = groot_config(
        settings.architecture,
        max_state_dim=settings.max_state_dim,
        max_action_dim=settings.max_action_dim,
        chunk_size=settings.chunk_size,
        assets=str(folder),
    )
    silent = contextlib.redirect_stdout(io.StringIO())  # upstream prints its progress
    with torch.random.fork_rng(devices=[]), patched({"lerobot_groot_runs": {}}), silent:
        torch.manual_seed(BASE_MODEL_SEED)
        model = GR00TN15(GR00TN15Config(**sizes), local_model_path=str(final / BASE_MODEL))
        model.config.backbone_cfg["tokenizer_assets_repo"] = str(final)
        model.save_pretrained(folder / BASE_MODEL)


def _file_digests(folder: Path) -> dict[str, str]:
    """Digest of each file but the record and upstream's own Python files, which upstream writes again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != RECORD_FILE
    }


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


GROOT_FOLDER = "groot_n15"


def prepare_host_assets(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> None:
    """Make what a GR00T-N1.5 of other sizes needs in ``<dataset>/groot_n15`` and name it in upstream's config.

    Assets that the config names and that are there are taken as they are: those of the checkpoint that is resumed,
    or the user's own. Other policies, and GR00T-N1.5 at its real size, need nothing.

    Raises:
        ValueError: sizes that upstream can't compute with, assets that were changed, or assets that the config names
            and that are neither there nor those of this dataset.
    """
    policy: Any = host_cfg.policy
    if cfg.architecture is None or policy is None or policy.type != "groot":
        return
    named = _named_folder(policy)
    if named is not None and named.is_dir():
        if (named / RECORD_FILE).is_file():
            require_unchanged(named)
        return
    datasets = _metadata(cfg, host_cfg)
    architecture: Any = OmegaConf.to_container(cfg.architecture, resolve=True)
    settings = AssetSettings(
        architecture=architecture,
        instructions=[str(task) for dataset in datasets for task in dataset.tasks.index],
        max_state_dim=policy.max_state_dim,
        max_action_dim=policy.max_action_dim,
        chunk_size=policy.chunk_size,
    )
    folder = prepare_assets(Path(datasets[0].root) / GROOT_FOLDER, settings)
    if named is not None and named.name != folder.name:
        raise ValueError(
            f"policy.tokenizer_assets_repo={named} is not there, and the assets of this dataset and architecture are "
            f"others ({folder}). Give the folder the checkpoint was trained with, or leave the field out."
        )
    policy.tokenizer_assets_repo = str(folder)
    policy.base_model_path = str(folder / BASE_MODEL)


def _named_folder(policy: Any) -> Path | None:
    """The folder that the config names instead of upstream's hub repository."""
    from lerobot.policies.groot.processor_groot import DEFAULT_TOKENIZER_ASSETS_REPO

    name = policy.tokenizer_assets_repo
    return None if name == DEFAULT_TOKENIZER_ASSETS_REPO else Path(name)


def _metadata(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> list[LeRobotDatasetMetadata]:
    """Of the dataset, or of each member of a mixture."""
    members = cfg.dataset.get("members")
    if members is None:
        dataset = host_cfg.dataset
        return [LeRobotDatasetMetadata(dataset.repo_id, root=dataset.root, revision=dataset.revision)]
    return [
        LeRobotDatasetMetadata(member.repo_id, root=member.get("root"), revision=member.get("revision"))
        for member in members.values()
    ]
