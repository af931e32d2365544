# SPDX-License-Identifier: Apache-2.0
"""An evaluation is written, read, paired and shown without losing an episode."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from evaluation_files import episodes, write_evaluation, write_video
from PIL import Image
from rich.console import Console

from embodix.evaluation.episodes import Episode, EpisodeResult
from embodix.evaluation.session import episode_record
from embodix.report.evaluation import EpisodeRecord, append_episode, pair_success, read_episodes, read_evaluation
from embodix.report.evaluation_page import (
    PICTURE_HEIGHT,
    EvaluatedFolder,
    _cards,
    _pair_sentence,
    film_strip,
    print_evaluations,
    render_evaluations,
)


def read(path: Path):
    evaluation = read_evaluation(path)
    assert evaluation is not None
    return evaluation


def test_results_hold_what_the_contract_names(tmp_path: Path) -> None:
    record = json.loads(write_evaluation(tmp_path, "embodix", 17, videos=1).read_text())
    assert {"name", "checkpoint", "env", "settings", "provenance", "wall_s", "cpu_s", "videos"} <= record.keys()
    assert record["success"] == {
        "num_success": 34, "num_episodes": 40, "rate": 0.85, "low": pytest.approx(0.709, abs=1e-3),
        "high": pytest.approx(0.929, abs=1e-3),
    }  # fmt: skip
    task = record["tasks"]["reach-v3"]
    assert (task["num_success"], task["instruction"]) == (17, "Reach")
    assert task["mean_steps"] == pytest.approx((sum(range(40, 57)) + 3 * 150) / 20)
    assert record["videos"] == ["videos/reach-v3_100000.mp4", "videos/drawer-close-v3_100000.mp4"]
    assert len(record["controls"]["blind"]) == len(record["episodes"]) == 40


def test_what_is_written_is_read(tmp_path: Path) -> None:
    evaluation = read(write_evaluation(tmp_path, "embodix", 17))
    assert list(evaluation.episodes) == [dataclasses.replace(episode, instruction="") for episode in episodes(17)]
    assert evaluation.by_task["reach-v3"].num_success == 17
    assert evaluation.controls["blind"].num_success == 6
    rest = evaluation.success_where_fails("blind")
    assert rest is not None
    assert (rest.num_success, rest.num_episodes) == (28, 34)
    assert evaluation.details["tasks"]["reach-v3"]["instruction"] == "Reach"


def test_an_episode_line_survives_a_killed_run(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "episodes.jsonl", episodes(1)
    assert read_episodes(path) == {}
    append_episode(path, "policy", first)
    append_episode(path, "blind", first)
    with path.open("a") as file:
        file.write('{"actor": "policy", "task": "rea')
    assert read_episodes(path) == {"policy": [first], "blind": [first]}
    append_episode(path, "policy", second)
    assert read_episodes(path) == {"policy": [first, second], "blind": [first]}


def test_pairs_carry_the_difference_with_its_interval(tmp_path: Path) -> None:
    upstream, embodix = (read(write_evaluation(tmp_path / n, n, k)) for n, k in (("upstream", 10), ("embodix", 17)))
    pair = pair_success(upstream, embodix)
    assert pair is not None
    assert (pair.both, pair.only_baseline, pair.only_variant, pair.neither) == (20, 0, 14, 6)
    assert pair.difference == pytest.approx(0.35)
    assert 0.0 < pair.low < pair.difference < pair.high
    back = pair_success(embodix, upstream)
    assert back is not None
    assert (back.low, back.high) == pytest.approx((-pair.high, -pair.low))


def test_the_terminal_shows_tasks_controls_pairs_and_what_to_mind(tmp_path: Path) -> None:
    upstream = read(write_evaluation(tmp_path / "u", "upstream", 10, resumed=True))
    embodix = read(write_evaluation(tmp_path / "e", "embodix", 11))
    stream = io.StringIO()
    print_evaluations([upstream, embodix], Console(file=stream, width=220))
    text = stream.getvalue()
    for part in (
        "10/20 = 50 % [30 % to 70 %]",
        "  blank image",
        "22/40 = 55 %",
        "embodix cannot be told apart from upstream",
        "only embodix 2 (exact McNemar test, p = 0.5)",
        "upstream was interrupted and continued",
        "Mind: embodix: It was told 'Reach'.",
    ):
        assert part in text


def test_the_page_is_self_contained_and_shows_the_videos(tmp_path: Path) -> None:
    upstream = read(write_evaluation(tmp_path / "upstream", "upstream", 10, videos=2))
    embodix = read(write_evaluation(tmp_path / "embodix", "embodix", 17))
    page = render_evaluations([EvaluatedFolder(upstream, "upstream"), EvaluatedFolder(embodix, "embodix")], tmp_path)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in page
    sources = re.findall(r'src="([^"]{0,30})', page)
    assert len(sources) == 4 * 3
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    for link in re.findall(r'href="([^"#][^"]*)"', page):
        assert (tmp_path / link).is_file()
    for text in (
        "upstream and embodix on 2 tasks",
        "“Close the drawer”",
        "10/20 = 50 %",
        "Where it fails, upstream solves 14/34 = 41 %",
        "embodix against upstream",
        "+35 [+22, +50] points",
        "upstream, reach-v3, seed 100001: solved in 41 steps",
    ):
        assert text in page
    assert page.count("<td>blind</td>") == page.count("<td>blank image</td>") == 2  # one a task: both had the same
    assert page.count("<svg") == 2
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_page_needs_different_names(tmp_path: Path) -> None:
    evaluation = read(write_evaluation(tmp_path, "embodix", 1))
    with pytest.raises(ValueError, match="evaluations of different names"):
        render_evaluations([EvaluatedFolder(evaluation), EvaluatedFolder(evaluation)], tmp_path)


def test_a_film_strip_goes_from_the_first_to_the_last_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "film.mp4")
    strip = [
        Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
        for address in film_strip(tmp_path / "film.mp4")
    ]
    assert [picture.size for picture in strip] == [(PICTURE_HEIGHT * 48 // 32, PICTURE_HEIGHT)] * 3
    brightness = [sum(picture.convert("L").resize((1, 1)).getdata()) for picture in strip]
    assert brightness[0] < 20 < 100 < brightness[1] < 160 < 230 < brightness[2]
    write_video(tmp_path / "still.mp4", num_frames=2)
    assert len(film_strip(tmp_path / "still.mp4")) == 2


@pytest.mark.parametrize("record", [{}, {"episodes": []}, {"episodes": [{"task": "a", "seed": 1}]}])
def test_unusable_results_are_refused(tmp_path: Path, record: dict) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="Evaluate the run again"):
        read_evaluation(path)
    assert EpisodeRecord("a", 1, True).key == ("a", 1)


def episode_json(**changes) -> dict:
    return {"task": "a", "seed": 1, "success": True, "sum_reward": 1.0, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"success": None}, "success of a, seed 1, is None, not true or false"),
        ({"success": float("nan")}, "success of a, seed 1, is nan"),
        ({"success": 2}, "success of a, seed 1, is 2"),
        ({"sum_reward": float("nan")}, "a reward of a, seed 1, is not finite"),
        ({"max_reward": float("inf")}, "a reward of a, seed 1, is not finite"),
    ],
)
def test_figures_that_are_none_make_no_rate(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"episodes": [episode_json(**changes)]}))
    with pytest.raises(ValueError, match=message):
        read_evaluation(path)


def test_a_reward_that_is_not_finite_is_none_and_told(tmp_path: Path) -> None:
    result = EpisodeResult(Episode("a", 1), success=True, num_steps=3, sum_reward=float("nan"), max_reward=2.0)
    record = episode_record(result)
    assert (record.sum_reward, record.max_reward, record.success) == (None, 2.0, True)
    path = write_evaluation(tmp_path, "embodix", 4)
    content = json.loads(path.read_text())
    content["episodes"][0]["sum_reward"] = None
    path.write_text(json.dumps(content))
    page = render_evaluations([EvaluatedFolder(read(path))], tmp_path)
    assert "1 episode had no finite reward; mean rewards are of the others." in page


def test_what_cannot_be_compared_is_said_and_called_neither_same_nor_different(tmp_path: Path) -> None:
    first, second = (read(write_evaluation(tmp_path / name, name, 4)) for name in ("one", "two"))
    apart = dataclasses.replace(second, outcomes={("a", 1): True}, episodes=(EpisodeRecord("a", 1, True),))
    said = io.StringIO()
    print_evaluations([first, apart], Console(file=said, width=300))
    assert "two and one have no episode in common: nothing is said of their difference." in said.getvalue()
    unknown = dataclasses.replace(pair_success(first, second), low=float("nan"))
    sentence = _pair_sentence(first, second, unknown)
    assert "nothing can be said of two against one" in sentence
    assert "told apart" not in sentence and "differs" not in sentence
    (card,) = [card for card in _cards([first, second], [(first, second, unknown)]) if "against" in card.label]
    assert (card.figure, card.kind) == ("not known", "plain")
