# SPDX-License-Identifier: Apache-2.0
"""Prompts that are longer than π0.5 takes: the text of the task is shortened, the state and the closing word never.

A prompt reads ``Task: <task>, State: <a number a dimension>;\\nAction: ``. Cut at its end, as a tokenizer cuts, it
would lose how the robot stands and what is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from embodix.contracts import ShortenedTask
from embodix.data.sample_sizes import SizedDataset

STATE_KEY, INDEX_KEY = "observation.state", "index"
HEAD, BEFORE_STATE = "Task: ", ", State: "
NUMBERS = range(-1, 256)  # that upstream writes for a dimension of the state
PROMPTS_AT_A_TIME = 4096
_TALLY = "_embodix_shortened"
_said: set[str] = set()  # tasks whose shortening this process has told


class Prompt(str):
    """A whole prompt of upstream's, marked as one."""

    @property
    def task(self) -> str:
        """The text of the task."""
        return self.rpartition(BEFORE_STATE)[0].removeprefix(HEAD)

    def with_task(self, task: str) -> Prompt:
        """The same prompt for another text."""
        _, mark, rest = self.rpartition(BEFORE_STATE)
        return Prompt(f"{HEAD}{task}{mark}{rest}")


def num_tokens(tokenizer: Any, prompts: Sequence[str]) -> list[int]:
    """Tokens of each whole prompt."""
    return [len(ids) for ids in tokenizer(list(map(str, prompts)), verbose=False)["input_ids"]]


def shorten(prompt: Prompt, tokenizer: Any, longest: int) -> Prompt:
    """The prompt with as much of its task's text as ``longest`` tokens hold.

    Raises:
        ValueError: they do not hold the state.
    """
    (without_task,) = num_tokens(tokenizer, [prompt.with_task("")])
    if without_task > longest:
        raise ValueError(
            f"π0.5's prompt holds the state, which takes {without_task} tokens with no word of a task beside it; "
            f"policy.tokenizer_max_length={longest} would cut it off. Set policy.tokenizer_max_length above "
            f"{without_task} by what the tasks take, or record fewer dimensions of {STATE_KEY}."
        )
    kept, too_many = 0, len(prompt.task)
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        (length,) = num_tokens(tokenizer, [prompt.with_task(prompt.task[:middle].rstrip())])
        kept, too_many = (middle, too_many) if length <= longest else (kept, middle)
    return prompt.with_task(prompt.task[:kept].rstrip())


class Tally:
    """What one tokenizer has shortened.

    Args:
        longest: tokens of a prompt that the policy takes.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.num_prompts = 0
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, task: str, excess: int) -> None:
        """A prompt that was ``excess`` tokens too long."""
        count, most = self._found.get(task, (0, 0))
        self._found[task] = count + 1, max(most, excess)

    def tasks(self) -> list[ShortenedTask]:
        """The tasks that were shortened."""
        return [
            ShortenedTask(task, count, self.num_prompts, most, self.longest)
            for task, (count, most) in self._found.items()
        ]


def tokenize_whole(upstream: Callable[[Any, Any], Any], step: Any, text: Any) -> Any:
    """What upstream's tokenizer step makes of a text, prompts shortened in their task alone where they are too long."""
    tokens = upstream(step, text)
    if not isinstance(text, list) or not all(isinstance(prompt, Prompt) for prompt in text):
        return tokens
    tally = step.__dict__.setdefault(_TALLY, Tally(step.max_length))
    tally.num_prompts += len(text)
    full = [row for row, mask_S in enumerate(tokens["attention_mask"]) if bool(mask_S.all())]
    lengths = num_tokens(step.input_tokenizer, [text[row] for row in full]) if full else []
    fitting = list(text)
    for row, length in zip(full, lengths, strict=True):
        if length > step.max_length:
            fitting[row] = shorten(text[row], step.input_tokenizer, step.max_length)
            _count(tally, text[row].task, length - step.max_length)
    return tokens if fitting == text else upstream(step, fitting)


def _count(tally: Tally, task: str, excess: int) -> None:
    tally.add(task, excess)
    if task not in _said:
        _said.add(task)
        logging.warning(
            f"A prompt of the task {task!r} is {excess} tokens longer than the {tally.longest} that the policy takes: "
            "the text of the task is shortened, here and in further ones."
        )


def shortened_so_far(preprocessor: Any) -> list[ShortenedTask]:
    """What a preprocessor of upstream's has shortened in this process."""
    tallies = [step.__dict__.get(_TALLY) for step in getattr(preprocessor, "steps", ())]
    return [task for tally in tallies if tally is not None for task in tally.tasks()]


def shortened_tasks(part: SizedDataset) -> list[ShortenedTask]:
    """What will be shortened of a data set; its states are read only where a task could be too long at all."""
    tokenizer, longest = _tokenizer_of(part)
    names, tasks_N = part.task_names(), part.column("task_index").reshape(-1)
    width = int(part.dataset.meta.features[state_column(part)]["shape"][0])
    most = dict(zip(names, num_tokens(tokenizer, _longest_prompts(names, width, tokenizer)), strict=True))
    suspects = [index for index, name in enumerate(names) if most[name] > longest]
    tally = Tally(longest)
    tally.num_prompts = len(part)
    for prompts in _prompts(part, np.flatnonzero(np.isin(tasks_N, suspects))):
        for prompt, length in zip(prompts, num_tokens(tokenizer, prompts), strict=True):
            if length > longest:
                tally.add(prompt.task, length - longest)
    found = tally.tasks()
    _said.update(task.task for task in found)
    return found


def _longest_prompts(names: Sequence[str], width: int, tokenizer: Any) -> list[str]:
    lengths = num_tokens(tokenizer, [f"0 {number}" for number in NUMBERS])
    number = NUMBERS[int(np.argmax(lengths))]
    state = " ".join([str(number)] * width)
    return [f"{HEAD}{name}{BEFORE_STATE}{state};\nAction: " for name in names]


def _tokenizer_of(part: SizedDataset) -> tuple[Any, int]:
    step: Any = next(step for step in _steps(part) if _tokenizes(step))
    return step.input_tokenizer, step.max_length


def _prompts(part: SizedDataset, rows_N: np.ndarray) -> Iterator[list[Prompt]]:
    """The prompts of some frames, not yet tokenised."""
    if not len(rows_N):
        return
    parts, preprocess = PromptParts(part), cast(Any, part.preprocess)
    for start in range(0, len(rows_N), PROMPTS_AT_A_TIME):
        transition = preprocess.to_transition(parts.batch(rows_N[start : start + PROMPTS_AT_A_TIME]))
        for step in _steps(part):
            if _tokenizes(step):
                break
            transition = step(transition)
        yield [Prompt(text) for text in transition["complementary_data"]["task"]]


class PromptParts:
    """All that the prompts of a data set are made of: states, tasks, and the frames' numbers."""

    def __init__(self, part: SizedDataset) -> None:
        self._state_key = state_column(part)
        self._states_ND = part.column(self._state_key).astype(np.float32).reshape(len(part), -1)
        self._names, self._tasks_N = part.task_names(), part.column("task_index").reshape(-1)
        self._frames_N = part.column(INDEX_KEY).reshape(-1)

    def batch(self, rows_B: np.ndarray | slice) -> dict[str, Any]:
        """Some frames, as upstream's preprocessor takes them."""
        return {
            self._state_key: torch.from_numpy(self._states_ND[rows_B]),
            "task": [self._names[index] for index in self._tasks_N[rows_B]],
            INDEX_KEY: torch.from_numpy(self._frames_N[rows_B]),
        }


def state_column(part: SizedDataset) -> str:
    """The column that becomes the policy's state, renamed by the preprocessor or not.

    Raises:
        ValueError: no column does.
    """
    columns = list(part.dataset.meta.features)
    if STATE_KEY in columns:
        return STATE_KEY
    for step in _steps(part):
        for column, renamed in (getattr(step, "rename_map", None) or {}).items():
            if renamed == STATE_KEY and column in columns:
                return str(column)
    raise ValueError(
        f"π0.5's prompt holds {STATE_KEY}; the data set has {', '.join(columns)}. Name its column in rename_map."
    )


def _steps(part: SizedDataset) -> Sequence[Any]:
    return getattr(part.preprocess, "steps", ())


def _tokenizes(step: Any) -> bool:
    return hasattr(step, "input_tokenizer")
