"""The wheel holds every file of the tree's packages, and what it needs to be found and typed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLACES = {name: place for name, place in SETTINGS["tool"]["setuptools"]["package-dir"].items() if name.count(".") < 2}


def _tree(root: Path) -> set[str]:
    """Files of all packages under their installed names, "moec/runtime/state.py"."""
    return {
        f"{name.replace('.', '/')}/{path.relative_to(root / place).as_posix()}"
        for name, place in PLACES.items()
        for path in (root / place).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a build needs, elsewhere: building in the tree would leave folders behind."""
    folder = tmp_path_factory.mktemp("tree")
    for place in PLACES.values():
        shutil.copytree(ROOT / place, folder / place, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(copy: Path) -> zipfile.ZipFile:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_and_the_tree_hold_the_same_files(copy: Path, wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    tree = _tree(copy)
    assert tree - packed == set(), "list these under [tool.setuptools] packages, package-dir or package-data"
    assert packed - tree == set()
    assert {"moec/py.typed", "moec/runtime/state.py", "moec/models/presets/k3-tiny.yaml"} <= packed


def test_the_wheel_announces_its_command_backend_and_licence(wheel: zipfile.ZipFile) -> None:
    info = next(name.split("/")[0] for name in wheel.namelist() if name.split("/")[0].endswith(".dist-info"))
    entries = wheel.read(f"{info}/entry_points.txt").decode()
    assert "[console_scripts]\nmoec = moec.cli:main" in entries
    assert "[torch_dynamo_backends]\nmoec = moec.backend:moec_backend" in entries
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_installed_wheel_imports_without_the_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import moec.runtime.state as state, moec.compiler.dialect, moec.models.presets; print(state.__file__)"
    isolated = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    found = subprocess.run(isolated, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "moec" / "runtime" / "state.py")
