# SPDX-License-Identifier: Apache-2.0
"""Every kind of finding: the rule, what upstream does with such data, and how severe it is.

Severity ``error`` is for what makes training wrong or impossible, ``warning`` for what costs quality.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodix.checks.findings import Finding, Place, Severity


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
    "info_unreadable": Kind("meta/info.json is a JSON object", "JSONDecodeError, or a look at the hub"),
    "info_field": Kind("meta/info.json has its fields, with values of their type", "KeyError or TypeError later"),
    "info_version": Kind("the data set is a LeRobotDataset v3.0", "an exception that names a script of the hub"),
    "fps_invalid": Kind("fps is a number above 0", "ZeroDivisionError, or wrong time steps"),
    "tasks_missing": Kind("meta/tasks.parquet holds the instructions", "a look at the hub"),
    "episodes_missing": Kind("meta/episodes holds a row an episode", "a look at the hub"),
    "file_unreadable": Kind("every Parquet file can be read", "an Arrow error without the episode"),
    "file_missing": Kind("every file that the metadata name exists", "a look at the hub, or fewer frames"),
    "totals_differ": Kind(
        "total_frames, total_episodes and total_tasks are those of the tables", "IndexError in an epoch"
    ),
    "length_differs": Kind("an episode's length is its number of rows", "chunks that cross into another episode"),
    "bounds_differ": Kind(
        "dataset_from_index and dataset_to_index bound the episode's rows", "actions of another episode"
    ),
    "episode_split": Kind("the rows of an episode follow each other", "chunks that cross into another episode"),
    "index_gap": Kind("`index` counts all rows from 0", "other rows are read than meant"),
    "frame_index_gap": Kind("`frame_index` counts the rows of an episode from 0", "nothing: silent"),
    "task_unknown": Kind("every task_index stands in the table of tasks", "IndexError in the middle of an epoch"),
    "timestamps_differ": Kind("timestamps are frame_index / fps", "frames of other moments are decoded"),
    "episode_unknown": Kind("dataset.episodes lists episodes that exist", "a look at the hub"),
    # shapes and names
    "shape_differs": Kind(
        "a column's vectors have the width that meta/info.json says", "a cast error, or a wrong width"
    ),
    "column_missing": Kind("every feature of meta/info.json has a column", "a cast error without the key"),
    "dtype_unusable": Kind("state and action are numbers", "an exception in the collate function"),
    "key_missing": Kind("state and action have the names that the policy reads", "KeyError in the first step"),
    "rename_unknown": Kind("rename_map names keys of the data set", "nothing: silent"),
    "camera_unknown": Kind("every camera has a slot in the policy", "blank images are trained"),
    "camera_missing": Kind("the policy gets at least one camera", "an exception, or blind training"),
    "too_wide": Kind("state and action fit the policy's widths", "a shape error in the first step"),
    # statistics
    "statistics_missing": Kind("every key that is normalised has statistics", "trains unnormalised: silent"),
    "statistics_name": Kind("the statistics that the normalisation reads exist", "an exception in the first step"),
    "statistics_shape": Kind("statistics have the width of their key", "broadcast, or a shape error"),
    "statistics_not_finite": Kind("statistics are finite", "every value becomes nan: silent"),
    "statistics_inverted": Kind("lower bounds lie below upper bounds", "values with the sign turned: silent"),
    "statistics_of_other_data": Kind("statistics are those of the data", "trains on shifted values: silent"),
    "quantiles_averaged": Kind(
        "at most a tenth of the values lie outside q01 to q99", "writes such quantiles itself", "warning"
    ),
    "normalised_large": Kind("normalised values stay bounded", "losses of 1e2 to 1e16: silent"),
    # values
    "not_finite": Kind("states and actions are finite", "losses of nan, or bin 255 in a prompt: silent"),
    "null_values": Kind("no value is missing", "an exception in the collate function"),
    # episodes
    "episode_short": Kind("an episode is as long as an action chunk", "trains the repeated last action", "warning"),
    "no_motion": Kind("the state moves in an episode", "nothing: silent", "warning"),
    "action_constant": Kind("actions change", "nothing: silent"),
    "instruction_empty": Kind("every episode has an instruction", "trains without language: silent"),
    "instruction_long": Kind(
        "the prompt fits the tokenizer's length", "cuts the state and the closing word: silent", "warning"
    ),
    # images
    "image_unreadable": Kind("images can be decoded", "an exception of the codec without the episode"),
    "image_shape": Kind("images have the shape that meta/info.json says", "resizes, or a shape error"),
    "camera_black": Kind("a camera sees something", "nothing: silent"),
    "camera_frozen": Kind("a camera's picture changes while the robot moves", "nothing: silent"),
    "video_unreadable": Kind("videos can be opened and decoded", "a line of the codec without the episode"),
    "video_short": Kind(
        "a video has a frame for every row, by its presentation times", "an exception in an epoch, or a wrong frame"
    ),
}


def found(
    kind: str,
    key: str,
    figure: str,
    remedy: str,
    place: Place | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding of a kind, with the kind's severity unless another is given."""
    return Finding(kind, severity or KINDS[kind].severity, key, figure, remedy, place or Place())
