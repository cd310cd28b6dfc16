"""The built wheel, installed elsewhere: every module the tree has, every data file, the recipes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "headtrain": "headtrain", "data_gen": "headtrain.data_gen", "eval": "headtrain.eval", "recipes": "headtrain.recipes"
}  # fmt: skip
DATA = (".yaml", ".jsonl", ".json", ".css", ".html")


def modules_of_the_tree() -> list[str]:
    found = []
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.append(".".join([package, *parts]).removesuffix(".__init__"))
    return sorted(name for name in found if not name.endswith(".__main__"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the wheel was installed into. Built from a copy, so that the tree stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    (work / "source").mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        place, to = ROOT / name, work / "source" / name
        shutil.copytree(place, to) if place.is_dir() else shutil.copy(place, to)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(work), str(work / "source")]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = work.glob("headtrain-*.whl")
    install = [*pip, "install", "--no-deps", "--target", str(work / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return work / "site"


def run_there(installed: Path, code: str, cwd: Path) -> str:
    """The output of code run in another folder with only the wheel's headtrain importable."""
    guard = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]; "
        f"sys.path.insert(0, {str(installed)!r}); import headtrain; "
        f"assert headtrain.__file__.startswith({str(installed)!r}), headtrain.__file__\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", guard + code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_tree_can_be_imported(installed, tmp_path):
    wanted = modules_of_the_tree()
    assert {"headtrain.data_gen.prompts", "headtrain.eval.decoder.decode", "headtrain.training.trainer"} < set(wanted)
    code = f"import importlib\nfor name in {wanted!r}: importlib.import_module(name)\nprint('all')"
    assert run_there(installed, code, tmp_path).endswith("all\n")


def test_every_data_file_of_the_tree_is_there(installed):
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in DATA:
                assert (installed / package.replace(".", "/") / path.relative_to(ROOT / folder)).is_file(), path


def test_recipes_are_listed_and_shown(installed, tmp_path):
    code = "from headtrain.cli import main; main(['recipes']); main(['recipes', 'show', 'eagle3_llama70b'])"
    said = run_there(installed, code, tmp_path)
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"{path.stem} " in said
    assert "hidden: 8192" in said


def test_help_explains_the_keys_from_the_installed_source(installed, tmp_path):
    code = "from headtrain.cli import main; main(['fit', '--help'])"
    assert "peak learning rate" in run_there(installed, code, tmp_path)
