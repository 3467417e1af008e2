"""`spt reproduce` as a user meets it: a wrong parameter, a kernel that dies, data that is bad."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest

SPT = str(Path(sys.executable).parent / "spt")


def spt(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [SPT, *args],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def notebook(path: Path, *cells: str, parameters: str = 'profile: str = "smoke"') -> None:
    code = [
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, cells),
    ]
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T\n\n> t"), *code]),
        path,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "settings.ini").touch()
    (tmp_path / "nbs").mkdir()
    return tmp_path


def executed(project: Path) -> set[str]:
    return {p.relative_to(project / "build").as_posix() for p in (project / "build").rglob("*.ipynb")}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-p", "n_sedes", "3"], "did you mean 'n_seeds'?"),
        (
            ["-p", "n_seeds", "three"],
            "n_seeds = 'three' is not allowed: input should be a valid integer",
        ),
        (
            ["-p", "n_seeds", "0"],
            "n_seeds = '0' is not allowed: input should be greater than 0",
        ),
        (
            ["-p", "dataset", "GunPiont"],
            "input should be 'GunPoint', 'GunPointAgeSpan', 'ECG200' or 'ECGFiveDays'",
        ),
        (
            ["--profile", "huge"],
            "there is no profile 'huge'; choose one of smoke, laptop, paper",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_runs(root: Path, project: Path, args: list[str], says: str) -> None:
    for name in ("00_page", "18_ucr"):
        shutil.copy(root / f"nbs/{name}.ipynb", project / "nbs")
    done = spt(project, "reproduce", *args)
    assert done.returncode == 2 and says in done.stderr
    assert not (project / "build").exists()


def test_the_others_run_when_a_kernel_is_killed(project: Path) -> None:
    notebook(
        project / "nbs/01_killed.ipynb",
        "import os, sys\nprint('last words', file=sys.__stderr__)\nos.kill(os.getpid(), 9)",
        "never = 1",
    )
    notebook(project / "nbs/02_exits.ipynb", "import os\nos._exit(0)")
    notebook(project / "nbs/03_raises.ipynb", "1 / 0")
    notebook(project / "nbs/04_fine.ipynb", "assert profile == 'laptop'")
    done = spt(project, "reproduce", "--profile", "laptop")
    assert done.returncode == 1
    assert "cell 3 (`import os, sys`): the kernel was killed by SIGKILL (often: out of memory)" in done.stdout
    assert "cell 3 (`import os`): the kernel exited with status 0" in done.stdout
    assert "cell 3 (`1 / 0`): ZeroDivisionError: division by zero" in done.stdout
    assert "3 of 4 notebooks failed" in done.stdout
    assert executed(project) == {
        "failed/laptop/01_killed.ipynb",
        "failed/laptop/02_exits.ipynb",
        "failed/laptop/03_raises.ipynb",
        "executed/laptop/04_fine.ipynb",
    }


def test_a_page_that_fails_now_is_no_longer_shown(project: Path) -> None:
    notebook(project / "nbs/01_a.ipynb", "x = 1")
    assert spt(project, "reproduce").returncode == 0
    notebook(project / "nbs/01_a.ipynb", "x = y")
    assert spt(project, "reproduce").returncode == 1
    assert executed(project) == {"failed/smoke/01_a.ipynb"}
    done = spt(project, "site")
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_parameters_reach_the_notebook_with_their_types(project: Path) -> None:
    notebook(
        project / "nbs/01_a.ipynb",
        "assert (n, lr, on, name) == (3, 1e-4, True, '001'), (n, lr, on, name)",
        parameters='n: int = 0\nlr: float = 0.1\non: bool = False\nname: str = ""',
    )
    done = spt(
        project,
        "reproduce",
        "-p",
        "n",
        "3",
        "-p",
        "lr",
        "1e-4",
        "-p",
        "on",
        "true",
        "-p",
        "name",
        "001",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def ucr_page(root: Path, project: Path) -> Path:
    """A project with the UCR page."""
    shutil.copy(root / "nbs/18_ucr.ipynb", project / "nbs")
    return project


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """GunPoint as the archive's own files, from the copy that aeon carries."""
    from spt_nbdev.series import ucr_from_aeon

    folder = tmp_path / "data"
    folder.mkdir()
    for split, (labels, values) in zip(("TRAIN", "TEST"), ucr_from_aeon("GunPoint"), strict=True):
        rows = ["\t".join([str(label), *map(repr, map(float, row))]) for label, row in zip(labels, np.asarray(values), strict=True)]
        (folder / f"GunPoint_{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def change_line(path: Path, line: int, change: object) -> None:
    lines = path.read_text().splitlines()
    lines[line] = change(lines[line])
    path.write_text("\n".join(lines) + "\n")


def remove(folder: Path) -> None:
    (folder / "GunPoint_TEST.tsv").unlink()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


BAD_DATA = [
    (remove, "there is no file"),
    (empty, "no GunPoint_TRAIN.tsv in"),
    (
        lambda f: (f / "GunPoint_TRAIN.tsv").write_bytes((f / "GunPoint_TRAIN.tsv").read_bytes()[:-2000]),
        "the file is cut off or damaged",
    ),
    (
        lambda f: change_line(f / "GunPoint_TRAIN.tsv", 2, lambda s: "1\t" + "\t".join(["NaN"] * 150)),
        "series 3 holds nan at step 1",
    ),
    (
        lambda f: change_line(f / "GunPoint_TEST.tsv", 4, lambda s: "7" + s[1:]),
        "label 7 does not occur among the training labels [1, 2]",
    ),
    (
        lambda f: change_line(f / "GunPoint_TRAIN.tsv", 0, lambda s: s.replace("\t", "\t?", 1)),
        "line 1: could not convert string to float",
    ),
]


def test_data_from_a_named_folder_is_the_same_task(files: Path) -> None:
    import torch

    from spt_nbdev.series import load_ucr

    a, b = load_ucr("GunPoint"), load_ucr("GunPoint", files)
    assert torch.equal(a.train.x, b.train.x) and torch.equal(a.test.x, b.test.x) and torch.equal(a.test.y, b.test.y)


@pytest.mark.parametrize(("spoil", "says"), BAD_DATA, ids=[s for _, s in BAD_DATA])
def test_bad_data_is_refused(files: Path, spoil: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spt_nbdev.series import load_ucr
    from spt_nbdev.sources import DataError

    spoil(files)
    monkeypatch.setenv("SPT_DATA", str(files))
    with pytest.raises(DataError) as error:
        load_ucr("GunPoint")
    assert says in str(error.value)


def test_bad_data_leaves_no_page_and_no_record(ucr_page: Path, files: Path) -> None:
    empty(files)
    done = spt(ucr_page, "reproduce", "18", SPT_DATA=str(files))
    assert done.returncode == 1 and "DataError: no GunPoint_TRAIN.tsv in" in done.stdout
    assert executed(ucr_page) == {"failed/smoke/18_ucr.ipynb"} and not list(ucr_page.glob("runs/*/record.json"))


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import aeon.datasets

    from spt_nbdev.series import ucr_from_aeon
    from spt_nbdev.sources import DataError

    def break_off(name: str, split: str, extract_path: str) -> None:
        folder = Path(extract_path, name)
        folder.mkdir()
        (folder / f"{name}_TRAIN.ts").write_text("half a fi")
        raise OSError("connection lost")

    monkeypatch.setattr(aeon.datasets, "load_classification", break_off)
    with pytest.raises(DataError, match="could not fetch ECG200 .*connection lost.*SPT_DATA"):
        ucr_from_aeon("ECG200", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["ECG200.lock"]


def test_a_download_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import spt_nbdev.series as data

    published, calls = data.read_aeon("GunPoint", None), []

    def fetch(name: str, folder: Path) -> list[data.Rows]:
        calls.append(folder)
        Path(folder, name).mkdir(exist_ok=True)
        return published

    monkeypatch.setattr(data, "read_aeon", fetch)
    monkeypatch.setitem(data.UCR, "ECG200", data.UCR["GunPoint"])
    for _ in range(2):
        assert data.ucr_from_aeon("ECG200", tmp_path) is published
    assert calls[0] != tmp_path and calls[1] == tmp_path and {p.name for p in tmp_path.iterdir()} == {"ECG200", "ECG200.lock"}


def test_a_damaged_cache_says_what_to_delete(tmp_path: Path) -> None:
    from spt_nbdev.series import ucr_from_aeon
    from spt_nbdev.sources import DataError

    (tmp_path / "ECG200").mkdir()
    for split in ("TRAIN", "TEST"):
        (tmp_path / f"ECG200/ECG200_{split}.ts").write_text("junk")
    with pytest.raises(DataError, match=f"the cached copy of ECG200 is damaged .*delete {tmp_path}/ECG200"):
        ucr_from_aeon("ECG200", tmp_path)


def test_two_runs_at_once_do_not_disturb_each_other(project: Path) -> None:
    for i in range(2):
        notebook(project / f"nbs/0{i}_a.ipynb", "import time\ntime.sleep(1)")
    runs = [subprocess.Popen([SPT, "reproduce", "--profile", p], cwd=project, stdout=subprocess.PIPE, text=True) for p in ("smoke", "laptop")]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert {p.name for p in (project / "nbs").iterdir()} == {"00_a.ipynb", "01_a.ipynb"}


def test_a_site_that_fails_leaves_the_old_one(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import spt_nbdev.site as site

    built = tmp_path / "build/site/smoke/_site"
    built.mkdir(parents=True)
    (built / "index.html").write_text("old")
    (tmp_path / "settings.ini").touch()
    (tmp_path / "_quarto.yml").write_text("website: {title: T}\n")
    (tmp_path / "references.bib").touch()
    monkeypatch.setattr(site.shutil, "which", lambda name: None)

    def fail(draft: Path) -> None:
        raise site.SiteError("no")

    monkeypatch.setattr(site, "render_with_smalldocs", fail)
    (tmp_path / "nbs").mkdir()
    with pytest.raises(site.SiteError):
        site.build_site(tmp_path, "smoke")
    assert (built / "index.html").read_text() == "old" and [p.name for p in (tmp_path / "build/site").iterdir()] == ["smoke"]


def papermill(folder: Path, *parameters: str) -> subprocess.CompletedProcess:
    """Plain papermill on the UCR page, as the README has it."""
    command = [str(Path(sys.executable).parent / "papermill"), "nbs/18_ucr.ipynb", "out.ipynb", "--cwd", "nbs", *parameters]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_page_runs_under_plain_papermill_and_keeps_its_records(ucr_page: Path) -> None:
    done = papermill(ucr_page, "-p", "profile", "smoke", "-p", "n_seeds", "1")
    assert done.returncode == 0, done.stderr
    labels = sorted(json.loads(p.read_text())["label"] for p in ucr_page.glob("runs/*/record.json"))
    assert labels == [
        "finetune GunPoint 2L lr 0.001 seed 0",
        "pretrain GunPoint 2L lr 0.001 seed 0",
        "scratch GunPoint 2L lr 0.001 seed 0",
        "scratch GunPoint 2L lr 0.003 seed 0",
    ]


def test_a_page_run_by_hand_refuses_an_unknown_profile(ucr_page: Path) -> None:
    done = papermill(ucr_page, "-p", "profile", "huge")
    assert done.returncode == 1 and "profile = 'huge' is not allowed: input should be 'smoke', 'laptop' or 'paper'" in done.stderr
    assert not (ucr_page / "runs").exists()
