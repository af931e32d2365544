# SPDX-License-Identifier: Apache-2.0
"""``lerobot eval``: from a composed config to results, page and the evaluations themselves."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lerobot.envs.configs import EnvConfig
from omegaconf import DictConfig, OmegaConf

from embodix.checkpoints.env_features import env_name
from embodix.checkpoints.model_folder import ModelFolder, find_model
from embodix.checkpoints.policy_loading import LoadedPolicy, loaded_policy
from embodix.config.compose import options_of
from embodix.contracts import Simulators
from embodix.evaluation.actors import Actor, ExpertActor, ReplayActor
from embodix.evaluation.choices import (
    NamedCheckpoint,
    check_choices,
    name_checkpoints,
    needs_policy,
    policy_choices,
)
from embodix.evaluation.controls import PolicyActors, mean_action_sequence
from embodix.evaluation.engine import EngineSettings
from embodix.evaluation.episodes import plan_episodes
from embodix.evaluation.identity import EvaluationIdentity
from embodix.evaluation.session import ActorRun, EvaluationProgress, EvaluationSession, default_num_workers
from embodix.policies.support import support_of
from embodix.report.evaluation import (
    EPISODES_FILE,
    RESULTS_FILE,
    Evaluation,
    EvaluationRun,
    pair_success,
    read_evaluation,
    results_record,
    write_results,
)
from embodix.report.evaluation_page import EvaluatedFolder, render_evaluations
from embodix.report.manifest import write_text_atomically
from embodix.simulation.simulators import simulators_of
from embodix.training.host_config import decode_env
from embodix.training.run_folder import owned_folder

PAGE_FILE, PAIRS_FILE = "results.html", "pairs.json"


def run_evaluation(
    cfg: DictConfig, overrides: Sequence[str], output_dir: Path, begun: Callable[[], None] = lambda: None
) -> list[Evaluation]:
    """Evaluate as the config says.

    Args:
        cfg: the composed ``eval`` config.
        overrides: the Hydra overrides of this command.
        output_dir: for ``results.json``, ``results.html``, ``episodes.jsonl`` and videos; of several checkpoints, each
            has a folder of its name in it, and ``pairs.json`` compares them.
        begun: called once nothing refuses the command any more, before anything is written.

    Returns:
        One evaluation for each checkpoint, or that of a controller.

    Raises:
        ValueError: a mistake in the config, the checkpoint or the environment; the message says what to do.
    """
    with owned_folder(output_dir):
        return _evaluate(cfg, overrides, output_dir, begun)


def _evaluate(
    cfg: DictConfig, overrides: Sequence[str], output_dir: Path, begun: Callable[[], None]
) -> list[Evaluation]:
    named = name_checkpoints(_plain(cfg.checkpoint))
    paths = {name: checkpoint.path for name, checkpoint in named.items()}
    recorded = None if cfg.resume is None else EvaluationIdentity.load(output_dir)
    if recorded is not None:  # the folders themselves: `last` may have moved since
        paths = {name: str(content["model"]) for name, content in recorded.checkpoints.items()}
    checkpoints = {name: find_model(path) for name, path in paths.items()}
    check_choices(cfg, list(checkpoints))
    env_cfg = _environment(cfg, list(checkpoints.values()))
    identity = EvaluationIdentity.of(overrides, checkpoints)
    if recorded is not None:
        recorded.require_same(output_dir, identity)
    else:
        _require_new(output_dir)
        begun()
        identity.save(output_dir)
    with EvaluationProgress() as progress:
        evaluator = _Evaluator(cfg, overrides, env_cfg, output_dir, progress, identity)
        if needs_policy(cfg.actor):
            folders = [
                evaluator.evaluate(name, named[name], source, len(named)) for name, source in checkpoints.items()
            ]
        else:
            folders = [evaluator.evaluate_controller(next(iter(checkpoints.values()), None))]
    evaluated = [_read(folder, output_dir) for folder in folders]
    write_text_atomically(output_dir / PAGE_FILE, render_evaluations(evaluated, output_dir))
    evaluations = [item.evaluation for item in evaluated]
    if len(evaluations) > 1:
        _write_pairs(output_dir / PAIRS_FILE, evaluations)
    return evaluations


class _Evaluator:
    """Evaluates one policy after another in the same simulators."""

    def __init__(
        self,
        cfg: DictConfig,
        overrides: Sequence[str],
        env_cfg: EnvConfig,
        output_dir: Path,
        progress: EvaluationProgress,
        identity: EvaluationIdentity,
    ) -> None:
        self._identity = identity
        self._cfg, self._env_cfg, self._output_dir = cfg, env_cfg, output_dir
        self._choices = policy_choices(cfg, overrides)
        simulators = _simulators(env_cfg)
        episodes = plan_episodes(simulators.tasks, cfg.eval.n_episodes, cfg.eval.first_seed)
        self._session = EvaluationSession(simulators, episodes, _engine_settings(cfg), progress)
        self._shared: dict[str, ActorRun] = {}

    def evaluate(self, name: str, named: NamedCheckpoint, source: ModelFolder, num_checkpoints: int) -> Path:
        """A checkpoint and its controls; returns the folder of its results."""
        folder = self._output_dir / name if num_checkpoints > 1 else self._output_dir
        with loaded_policy(source, self._env_cfg, named.applied_to(self._choices)) as loaded:
            actor = PolicyActors(loaded, self._env_cfg, name, self._cfg.wrong_prompt, source.trained_instructions())
            if "wrong_prompt" in self._cfg.controls:
                actor.require_wrong_prompt(self._session.simulators.tasks)
            main = self._session.run("policy", actor.of(self._cfg.actor, {}), folder, videos=True)
            controls = {
                control: self._session.run(control, actor.of(control, main.instructions), folder, videos=False)
                if needs_policy(control)
                else self._controller(control, source)
                for control in self._cfg.controls
            }
            notes = [*loaded.notes, *_remarks(loaded), *actor.unseen_instructions(main.instructions)]
            description = {**loaded.description, "notes": notes, "changes": named.changes}
        self._write(folder, name, source.model, description, main, controls)
        return folder

    def evaluate_controller(self, source: ModelFolder | None) -> Path:
        """The expert or the blind control alone."""
        main = self._session.run(
            "policy", self._build_controller(self._cfg.actor, source), self._output_dir, videos=True
        )
        controls = {control: self._controller(control, source) for control in self._cfg.controls}
        self._write(self._output_dir, self._cfg.actor, None, {}, main, controls)
        return self._output_dir

    def _controller(self, control: str, source: ModelFolder | None) -> ActorRun:
        """A control that no checkpoint changes: run once, shown beside each."""
        if control not in self._shared:
            actor = self._build_controller(control, source)
            self._shared[control] = self._session.run(control, actor, self._output_dir, videos=False)
        return self._shared[control]

    def _build_controller(self, name: str, source: ModelFolder | None) -> Actor:
        if name == "expert":
            return ExpertActor()
        root = _recording(self._cfg, source)
        length: int = self._env_cfg.episode_length  # type: ignore[attr-defined]  # of every environment with recordings
        tasks = self._session.simulators.tasks
        return ReplayActor({task: mean_action_sequence(root, task, length) for task in tasks}, name)

    def _write(
        self,
        folder: Path,
        name: str,
        checkpoint: str | None,
        description: Mapping[str, Any],
        main: ActorRun,
        controls: Mapping[str, ActorRun],
    ) -> None:
        runs = [main, *controls.values()]
        run = EvaluationRun(
            name=name,
            checkpoint=checkpoint,
            policy=description,
            env=_plain_env(self._env_cfg),
            settings=self._settings(),
            identity=self._identity.checkpoints.get(name, {}),
            wall_s=sum(run.wall_s for run in runs),
            cpu_s=sum(run.cpu_s for run in runs),
        )
        episodes = {control: control_run.episodes for control, control_run in controls.items()}
        write_results(folder, results_record(run, main.episodes, episodes))

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = _plain(self._cfg.eval)
        return {
            **settings,
            "num_workers": self._session.settings.num_workers,
            "actor": self._cfg.actor,
            "wrong_prompt": self._cfg.wrong_prompt,
            "resumed": self._session.resumed,
        }


def _remarks(loaded: LoadedPolicy) -> list[str]:
    """Where a policy executes all that it predicts, and where its prompts were too long."""
    config: Any = loaded.policy.config
    shortened = [task.sentence for task in support_of(config.type).shortened_so_far(loaded.preprocessor)]
    steps = getattr(config, "n_action_steps", 1)
    if steps == 1 or steps != getattr(config, "chunk_size", None):
        return shortened
    return [
        *shortened,
        f"all {steps} actions of each chunk are executed before the policy looks again (n_action_steps = chunk_size); "
        "beside it with fewer: 'checkpoint={all: <path>, few: {path: <path>, policy.n_action_steps: "
        f"{max(1, steps // 5)}}}}}'.",
    ]


def _simulators(env_cfg: EnvConfig) -> Simulators:
    """The environment's simulators; what is missing for them is the user's to install, so no traceback."""
    package = env_cfg.package_name
    if not hasattr(env_cfg, "simulators") and package.startswith("gym_") and importlib.util.find_spec(package) is None:
        extra = env_cfg.type
        raise ValueError(f"env.type={extra} needs the package {package}: pip install 'lerobot[{extra}]'.")
    try:
        return simulators_of(env_cfg)
    except RuntimeError as error:  # no OpenGL backend
        raise ValueError(str(error)) from error


def _require_new(output_dir: Path) -> None:
    """Episodes of another evaluation must not be taken for finished ones of this."""
    found = next(output_dir.glob(f"**/{EPISODES_FILE}"), None)
    if found is not None:
        raise ValueError(
            f"{output_dir} holds an evaluation already ({found}). Continue it with resume={output_dir}, or give "
            "another folder: hydra.run.dir=... ."
        )


def _engine_settings(cfg: DictConfig) -> EngineSettings:
    chosen: dict[str, Any] = {key: value for key, value in cfg.eval.items() if key not in ("n_episodes", "first_seed")}
    if chosen["num_workers"] is None:
        chosen["num_workers"] = default_num_workers()
    return EngineSettings(**chosen, videos_dir=Path("videos"))  # each run has a folder of its own


def _environment(cfg: DictConfig, sources: Sequence[ModelFolder]) -> EnvConfig:
    """The environment of the command; where it names none, that of the runs, with the fields that it changes."""
    node = _plain(cfg.env) or {}
    if "type" not in node:
        node = {**_environment_of_runs(sources), **node}
    return decode_env(node)


def _environment_of_runs(sources: Sequence[ModelFolder]) -> dict[str, Any]:
    found = [source.train_config.get("env") for source in sources]
    if not found or found[0] is None or any(env != found[0] for env in found):
        raise ValueError(
            "No environment was chosen, and the runs that trained the checkpoints have none, or different ones. "
            f"Choose one: {', '.join(f'env={name}' for name in options_of('env'))}, or LeRobot's own as +env.type=... ."
        )
    return dict(found[0])


def _recording(cfg: DictConfig, source: ModelFolder | None) -> str:
    """Root of the demonstrations that the blind control replays."""
    trained_on = source.train_config.get("dataset", {}).get("root") if source else None
    root = cfg.dataset.root or trained_on
    if root is None:
        raise ValueError(
            "The blind control replays the mean demonstration of a recording, and none is known. Give its folder: "
            "dataset.root=<folder of the recording>."
        )
    return str(root)


def _read(folder: Path, output_dir: Path) -> EvaluatedFolder:
    evaluation = read_evaluation(folder / RESULTS_FILE)
    assert evaluation is not None
    return EvaluatedFolder(evaluation, "" if folder == output_dir else folder.name)


def _write_pairs(path: Path, evaluations: Sequence[Evaluation]) -> None:
    baseline = evaluations[0]
    pairs = {variant.name: pair_success(baseline, variant) for variant in evaluations[1:]}
    record = {
        "baseline": baseline.name,
        "pairs": {name: asdict(pair) for name, pair in pairs.items() if pair is not None},
    }
    write_text_atomically(path, json.dumps(record, indent=2) + "\n")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _plain_env(env_cfg: EnvConfig) -> dict[str, Any]:
    """The environment's fields as JSON types, without the features that follow from them."""
    fields = {key: value for key, value in vars(env_cfg).items() if key not in ("features", "features_map")}
    plain: dict[str, Any] = json.loads(json.dumps({"type": env_name(env_cfg), **fields}, default=str))
    return plain
