# SPDX-License-Identifier: Apache-2.0
"""A plan reads metadata only, and its figures are those of the samples that training will draw."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from embodix.contracts import SampleLayout, SampleShape
from embodix.costs.dataset_facts import padded_action_share
from embodix.costs.gpu_sizes import smallest_gpu
from embodix.costs.plan import RunCosts, plan_training, speed_bounds
from embodix.costs.policy_costs import EMBODIX, UPSTREAM
from embodix.costs.workload import padded
from embodix.data.token_counts import token_counter
from embodix.policies.support import support_of
from embodix_pi05.counting import prompt_texts
from embodix_pi05.testing import SMALL_ARCHITECTURE

CAMERAS = ("observation.images.front", "observation.images.gripper")
STATE = {"q01": [-1.0, 0.0], "q10": [-0.5, 0.1], "q50": [0.0, 0.5], "q90": [0.5, 0.9], "q99": [1.0, 1.0]}
VIDEO_COLUMNS = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


@pytest.fixture
def write_metadata(tmp_path) -> Callable[..., Path]:
    """Write the metadata of a data set: (length, task) of each episode, and cameras absent by episode."""

    def write(episodes: list[tuple[int, str]], absent: dict[int, list[bool]] | None = None) -> Path:
        root = tmp_path / "dataset"
        (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        features = {camera: {"dtype": "video", "shape": [56, 56, 3]} for camera in CAMERAS}
        if absent is not None:
            features["camera_is_pad"] = {"dtype": "bool", "shape": [2]}
            (root / "data" / "chunk-000").mkdir(parents=True)
            rows = [
                (index, absent.get(index, [False, False])) for index, (n, _) in enumerate(episodes) for _ in range(n)
            ]
            table = pandas.DataFrame(rows, columns=["episode_index", "camera_is_pad"])
            table.to_parquet(root / "data" / "chunk-000" / "file-000.parquet")
        (root / "meta" / "info.json").write_text(json.dumps(_info(features, episodes)))
        (root / "meta" / "stats.json").write_text(json.dumps({"observation.state": STATE}))
        tasks = list(dict.fromkeys(task for _, task in episodes))
        pandas.DataFrame({"task_index": range(len(tasks))}, index=tasks).to_parquet(root / "meta" / "tasks.parquet")
        ends = list(itertools.accumulate((length for length, _ in episodes), initial=0))
        table = pandas.DataFrame(
            {
                "episode_index": range(len(episodes)),
                "length": [length for length, _ in episodes],
                "tasks": [[task] for _, task in episodes],
                "dataset_from_index": ends[:-1],
                "dataset_to_index": ends[1:],
                "data/chunk_index": [0] * len(episodes),
                "data/file_index": [0] * len(episodes),
                **{f"videos/{camera}/{name}": [0] * len(episodes) for camera in CAMERAS for name in VIDEO_COLUMNS},
            }
        )
        table.to_parquet(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        return root

    return write


def _info(features: dict[str, Any], episodes: list[tuple[int, str]]) -> dict[str, Any]:
    """What ``meta/info.json`` has of a data set of videos."""
    return {
        "codebase_version": "v3.0",
        "fps": 10,
        "features": features,
        "total_episodes": len(episodes),
        "total_frames": sum(length for length, _ in episodes),
        "total_tasks": len({task for _, task in episodes}),
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }


def config_of(root: Path, **changes: Any) -> dict[str, Any]:
    config = {
        "policy": {"type": "pi05", "empty_cameras": 1, "normalization_mapping": {"STATE": "QUANTILES"}},
        "architecture": None,
        "dataset": {"repo_id": "me/robot", "root": str(root), "episodes": None},
        "tokenizer": {"directory": str(root / "no_tokenizer")},
        "train": {"batch_size": 4},
        "packing": {"name": "none"},
        "attention": {"name": "upstream"},
        "vision_tokens": {"name": "upstream"},
        "action_pad": {"name": "host"},
        "flow_samples": 1,
    }
    return {**config, **changes}


SMALL = {
    "architecture": SMALL_ARCHITECTURE,
    "policy": {"image_resolution": [28, 28], "chunk_size": 6, "n_action_steps": 6, "empty_cameras": 1, "type": "pi05"},
}
FAST = {"packing": {"name": "padding_free"}, "attention": {"name": "auto"}, "vision_tokens": {"name": "valid"}}


def test_tokens_waste_and_bound_of_a_data_set(write_metadata):
    root = write_metadata([(30, "Reach"), (70, "Open the door of the cabinet")])
    plan = plan_training(config_of(root))
    assert (plan.num_episodes, plan.num_frames) == (2, 100)
    assert plan.tokens["images"] == 512
    assert plan.tokens["blank_images"] == 256
    assert plan.tokens["actions"] == 50
    assert plan.tokens["prompt"] + plan.tokens["prompt_padding"] == pytest.approx(200)
    assert plan.waste == pytest.approx((256 + plan.tokens["prompt_padding"]) / 1018)
    upstream, *_, fast = plan.variants
    assert (upstream.name, upstream.bound, upstream.images, plan.chosen) == ("upstream", 1.0, 3.0, "upstream")
    assert (fast.name, fast.images, fast.utilisation) == ("embodix", 2.0, 1.0)
    assert fast.tokens == pytest.approx(562 + plan.tokens["prompt"])
    assert fast.bound == fast.real_bound
    assert 1.7 < fast.bound < 1.9
    assert fast.memory.total < upstream.memory.total
    found = plan.remedies
    assert {remedy.setting for remedy in found} == {
        "+plugin=embodix",
        "train.batch_size=2",
        "policy.gradient_checkpointing=true",
        "policy.dtype=bfloat16",
        "policy.train_expert_only=true",
        "peft=lora",
    }
    assert all(remedy.total < upstream.memory.total for remedy in found)
    assert [remedy.setting for remedy in found[:2]] == ["+plugin=embodix", "policy.gradient_checkpointing=true"]
    assert [remedy.exact for remedy in found] == [True, True, False, False, False, False]
    totals = [remedy.total for remedy in found if not remedy.exact]
    assert totals == sorted(totals)


def test_remedies_in_use_are_not_proposed_again(write_metadata):
    policy = {**SMALL["policy"], "dtype": "bfloat16", "gradient_checkpointing": True}
    small = {**SMALL, "policy": policy, "train": {"batch_size": 1}}
    plan = plan_training(config_of(write_metadata([(30, "Reach")]), **small, **FAST))
    assert {remedy.setting for remedy in plan.remedies} == {"policy.train_expert_only=true", "peft=lora"}


def test_an_unknown_dtype_is_refused(write_metadata):
    policy = {**SMALL["policy"], "dtype": "float16"}
    with pytest.raises(ValueError, match="Upstream's config rejects a value"):
        RunCosts(config_of(write_metadata([(30, "Reach")]), **{**SMALL, "policy": policy}))


GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
GOLDEN_SMALL = {**SMALL["policy"], "tokenizer_max_length": 64, "max_action_dim": 8}


@pytest.mark.parametrize(("size", "forward", "backward"), [("real", 1.1e-6, 2e-5), ("small", 5e-4, 2e-3)])
def test_a_plan_gives_the_frozen_figures(write_metadata, size, forward, backward):
    root = write_metadata([(30, "Reach"), (70, "Open the door of the cabinet")], absent={1: [False, True]})
    run = RunCosts(config_of(root, **({**SMALL, "policy": GOLDEN_SMALL} if size == "small" else {})))
    golden = GOLDEN["plans"][size]
    assert run.costs.num_parameters == golden["num_parameters"]
    assert run.tokens() == pytest.approx(golden["tokens"])
    for variant in (golden["variants"][0], golden["variants"][3]):
        computation = {"upstream": UPSTREAM, "embodix": EMBODIX}[variant["name"]]
        flops = run.costs.mean(run.workload, computation)
        assert flops.forward == pytest.approx(variant["forward_flops"], rel=forward)
        assert flops.backward == pytest.approx(variant["backward_flops"], rel=backward)
        assert run.images(computation) == pytest.approx(variant["images"])
        assert run.costs.bound(run.workload, computation) == pytest.approx(variant["bound"], rel=backward)
    name = {"small": "this_size", "real": "real_size"}[size]
    assert run.costs.bound(run.workload, EMBODIX) == pytest.approx(GOLDEN["bounds"][name], rel=backward)


def test_each_task_weighs_by_its_frames(write_metadata):
    long_task = "Open the door of the cabinet " * 3
    few = RunCosts(config_of(write_metadata([(90, "Reach"), (10, long_task)])))
    short, long = few.prompts
    assert short.longest < long.shortest
    lengths = few.tokens()["prompt"] - short.shortest
    assert 0 < lengths < 0.3 * (long.longest - short.shortest)


def test_only_the_chosen_episodes_count(write_metadata):
    root = write_metadata([(30, "Reach"), (70, "Open the door")])
    config = config_of(root, dataset={"repo_id": "me/robot", "root": str(root), "episodes": [1]})
    assert RunCosts(config).workload.keys() and sum(RunCosts(config).workload.values()) == pytest.approx(70)
    config["dataset"]["episodes"] = [1, 7]
    with pytest.raises(ValueError, match=r"7 does not exist; it has 2 episodes, 0 to 1"):
        RunCosts(config)


def test_cameras_absent_in_some_episodes_are_blank_there(write_metadata):
    episodes = [(50, "Reach"), (50, "Reach")]
    run = RunCosts(config_of(write_metadata(episodes, absent={1: [False, True]})))
    assert run.tokens()["images"] == pytest.approx(1.5 * 256)
    assert run.tokens()["blank_images"] == pytest.approx(1.5 * 256)
    assert run.images(EMBODIX) == pytest.approx(1.5)


def test_a_choice_of_its_own_is_a_variant_of_its_own(write_metadata):
    root = write_metadata([(30, "Reach")])
    plan = plan_training(config_of(root, **SMALL, packing={"name": "padding_free"}, attention={"name": "segment_gemm"}))
    assert plan.chosen == "this config"
    assert plan.variants[-1].computation.attention == "segment_gemm"
    named_backend = plan_training(config_of(root, **SMALL, **{**FAST, "attention": {"name": "segment_gemm"}}))
    assert named_backend.chosen == "this config"
    assert named_backend.variants[-1].bound == plan_training(config_of(root, **SMALL, **FAST)).variants[3].bound


@pytest.mark.parametrize("chunk_size", [1, 10, 50])
@pytest.mark.parametrize("lengths", [[100], [60, 75, 90], [5, 8, 200]])
def test_the_padded_action_share_is_exact(lengths, chunk_size):
    steps = [frame + offset >= n for n in lengths for frame in range(n) for offset in range(chunk_size)]
    assert padded_action_share(lengths, chunk_size) == pytest.approx(np.mean(steps))
    if min(lengths) >= chunk_size:
        assert padded_action_share(lengths, chunk_size) == pytest.approx((chunk_size - 1) / (2 * np.mean(lengths)))


def test_state_numbers_follow_the_normalisation_that_training_applies():
    shares = prompt_texts({}, "open_the\ndoor", STATE)
    texts = list(shares)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert texts[0] == "Task: open the door, State: 0 0;\nAction: "
    assert texts[1] == "Task: open the door, State: 64 25;\nAction: "
    assert texts[4].endswith("State: 255 255;\nAction: ")
    edges = np.linspace(-1, 1, 257)[:-1]
    identity = {"normalization_mapping": {"STATE": "IDENTITY"}}
    (text,) = prompt_texts(identity, "x", {"mean": [-1.5, -0.3, 0.0, 0.7]})
    expected = np.digitize([-1.5, -0.3, 0.0, 0.7], edges) - 1
    assert " ".join(map(str, expected)) in text


def test_prompts_are_cut_where_upstream_cuts_them(write_metadata):
    run = RunCosts(config_of(write_metadata([(30, "Reach " * 300)])))
    (prompt,) = run.prompts
    assert prompt.longest == 200 and prompt.excess > 100
    assert run.tokens()["prompt"] == pytest.approx(200)


def test_prompt_lengths_are_those_that_upstream_tokenizes(demonstrations):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

    from embodix.data.tokenizer import offline_tokenizer

    dataset = LeRobotDataset("embodix/metaworld", root=demonstrations)
    with offline_tokenizer(demonstrations / "tokenizer"):
        preprocess, _ = make_pi05_pre_post_processors(PI05Config(device="cpu"), dataset.meta.stats)
        frames = [dataset[index] for index in range(0, len(dataset), 5)]
        masks = [preprocess(frame)["observation.language.attention_mask"] for frame in frames]
    tokenized = [int(mask.sum()) for mask in masks]
    plan = RunCosts(config_of(demonstrations, tokenizer={"directory": str(demonstrations / "tokenizer")}))
    assert "counted with the tokenizer" in plan.prompt_source
    assert plan.tokens()["prompt"] == pytest.approx(np.mean(tokenized), abs=1.5)
    assert min(prompt.shortest for prompt in plan.prompts) <= min(tokenized) + 3


def test_without_a_tokenizer_the_plan_says_that_it_estimates(write_metadata):
    config = config_of(write_metadata([(30, "Reach")]))
    assert "estimates" in RunCosts(config).prompt_source
    count, _ = token_counter(config, support_of("pi05"))
    words, digits, marks = 4, 5, 6  # marks: three colons, a comma, a semicolon, a line end
    assert count("Task: Reach, State: 12 255;\nAction: ") == 1 + words + digits + marks


def test_bounds_of_a_comparison_name_the_real_size(write_metadata):
    root = write_metadata([(30, "Reach")])
    configs = {"upstream": config_of(root, **SMALL), "embodix": config_of(root, **SMALL, **FAST)}
    bounds = speed_bounds(configs, "upstream")
    assert list(bounds) == ["embodix"]
    assert bounds["embodix"].this_size > 2
    real = RunCosts(config_of(root))
    assert bounds["embodix"].real_size == pytest.approx(real.real_bound(EMBODIX), rel=0.01)
    assert "2 real and 1 blank cameras" in bounds["embodix"].basis
    at_real_size = {name: config_of(root, **groups) for name, groups in (("upstream", {}), ("embodix", FAST))}
    assert speed_bounds(at_real_size, "upstream")["embodix"].real_size is None


def test_cameras_are_matched_to_the_slots_of_the_policy(write_metadata):
    root = write_metadata([(30, "Reach")])
    slots = {name: {"type": "VISUAL", "shape": [3, 56, 56]} for name in ("observation.images.front", "a", "b")}
    policy = {"type": "pi05", "input_features": slots, "empty_cameras": 1}
    config = config_of(root, policy=policy, rename_map={"observation.images.gripper": "a"})
    present, blank = RunCosts(config).cameras()
    assert present == ["observation.images.front", "a"]
    assert blank == ["b", "observation.images.empty_camera_0"]
    with pytest.raises(ValueError, match=r"gripper of the data set is in no slot.*front, a, b.*front, .*gripper"):
        RunCosts(config_of(root, policy=policy))


def test_what_is_missing_is_named(tmp_path, write_metadata):
    with pytest.raises(ValueError, match=r"has no meta/info\.json.*lerobot data <source>"):
        RunCosts(config_of(tmp_path / "absent"))
    root = write_metadata([(30, "Reach")])
    (root / "meta" / "tasks.parquet").unlink()
    with pytest.raises(ValueError, match=r"meta/tasks\.parquet: is missing"):
        RunCosts(config_of(root))


def test_a_mixture_draws_by_weight_and_fills_the_slots_of_all_members(write_metadata):
    root = write_metadata([(30, "Reach"), (70, "Open the door of the cabinet")])
    repo = {"repo_id": "me/robot", "root": str(root)}
    both = {**repo, "episodes": [1], "cameras": {"front": "base", "gripper": "wrist"}, "weight": 0.75}
    one = {**repo, "episodes": [0], "cameras": {"front": "base", "gripper": None}, "weight": 0.25}
    run = RunCosts(config_of(root, **SMALL, dataset={"members": {"two": both, "one": one}}))
    slots = ["observation.images.base", "observation.images.wrist"]
    assert run.cameras() == (slots, ["observation.images.empty_camera_0"])
    assert run.images(EMBODIX) == pytest.approx(0.75 * 2 + 0.25 * 1)
    assert sum(run.tokens().values()) == pytest.approx(3 * 4 + 200 + 6)
    assert [prompt.task for prompt in run.prompts] == ["Open the door of the cabinet", "Reach"]


def test_prompts_that_are_padded_to_the_longest_of_a_batch():
    layout = SampleLayout(image_tokens=4, action_tokens=10)
    alone = padded({(2, 9): 3.0, (2, 12): 1.0}, layout, 1)
    assert {shape: share for shape, share in alone.items() if share} == {
        SampleShape(2, 9): 3.0,
        SampleShape(2, 12): 1.0,
    }
    pairs = padded({(2, 9): 3.0, (2, 12): 1.0}, layout, 2)
    assert pairs == pytest.approx(
        {SampleShape(2, 9): 3 * 0.75, SampleShape(2, 9, 3): 3 * 0.25, SampleShape(2, 12): 1.0}
    )


def test_adapters_leave_gradients_and_optimizer_to_what_is_trained(write_metadata):
    root = write_metadata([(30, "Reach"), (70, "Open the door of the cabinet")])
    full = plan_training(config_of(root, **FAST))
    lora = plan_training(config_of(root, **FAST, peft={"method_type": "LORA", "r": 16, "lora_alpha": None}))
    assert full.num_trained == full.num_parameters
    assert lora.num_trained == lora.num_parameters - full.num_parameters
    memory = next(variant for variant in lora.variants if variant.name == lora.chosen).memory
    assert (memory.gradients, memory.optimizer) == (4 * lora.num_trained, 8 * lora.num_trained)
    assert memory.parameters == pytest.approx(4 * lora.num_parameters, rel=1e-2)
    remedy = next(remedy for remedy in full.remedies if remedy.setting == "peft=lora")
    assert remedy.total == memory.total
    assert (remedy.exact, remedy.gpu_gigabytes) == (False, 24)
    assert "peft=lora" not in {remedy.setting for remedy in lora.remedies}
    assert lora.features["peft"] == "lora, r=16"


def test_adapters_that_fit_no_module_are_refused(write_metadata):
    peft = {"method_type": "LORA", "r": 4, "target_modules": ["no_such_layer"]}
    with pytest.raises(ValueError, match=r"no_such_layer"):
        plan_training(config_of(write_metadata([(30, "Reach")]), **SMALL, peft=peft))


@pytest.mark.parametrize(("num_bytes", "gigabytes"), [(1, 8), (7.3e9, 12), (21.6e9, 24), (21.7e9, 32), (200e9, None)])
def test_the_smallest_gpu_keeps_a_tenth_free(num_bytes, gigabytes):
    assert smallest_gpu(num_bytes) == gigabytes
