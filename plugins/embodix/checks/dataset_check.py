# SPDX-License-Identifier: Apache-2.0
"""The check of one data set for one run, and of all data sets of a config."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.dataset_metadata import CODEBASE_VERSION
from lerobot.datasets.utils import has_legacy_hub_download_metadata
from lerobot.utils.constants import ACTION, HF_LEROBOT_HOME, HF_LEROBOT_HUB_CACHE, OBS_STATE

from embodix.checks.catalogue import found
from embodix.checks.dataset_reading import DatasetReading, read_dataset
from embodix.checks.dataset_tables import STATS, read_tables
from embodix.checks.exact_statistics import exact_statistics
from embodix.checks.findings import CheckReport, Finding, KeyFigures, merged, sorted_findings
from embodix.checks.naming_rules import BOOKKEEPING, naming_findings
from embodix.checks.normalisation_rules import normalisation_findings, normalised_range
from embodix.checks.run_needs import RunNeeds, needs_of
from embodix.checks.value_rules import episode_findings, value_findings
from embodix.data.joined_columns import JOIN, Join, decode_join
from embodix.data.mixture_spec import STATISTICS, MemberSpec, decode_mixture, is_mixture
from embodix.data.token_counts import token_counter, tokenizer_file
from embodix.policies.support import support_of

NOT_HERE = "not on this machine, so not looked at"
PROMPT_FIELD = "tokenizer_max_length"
STATISTICS_CHOICES = ("recorded", "exact")


def check_data(
    host_cfg: TrainPipelineConfig, config: Mapping[str, Any], images: str = "sample", may_be_absent: bool = False
) -> CheckReport:
    """Check the data set of a config, or each member of its mixture.

    A data set that is on the hub only is not looked at.

    Args:
        host_cfg: upstream's config.
        config: the composed config, resolved.
        images: ``sample``, ``all`` or ``none``.
        may_be_absent: whether metadata without data pass.

    Raises:
        ValueError: a mixture, join or choice of statistics that is not sound.
    """
    node = config["dataset"]
    statistics = statistics_choice(node)
    assert host_cfg.policy is not None
    needs = needs_of(host_cfg.policy, config.get("rename_map") or {}, statistics, bool(node.get("use_imagenet_stats")))
    check = functools.partial(_check_local, config=config, images=images, may_be_absent=may_be_absent)
    if not is_mixture(node):
        join = decode_join(f"dataset.{JOIN}", node.get(JOIN))
        return check(str(node.get("repo_id") or node["root"]), node, join, needs=needs)
    reports = []
    for member in decode_mixture(node).members:
        renamed = {camera: slot for camera, slot in (member.cameras or {}).items() if slot is not None}
        # The mixture looks at its cameras itself.
        own = replace(needs, rename_map=renamed, cameras=(), unread=_unread_cameras(member))
        reports.append((member.name, check(member.repo_id, vars(member), member.join, needs=own)))
    return merged(reports)


def _unread_cameras(member: MemberSpec) -> frozenset[str]:
    """Cameras that are mapped to nothing, or left out of a mapping that is given."""
    if member.cameras is None or (root := local_folder(vars(member))) is None:
        return frozenset()
    tables = read_tables(root)
    present = tables.cameras if tables.readable else {}
    return frozenset(camera for camera in present if member.cameras.get(camera) is None)


def statistics_choice(node: Mapping[str, Any]) -> str:
    """``dataset.statistics``.

    Raises:
        ValueError: another word.
    """
    choice = str(node.get(STATISTICS) or STATISTICS_CHOICES[0])
    if choice not in STATISTICS_CHOICES:
        raise ValueError(f"dataset.statistics is one of {', '.join(STATISTICS_CHOICES)}; got {choice!r}.")
    return choice


def local_folder(node: Mapping[str, Any]) -> Path | None:
    """Where a data set lies on this machine, as LeRobot looks for it: its root, LeRobot's folder of data sets, or what
    has been fetched from the hub; None for what is on the hub only."""
    if node.get("root"):
        return Path(node["root"])
    folder = Path(HF_LEROBOT_HOME) / str(node["repo_id"])
    if (folder / "meta").is_dir() and not has_legacy_hub_download_metadata(folder):
        return folder
    try:
        revision = str(node.get("revision") or CODEBASE_VERSION)
        fetched = snapshot_download(
            str(node["repo_id"]),
            repo_type="dataset",
            revision=revision,
            cache_dir=HF_LEROBOT_HUB_CACHE,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(fetched)


def _with_prompts(needs: RunNeeds, config: Mapping[str, Any], reading: DatasetReading) -> RunNeeds:
    """The needs with a count of a prompt's tokens, where the tokenizer is on this machine."""
    support, longest = support_of(needs.policy), config["policy"].get(PROMPT_FIELD)
    states = [
        own for key, own in reading.figures.items() if needs.rename_map.get(key, key) == OBS_STATE and own.minimum
    ]
    if not needs.language or longest is None or not states or tokenizer_file(config, support) is None:
        return needs
    count, _ = token_counter(config, support)
    stats = {name: values.tolist() for name, values in exact_statistics(states[0]).items()}
    cameras = len(reading.tables.cameras)

    def length(task: str) -> int:
        return max(map(count, support.prompt_texts(config["policy"], task, cameras, stats)))

    return replace(needs, prompt_length=length, max_prompt=int(longest))


def _check_local(
    name: str,
    node: Mapping[str, Any],
    join: Join,
    *,
    config: Mapping[str, Any],
    needs: RunNeeds,
    images: str,
    may_be_absent: bool,
) -> CheckReport:
    root = local_folder(node)
    if root is None or (may_be_absent and not (root / "data").is_dir()):
        return CheckReport(name, 0, 0, [], [], NOT_HERE)
    reading = read_dataset(root, node.get("episodes"), images, join)
    return check_dataset(name, reading, _with_prompts(needs, config, reading))


def check_dataset(name: str, reading: DatasetReading, needs: RunNeeds) -> CheckReport:
    """Judge a reading by what a run needs.

    Args:
        name: of the data set, for the report.
    """
    rows = reading.rows
    findings = list(reading.findings)
    keys: list[KeyFigures] = []
    if reading.tables.readable:
        findings += naming_findings(reading.tables, needs)
        findings += episode_findings(reading.tables, rows, reading.figures, needs)
        findings += _key_findings(reading, needs)
        findings += _image_statistics(reading, needs)
        findings = [finding for finding in findings if finding.key not in needs.unread]
        keys = [_figures_of(key, reading, needs) for key in reading.figures if key not in BOOKKEEPING]
    return CheckReport(
        name,
        len(rows.starts_R),
        len(rows.episode_N),
        keys,
        sorted_findings(findings),
        reading.images,
        reading.seconds,
    )


def _key_findings(reading: DatasetReading, needs: RunNeeds) -> Iterator[Finding]:
    """Of each numeric column that could be read: values, statistics."""
    tables = reading.tables
    whole = tables.selected is None
    for key, figures in reading.figures.items():
        yield from value_findings(key, math.prod(tables.features[key]["shape"]), figures, _is_needed(key, needs))
        wanted = needs.rename_map.get(key, key)
        if wanted in (OBS_STATE, ACTION) and wanted not in needs.relative and not figures.num_null:
            yield from normalisation_findings(wanted, tables.stats.get(key), figures, needs, whole)


def _is_needed(key: str, needs: RunNeeds) -> bool:
    return needs.rename_map.get(key, key) in (OBS_STATE, ACTION)


def _image_statistics(reading: DatasetReading, needs: RunNeeds) -> Iterator[Finding]:
    """Of cameras that the policy normalises by the data set's own statistics."""
    mode = needs.normalisation.get("VISUAL", "")
    if not mode or needs.imagenet:
        return
    for camera in reading.tables.cameras:
        if camera not in reading.tables.stats and camera not in needs.unread:
            yield found(
                "statistics_missing",
                camera,
                f"{STATS} has none; upstream would train it unnormalised",
                "Take ImageNet's: dataset.use_imagenet_stats=true.",
            )


def _figures_of(key: str, reading: DatasetReading, needs: RunNeeds) -> KeyFigures:
    figures = reading.figures[key]
    wanted = needs.rename_map.get(key, key)
    mode = "" if wanted in needs.relative else needs.mode_of(wanted)
    stats = reading.tables.stats.get(key, {})
    if needs.statistics == "exact" and figures.minimum:
        stats = exact_statistics(figures)
    ranges = normalised_range(mode, stats, figures, needs.bounded) if mode else None
    return KeyFigures(
        key,
        figures.width,
        figures.dtype,
        f"{needs.statistics} {mode.lower()}" if mode else "",
        max(figures.outside, default=None),
        None if ranges is None else float(ranges[:, 1].max()),
    )
