"""Notebooks and package say the same, and notebooks are kept clean."""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from spt_nbdev.summary import readme_table, with_table

BIN = Path(sys.executable).parent


def run(command: str, folder: Path) -> None:
    # With IN_TEST set, nbdev exports nothing and reports success.
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    subprocess.run([str(BIN / command)], cwd=folder, env=env, check=True, capture_output=True)


@pytest.fixture
def sources(root: Path, tmp_path: Path) -> Path:
    """A copy of the notebooks and nbdev's settings, without the package."""
    shutil.copy(root / "settings.ini", tmp_path)
    shutil.copytree(root / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".*"))
    return tmp_path


def differences(exported: Path, package: Path) -> list[str]:
    """Modules that are in one package only, or differ."""
    mine, theirs = ({p.name for p in folder.glob("*.py")} for folder in (exported, package))
    _, differ, errors = filecmp.cmpfiles(exported, package, mine & theirs, shallow=False)
    return sorted({*(mine ^ theirs), *differ, *errors})


def test_export_gives_the_package(root: Path, sources: Path) -> None:
    run("nbdev_export", sources)
    assert differences(sources / "spt_nbdev", root / "spt_nbdev") == [], "run `make sync`"


def test_an_edit_or_a_stray_module_is_noticed(root: Path, sources: Path, tmp_path: Path) -> None:
    run("nbdev_export", sources)
    package = shutil.copytree(root / "spt_nbdev", tmp_path / "edited", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "data.py").write_text((package / "data.py").read_text() + "\n")
    (package / "old.py").touch()
    assert differences(sources / "spt_nbdev", package) == ["data.py", "old.py"]


def test_cleaning_changes_nothing(root: Path, sources: Path) -> None:
    run("nbdev_clean", sources)
    for path in (root / "nbs").glob("*.ipynb"):
        assert (sources / "nbs" / path.name).read_bytes() == path.read_bytes(), f"run `make sync`: {path.name}"


def test_each_notebook_has_title_and_parameters_and_no_output(root: Path) -> None:
    for path in (root / "nbs").glob("*.ipynb"):
        nb = nbformat.read(path, as_version=4)
        first, second = nb.cells[:2]
        assert first.cell_type == "markdown" and first.source.startswith("# ") and "\n\n> " in first.source, path.name
        assert second.metadata.get("tags") == ["parameters"], path.name
        assert not any(c.get("outputs") or c.get("execution_count") for c in nb.cells), path.name


def test_there_is_one_configuration(root: Path) -> None:
    for stray in (
        "nbs/_quarto.yml",
        "nbs/nbdev.yml",
        "nbs/sidebar.yml",
        "setup.py",
        "_proc",
        "_docs",
    ):
        assert not (root / stray).exists(), stray


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_code_is_formatted_and_lints(root: Path, command: list[str]) -> None:
    done = subprocess.run(
        [str(BIN / "ruff"), *command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make sync`:\n{done.stdout}"


def test_the_readme_has_the_results_of_the_published_runs(root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert with_table(readme, readme_table(root)) == readme, "run `make sync`"
