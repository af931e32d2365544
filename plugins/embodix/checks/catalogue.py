# SPDX-License-Identifier: Apache-2.0
"""Every kind of finding: the rule, what upstream does with such data, and how severe it is.

Severity ``error`` is for what makes training wrong or impossible, ``warning`` for what costs quality.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodix.checks.findings import Finding, Location, Severity


@dataclass(frozen=True)
class Kind:
    """A rule.

    Attributes:
        rule: what has to hold.
        upstream: what LeRobot 0.5.1 does where it does not.
        severity: of a finding.
    """

    rule: str
    upstream: str
    severity: Severity = "error"


KINDS: dict[str, Kind] = {
    # metadata
    "info_unreadable": Kind("meta/info.json is a JSON object", "JSONDecodeError, TypeError, or asks the hub"),
    "info_field": Kind(
        "meta/info.json has its fields, with values of their type", "KeyError, TypeError or DatasetGenerationError"
    ),
    "info_version": Kind(
        "the data set is a LeRobotDataset v3.0", "BackwardCompatibilityError that names a chat and a script of the hub"
    ),
    "fps_invalid": Kind("fps is a number above 0", "ZeroDivisionError or TypeError"),
    "tasks_missing": Kind("meta/tasks.parquet holds the instructions", "asks the hub"),
    "tasks_order": Kind(
        "instructions are the index of the table of tasks, in the order of task_index",
        "another task's instruction: silent, or AttributeError",
    ),
    "episode_numbers": Kind(
        "episodes are numbered from 0 by their place in the table",
        "asks the hub, or actions of another episode: silent",
    ),
    "episodes_missing": Kind("meta/episodes holds a row an episode", "asks the hub"),
    "file_unreadable": Kind(
        "every Parquet file can be read", "ArrowInvalid or DatasetGenerationError, without the episode"
    ),
    "file_missing": Kind("every file that the metadata name exists", "trains, data: silent; video: asks the hub"),
    "totals_differ": Kind(
        "total_frames, total_episodes and total_tasks are those of the tables",
        "IndexError in the middle of an epoch, or silent",
    ),
    "length_differs": Kind("an episode's length is its number of rows", "trains: silent"),
    "bounds_differ": Kind(
        "dataset_from_index and dataset_to_index bound the episode's rows",
        "trains with actions of another episode: silent",
    ),
    "episode_split": Kind("the rows of an episode follow each other", "trains with actions of another episode: silent"),
    "index_gap": Kind("`index` counts all rows from 0", "trains on other actions than recorded: silent"),
    "frame_index_gap": Kind("`frame_index` counts the rows of an episode from 0", "trains: silent"),
    "task_unknown": Kind(
        "every task_index stands in the table of tasks", "trains until that row is drawn, then IndexError"
    ),
    "timestamps_differ": Kind(
        "timestamps are frame_index / fps", "trains; of videos, frames of other moments or an exception of the decoder"
    ),
    "episode_unknown": Kind("dataset.episodes lists episodes that exist", "asks the hub"),
    # shapes and names
    "shape_differs": Kind(
        "a column's vectors have the width that meta/info.json says", "DatasetGenerationError without the key"
    ),
    "column_missing": Kind("every feature of meta/info.json has a column", "TypeError in the collate function"),
    "dtype_unusable": Kind("state and action are numbers", "ValueError in the collate function"),
    "key_missing": Kind(
        "state and action have the names that the policy reads", "ValueError or AttributeError in the first step"
    ),
    "rename_unknown": Kind("rename_map names keys of the data set", "trains: silent", "warning"),
    "camera_unknown": Kind("every camera has a slot in the policy", "ValueError that lists what is missing"),
    "camera_missing": Kind(
        "the policy gets at least one camera", "DatasetGenerationError, or an exception in the first step"
    ),
    "too_wide": Kind("state and action fit the policy's widths", "RuntimeError of a matrix product in the first step"),
    # statistics
    "statistics_missing": Kind(
        "every key that is normalised has statistics", "TypeError or KeyError, or trains unnormalised: silent"
    ),
    "statistics_name": Kind("the statistics that the normalisation reads exist", "ValueError in the first step"),
    "statistics_shape": Kind(
        "statistics have the width of their key", "trains with one scale for all dimensions: silent"
    ),
    "statistics_not_finite": Kind("statistics are finite", "losses of nan: silent"),
    "statistics_inverted": Kind("lower bounds lie below upper bounds", "trains on values with the sign turned: silent"),
    "statistics_of_other_data": Kind("statistics are those of the data", "trains on shifted values: silent"),
    "quantiles_averaged": Kind(
        "at most a tenth of the values lie outside q01 to q99",
        "writes such quantiles itself and trains: silent",
        "warning",
    ),
    "normalised_large": Kind("normalised values stay bounded", "losses up to 1e9 and beyond: silent"),
    # values
    "not_finite": Kind("states and actions are finite", "losses of nan, or bin 255 in a prompt: silent"),
    "null_values": Kind("no value is missing", "RuntimeError in the collate function"),
    # episodes
    "episode_short": Kind(
        "an episode is as long as an action chunk", "trains the repeated last action: silent", "warning"
    ),
    "no_motion": Kind("the state moves in an episode", "trains: silent", "warning"),
    "action_constant": Kind("actions change", "trains: silent"),
    "instruction_empty": Kind("every episode has an instruction", "trains without language: silent"),
    "instruction_long": Kind(
        "the prompt fits the tokenizer's length", "cuts the state and the closing word: silent", "warning"
    ),
    # images
    "image_unreadable": Kind("images can be decoded", "an exception of the image reader without the episode"),
    "image_shape": Kind(
        "images have the shape that meta/info.json says",
        "RuntimeError in the collate function, or silent where all have it",
    ),
    "camera_black": Kind("a camera sees something", "trains: silent"),
    "camera_frozen": Kind("a camera's picture changes while the robot moves", "trains: silent"),
    "video_unreadable": Kind("videos can be opened and decoded", "an exception of the codec without the episode"),
    "video_short": Kind(
        "a video has a frame for every row, by its presentation times", "an exception in an epoch, or a wrong frame"
    ),
}


def found(
    kind: str,
    key: str,
    figure: str,
    remedy: str,
    place: Location | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding of a kind, with the kind's severity unless another is given."""
    return Finding(kind, severity or KINDS[kind].severity, key, figure, remedy, place or Location())
