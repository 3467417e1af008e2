"""The commands that save work: what is skipped, what is run again, and what they say about it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from spt_nbdev.records import Store
from spt_nbdev.watch import running

TESTS = Path(__file__).parent
TRAINS = "from tiny import finetuning, scratch\n\nfrom spt_nbdev.sweep import sweep\n\nrecords = sweep([scratch(), finetuning()])\nprint(*(len(r.curves) for r in records))"
SHOWS = "from spt_nbdev.page import badge\n\nbadge(profile)"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "settings.ini").touch()
    (tmp_path / "nbs").mkdir()
    write(tmp_path / "nbs/01_shows.ipynb", SHOWS)
    write(tmp_path / "nbs/10_trains.ipynb", TRAINS)
    return tmp_path


def write(path: Path, *cells: str, text: str = "# T\n\n> t") -> None:
    parameters = nbformat.v4.new_code_cell('profile: str = "smoke"\nn: int = 1', metadata={"tags": ["parameters"]})
    code = [parameters, *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), *code]), path)


def spt(project: Path, *args: str, status: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": str(TESTS), "SPT_WORKERS": "1", "COLUMNS": "80"}
    done = subprocess.run([Path(sys.executable).parent / "spt", *args], cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def keys(project: Path) -> set[str]:
    return {p.parent.name for p in project.glob("runs/*/record.json")}


def test_only_what_changed_is_run_and_only_what_is_new_is_trained(project: Path) -> None:
    out = spt(project, "reproduce")
    assert "3 runs trained" in out and len(keys(project)) == 3
    assert spt(project, "reproduce") == "2 of 2 notebooks are up to date and were not run again\n"
    # Prose: the page is made again, nothing is trained.
    write(project / "nbs/10_trains.ipynb", TRAINS, text="# T\n\n> another summary")
    assert spt(project, "why", "10") == "10_trains: its text changed\n"
    out = spt(project, "reproduce")
    assert re.match(r"10_trains +ok .*executed/smoke/10_trains.ipynb\n1 of 2 notebooks", out)
    assert "another summary" in (project / "build/executed/smoke/10_trains.ipynb").read_text()
    # A parameter of the page, at another scale: no page there yet; the runs are the same.
    assert "trained" not in spt(project, "reproduce", "--profile", "laptop")
    # A record that is gone, or damaged: the page that rests on it is made again, with the run.
    shutil.rmtree(next(p.parent for p in project.glob("runs/*/record.json") if json.loads(p.read_text())["label"].startswith("finetune")))
    assert spt(project, "why", "10_trains").startswith("10_trains: 1 of the ")
    assert "1 run trained" in spt(project, "reproduce") and len(keys(project)) == 3
    # Nothing of this enters a page.
    page = nbformat.read(project / "build/executed/smoke/10_trains.ipynb", as_version=4)
    assert [o["text"] for c in page.cells if c.cell_type == "code" for o in c.outputs] == ["2 2\n"]
    assert "trained" not in spt(project, "reproduce", "--force", "10")


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_nobody_at_work(project: Path, how: int, jobs: int) -> None:
    (project / "nbs/01_shows.ipynb").unlink()
    write(
        project / "nbs/10_trains.ipynb", "from tiny import scratch\n\nfrom spt_nbdev.sweep import sweep\n\nsweep([scratch(100_000, seed=s) for s in range(2)])"
    )
    env = {**os.environ, "PYTHONPATH": str(TESTS), "SPT_WORKERS": str(2 * jobs), "SPT_CHECKPOINT_EVERY": "0.2"}
    words = [Path(sys.executable).parent / "spt", "reproduce", "--jobs", str(jobs)]
    command = subprocess.Popen(words, cwd=project, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = Store(project / "runs")
    while len(list(store.root.glob(".work/*/checkpoint"))) < 2:
        assert command.poll() is None
        time.sleep(0.1)
    command.send_signal(how)
    assert command.wait() == (130 if how == signal.SIGINT else -how)
    for _ in range(100):
        if not running(store):
            break
        time.sleep(0.1)
    assert running(store) == [] and len(list(store.root.glob(".work/*/checkpoint"))) == 2
    assert how == signal.SIGKILL or not list(project.glob("build/drafts/*"))


def test_a_page_of_what_is_stored_trains_nothing_and_is_made_again_by_a_command_that_trains(project: Path) -> None:
    shown = TRAINS.replace("import sweep", "import run_or_find").replace("sweep([scratch(), finetuning()])", "run_or_find([scratch(), finetuning()]).values()")
    write(project / "nbs/10_trains.ipynb", shown.replace("len(r.curves)", "r and len(r.curves)"))
    page = project / "build/executed/smoke/10_trains.ipynb"

    def said() -> list[str]:
        return [o["text"] for c in nbformat.read(page, as_version=4).cells if c.cell_type == "code" for o in c.outputs]

    spt(project, "reproduce", "--stored")
    assert said() == ["None None\n"] and keys(project) == set()
    assert "2 of 2 notebooks are up to date" in spt(project, "reproduce", "--stored")
    assert spt(project, "why", "10_trains") == "10_trains: it was made without training, and not all of its runs were stored\n"
    assert "3 runs trained" in spt(project, "reproduce") and said() == ["2 2\n"]
    assert "2 of 2 notebooks are up to date" in spt(project, "reproduce", "--stored")
    # A page that can't do without all of its runs says how to get them.
    write(project / "nbs/10_trains.ipynb", TRAINS.replace("scratch()", "scratch(seed=9)"))
    out = spt(project, "reproduce", "--stored", status=1)
    assert "1 runs aren't stored" in out and "without --stored" in out


@pytest.mark.parametrize(("page", "n"), [("15_one_layer", 57), ("17_displacement", 2)])
def test_a_page_of_which_nothing_is_stored_says_so_and_what_it_costs(project: Path, root: Path, page: str, n: int) -> None:
    shutil.copy(root / f"nbs/{page}.ipynb", project / "nbs")
    spt(project, "reproduce", page, "--profile", "paper", "--stored")
    nb = nbformat.read(project / f"build/executed/paper/{page}.ipynb", as_version=4)
    texts = [o["data"]["text/markdown"] for c in nb.cells if c.cell_type == "code" for o in c.outputs if "text/markdown" in o.get("data", {})]
    (cost,) = [t for t in texts if "**Not run yet:**" in t]
    assert f"{n} of the {n} runs" in cost and "PFLOP" in cost and f"spt reproduce {page} --profile paper" in cost
    assert keys(project) == set()


def test_runs_are_counted_for_the_page_that_made_them(project: Path) -> None:
    write(project / "nbs/01_shows.ipynb", TRAINS.replace("sweep([scratch(), finetuning()])", "sweep([scratch(seed=5)])"))
    looks = "import time\n\nfrom tiny import scratch\n\nfrom spt_nbdev.keys import key_of\nfrom spt_nbdev.records import Store\n\n"
    write(project / "nbs/02_looks.ipynb", looks + "for _ in range(100):\n    Store().find(key_of(scratch(seed=5)))\n    time.sleep(0.02)")
    lines = {line.split()[0]: line for line in spt(project, "reproduce", "--jobs", "3").splitlines()}
    assert "1 run trained" in lines["01_shows"] and "3 runs trained" in lines["10_trains"] and "trained" not in lines["02_looks"]


def test_a_page_that_failed_is_not_taken_for_up_to_date(project: Path) -> None:
    write(project / "nbs/01_shows.ipynb", "1 / 0")
    assert "1 of 2 notebooks failed" in spt(project, "reproduce", status=1)
    out = spt(project, "reproduce", status=1)
    assert "ZeroDivisionError" in out and "1 of 2 notebooks are up to date" in out


def test_a_sweep_that_fails_fails_the_page_and_names_the_runs(project: Path) -> None:
    write(
        project / "nbs/10_trains.ipynb",
        "from tiny import Copying, scratch\n\nfrom spt_nbdev.sweep import sweep\n\nsweep([scratch(), scratch(task=Copying(n=-1))])",
    )
    out = spt(project, "reproduce", status=1)
    assert "SweepError: 1 of 2 runs failed; what the others gave is stored" in out and "scratch copying 1L lr 0.01 seed 0" in out
    assert len(keys(project)) == 1


def test_damage_is_said_and_verify_fails(project: Path) -> None:
    spt(project, "reproduce")
    assert "3 records are sound, 0 problems" in spt(project, "verify")
    by_label = {json.loads(p.read_text())["label"].split()[0]: p.parent.name for p in project.glob("runs/*/record.json")}
    first, second = by_label["scratch"], by_label["finetune"]
    (project / "runs" / first / "curves.parquet").write_bytes(b"")
    assert f"damaged: {project}/runs/{first}: curves.parquet is not the file" in spt(project, "verify", status=1)
    record = json.loads((project / "runs" / second / "record.json").read_text())
    (project / "runs" / second / "record.json").write_text(json.dumps(record | {"steps": 1}))
    out = spt(project, "reproduce", "--force")
    assert f"damaged, set aside and not used: {second}" in out and "2 runs trained" in out
    assert "0 in progress, 0 stopped with a checkpoint, 3 stored, 0 published, 2 set aside as damaged" in spt(project, "status")


def test_why_names_the_run_and_refuses_what_it_does_not_know(project: Path) -> None:
    spt(project, "reproduce")
    key = sorted(keys(project))[0]
    assert re.fullmatch(rf"{key} \(.* waves 1L lr 0.01 seed 0, finished .*Z\) is up to date\n", spt(project, "why", key[:7]))
    assert "'zz' is neither a notebook nor the start of a key" in spt(project, "why", "zz", status=2)
    assert "did you mean 10_trains?" in spt(project, "why", "10_trians", status=2)


def test_plan_prices_a_page_and_publish_refuses_an_unfinished_one(root: Path, project: Path) -> None:
    shutil.copy(root / "nbs/18_ucr.ipynb", project / "nbs")
    line = next(line for line in spt(project, "plan").splitlines() if line.startswith("18_ucr"))
    assert re.fullmatch(r"18_ucr +8 runs, 0 stored, 8 to do: [\d.]+ TFLOP, about [\d minsh]+, 2 MB", line)
    assert "8 of 8 runs are not finished, the first: " in spt(project, "publish", "18_ucr", status=1)
    assert not (project / "results").exists()
