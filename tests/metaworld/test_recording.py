# SPDX-License-Identifier: Apache-2.0
"""The recorder: what is stored, that seeds decide it, and that interruptions and changed settings do no harm."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from omegaconf import OmegaConf

import embodix_metaworld.recorder as metaworld
from embodix.cli.data import data_task
from embodix.data.recorded_dataset import MANIFEST_FILE, episodes_of_task, read_manifest
from embodix.data.tokenizer import offline_tokenizer
from embodix_metaworld.demonstrations import RecordingStage, demonstrate
from embodix_metaworld.recorder import record_metaworld
from embodix_metaworld.simulator import MetaWorldScene
from embodix_metaworld.tasks import INSTRUCTIONS, instruction_for

TASKS = ("reach-v3", "button-press-topdown-v3")


def frames(root):
    dataset = LeRobotDataset("embodix/metaworld", root=root)
    return [dataset[index] for index in range(len(dataset))]


def assert_equal_frames(left, right):
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key], key


def test_a_recording_is_a_lerobot_dataset_with_language_cameras_and_state(recorded):
    stored = frames(recorded.root)
    assert len(stored) == recorded.num_frames
    assert [stored[0]["task"], stored[-1]["task"]] == [INSTRUCTIONS[task] for task in TASKS]
    for camera in ("front", "gripper"):
        image = stored[0][f"observation.images.{camera}"]
        assert image.shape == (3, 32, 32)
        assert image.std() > 0.05, "the image is blank"
    assert not torch.equal(stored[0]["observation.images.front"], stored[0]["observation.images.gripper"])
    assert stored[0]["observation.state"].shape == stored[0]["action"].shape == (4,)
    assert [episodes_of_task(recorded.root, task) for task in TASKS] == [[0], [1]]


def test_instructions_range_from_one_word_to_about_fifty():
    lengths = sorted(len(instruction.split()) for instruction in INSTRUCTIONS.values())
    assert len(lengths) >= 8
    assert lengths[0] == 1
    assert 45 <= lengths[-1] <= 55


def test_the_same_seed_gives_the_same_episodes_whatever_the_number_of_workers(recorded, tmp_path, small_settings):
    again = record_metaworld(small_settings(tmp_path / "again", num_workers=2))
    assert_equal_frames(frames(recorded.root), frames(again.root))


def test_another_seed_gives_other_episodes(recorded, tmp_path, small_settings):
    other = record_metaworld(small_settings(tmp_path / "other", tasks=TASKS[:1], seed=1))
    assert (
        read_manifest(other.root)["episodes"][0]["scene_seed"]
        != read_manifest(recorded.root)["episodes"][0]["scene_seed"]
    )
    assert not torch.equal(frames(other.root)[0]["observation.state"], frames(recorded.root)[-1]["observation.state"])


def test_a_finished_recording_is_reused(recorded, small_settings):
    before = (recorded.root / MANIFEST_FILE).stat().st_mtime_ns
    again = record_metaworld(small_settings(recorded.root, num_workers=2))
    assert again.reused
    assert (again.num_episodes, again.num_frames) == (recorded.num_episodes, recorded.num_frames)
    assert (recorded.root / MANIFEST_FILE).stat().st_mtime_ns == before


def test_changed_settings_are_an_error_that_names_them(recorded, small_settings):
    with pytest.raises(ValueError, match=r"other settings \(seed: wanted 7, found 0\)"):
        record_metaworld(small_settings(recorded.root, seed=7))


def test_a_folder_with_something_else_is_never_touched(tmp_path, small_settings):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(ValueError, match="not a finished recording"):
        record_metaworld(small_settings(tmp_path))
    assert (tmp_path / "thesis.txt").exists()


def test_an_interrupted_recording_continues_where_it_stopped(recorded, tmp_path, monkeypatch, small_settings):
    root = tmp_path / "dataset"
    recorded_here = []

    def demonstrate_once(scene, settings, episode):
        if recorded_here:
            raise KeyboardInterrupt
        recorded_here.append((scene.task, episode))
        return demonstrate(scene, settings, episode)

    monkeypatch.setattr("embodix_metaworld.demonstrations.demonstrate", demonstrate_once)
    with pytest.raises(KeyboardInterrupt):
        record_metaworld(small_settings(root))
    assert not root.exists()

    continued = []
    monkeypatch.setattr(
        "embodix_metaworld.demonstrations.demonstrate",
        lambda scene, settings, episode: continued.append(scene.task) or demonstrate(scene, settings, episode),
    )
    record_metaworld(small_settings(root))
    assert continued == [TASKS[1]]
    assert_equal_frames(frames(recorded.root), frames(root))
    assert not root.with_name("dataset.recording").exists()


def test_a_full_disk_while_writing_leaves_no_dataset_and_loses_no_episode(
    recorded, tmp_path, monkeypatch, small_settings
):
    root = tmp_path / "dataset"

    def disk_full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LeRobotDataset, "finalize", disk_full)
        with pytest.raises(OSError, match="No space left"):
            record_metaworld(small_settings(root))
    assert not root.exists()
    monkeypatch.setattr("embodix_metaworld.demonstrations.demonstrate", lambda *_: pytest.fail("recorded twice"))
    assert_equal_frames(frames(record_metaworld(small_settings(root)).root), frames(recorded.root))


def test_a_half_written_episode_file_is_not_taken_for_an_episode(tmp_path, monkeypatch, small_settings):
    stage = RecordingStage(tmp_path, small_settings(tmp_path / "dataset"))
    monkeypatch.setattr(
        np, "savez", lambda path, **arrays: path.write_bytes(b"half") and (_ for _ in ()).throw(OSError)
    )
    with pytest.raises(OSError):
        stage.record(TASKS[0], 0)
    assert list((tmp_path / "episodes" / TASKS[0]).iterdir()) == []


def test_continuing_with_other_settings_is_an_error(tmp_path, small_settings):
    RecordingStage(tmp_path, small_settings(tmp_path / "dataset"))
    with pytest.raises(ValueError, match="image_size: wanted 48, found 32"):
        RecordingStage(tmp_path, small_settings(tmp_path / "dataset", image_size=48))


def test_a_failed_attempt_is_drawn_again_with_another_seed(tmp_path, small_settings):
    scene = MetaWorldScene(TASKS[0], ("front",), 32)
    settings = small_settings(tmp_path, cameras=("front",), hold_steps=2)
    whole = demonstrate(scene, settings, 0)
    step, forget = scene.step, [len(whole.states)]

    def fail_the_first_attempt(action):
        observation, reward, success = step(action)
        success, forget[0] = success and forget[0] <= 0, forget[0] - 1
        return observation, reward, success

    scene.step = fail_the_first_attempt
    retried = demonstrate(scene, small_settings(tmp_path, cameras=("front",), max_episode_steps=len(whole.states)), 0)
    scene.close()
    assert retried.num_failed >= 1
    assert retried.seed != whole.seed


def test_an_expert_that_never_succeeds_is_an_error(tmp_path, monkeypatch, small_settings):
    monkeypatch.setattr("embodix_metaworld.demonstrations.MAX_ATTEMPTS", 2)
    with pytest.raises(RuntimeError, match="reach-v3 failed 2 times in a row within 1 steps"):
        record_metaworld(small_settings(tmp_path / "dataset", max_episode_steps=1))


def test_missing_cameras_are_blank_and_marked(tmp_path, small_settings):
    settings = small_settings(tmp_path / "dataset", tasks=TASKS[:1], episodes_per_task=4, missing_camera_fraction=0.5)
    manifest = read_manifest(record_metaworld(settings).root)
    missing = [episode["missing_camera"] for episode in manifest["episodes"]]
    assert sum(camera is not None for camera in missing) == 2
    for frame in frames(tmp_path / "dataset"):
        absent = missing[int(frame["episode_index"])]
        assert frame["camera_is_pad"].dtype == torch.bool
        assert frame["camera_is_pad"].tolist() == [camera == absent for camera in settings.cameras]
        for camera in settings.cameras:
            assert bool(frame[f"observation.images.{camera}"].any()) == (camera != absent)


def test_the_camera_mask_reaches_the_policy(tmp_path, small_settings, recorded):
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
    from torch.utils.data import default_collate

    settings = small_settings(tmp_path / "dataset", tasks=TASKS[:1], episodes_per_task=2, missing_camera_fraction=0.5)
    dataset = LeRobotDataset("embodix/metaworld", root=record_metaworld(settings).root)
    config = PI05Config(
        device="cpu",
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (4,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
    )
    batch = default_collate([dataset[0], dataset[len(dataset) - 1]])
    with offline_tokenizer(recorded.tokenizer):
        preprocess, _ = make_pi05_pre_post_processors(config, dataset.meta.stats)
        assert torch.equal(preprocess(batch)["camera_is_pad"], batch["camera_is_pad"])


def test_quantiles_are_those_of_all_frames(recorded):
    stats = json.loads((recorded.root / "meta" / "stats.json").read_text())
    stored = torch.stack([frame["action"] for frame in frames(recorded.root)]).double().numpy()
    for name, quantile in (("q01", 0.01), ("q99", 0.99)):
        np.testing.assert_allclose(stats["action"][name], np.quantile(stored, quantile, axis=0), atol=1e-6)
    spread = np.subtract(stats["action"]["q99"], stats["action"]["q01"])
    assert not np.any((spread > 0) & (spread < 1e-6)), "normalising would divide by a rounding error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("reach",)}, "Tasks must be MetaWorld's, got \\['reach'\\]"),
        ({"cameras": ("front", "wrist")}, "Cameras must be different names of MetaWorld views"),
        ({"cameras": ("front", "lerobot_front")}, "a camera of its own"),
        ({"episodes": {"hammer-v3": 2}}, "not in `tasks`"),
        ({"storage": "gif"}, "'image' or 'video'"),
        ({"missing_camera_fraction": 1.5}, "between 0 and 1"),
        ({"cameras": ("front",), "missing_camera_fraction": 0.5}, "at least two cameras"),
        ({"episodes_per_task": 0}, "at least one episode"),
    ],
)
def test_mistakes_are_named_before_anything_is_recorded(tmp_path, changes, message, small_settings):
    with pytest.raises(ValueError, match=message):
        record_metaworld(small_settings(tmp_path / "dataset", **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_task_without_instruction_takes_lerobots_description():
    from lerobot.envs.metaworld import TASK_DESCRIPTIONS

    assert instruction_for("hammer-v3") == TASK_DESCRIPTIONS["hammer-v3"]
    assert instruction_for("reach-v3") == INSTRUCTIONS["reach-v3"]
    with pytest.raises(ValueError, match="'hammer-v4' has none"):
        instruction_for("hammer-v4")


def test_own_instructions_win():
    assert instruction_for("hammer-v3", {"hammer-v3": "Hit the nail"}) == "Hit the nail"


@pytest.mark.slow
def test_video_storage(tmp_path, small_settings):
    recorded = record_metaworld(small_settings(tmp_path / "dataset", tasks=TASKS[:1], storage="video", image_size=64))
    lossless = record_metaworld(small_settings(tmp_path / "lossless", tasks=TASKS[:1], image_size=64))
    for decoded, original in zip(frames(recorded.root), frames(lossless.root), strict=True):
        key = "observation.images.front"
        assert (decoded[key] - original[key]).abs().mean() < 0.03
    assert shutil.which("ffmpeg") or list(recorded.root.glob("videos/**/*.mp4"))


def test_the_recorder_is_a_registered_data_source():
    from embodix.plugins import resolve

    assert resolve("data_sources", "metaworld") is metaworld.record_metaworld


def test_a_recording_without_a_source_is_told_the_sources():
    with pytest.raises(ValueError, match=r"lerobot data <learn_metaworld\|libero\|metaworld> root=<folder>"):
        data_task(OmegaConf.create({}))
