# SPDX-License-Identifier: Apache-2.0
"""Sets of MetaWorld tasks are those of MetaWorld and LeRobot."""

from __future__ import annotations

import pytest

from embodix_metaworld.tasks import expand_tasks, task_sets


def test_sets_have_their_published_sizes_and_hold_tasks_that_exist() -> None:
    sets = task_sets()
    assert {name: len(tasks) for name, tasks in sets.items()} == {
        "MT10": 10, "MT25": 25, "MT50": 50, "easy": 28, "medium": 11, "hard": 6, "very_hard": 5,
    }  # fmt: skip
    assert sorted(expand_tasks("easy,medium,hard,very_hard")) == sorted(expand_tasks("MT50"))


def test_names_and_sets_mix_in_their_order_and_each_task_comes_once() -> None:
    assert expand_tasks("reach-v3, mt10 ,push-v3")[:2] == ("reach-v3", "push-v3")
    assert len(expand_tasks(["MT10", "reach-v3"])) == 10
    assert expand_tasks("button-press-v3") == expand_tasks(["button-press-v3"]) == ("button-press-v3",)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("reach", "did you mean reach-v3"),
        ("reach-v3,MT15", "'MT15' is no MetaWorld task .* did you mean .*MT10"),
        ("zzz", "tasks: assembly-v3, "),
        (" , ", "at least one"),
        ([], "at least one"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tasks: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_tasks(tasks)
