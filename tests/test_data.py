"""What spans the data notebooks: killed and crowded processes, bad folders, the command line, the original's images."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
import torch
from torch import nn

from spt_nbdev.cli import main
from spt_nbdev.data import Split, Task
from spt_nbdev.listops import ListOpsTask
from spt_nbdev.model import ModelConfig
from spt_nbdev.params import ParameterError
from spt_nbdev.pathfinder import PathFinderTask, draw_margin, image_part, part_sizes, pathfinder_images
from spt_nbdev.records import Store
from spt_nbdev.snakes import Field, rules_for
from spt_nbdev.sources import DataError, Draws, cached, fetch, sha256_of
from spt_nbdev.spt import Classification, Reconstruction, transfer
from spt_nbdev.sweep import sweep
from spt_nbdev.tasks import OFFLINE, TASKS, named_task
from spt_nbdev.train import Budget, Init, Optimiser, RunSpec, Training

SMALL = PathFinderTask(16, n_train=20, n_val=4, n_test=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no data folder, and no way out."""
    monkeypatch.setenv("SPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPT_DATA", raising=False)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path / "cache"


def in_python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    """Wait for two minutes at most: another test may hold the cores."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def server() -> Iterator[str]:
    """Says that a file has 1,000 bytes, sends 400 and hangs up."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 400)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_port}/set.tar.gz"
        s.shutdown()


def test_an_interrupted_download_leaves_nothing(server: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy")
    with pytest.raises(
        DataError, match=r"set.tar.gz could not be downloaded.*Try again with a connection, or put the file into a folder and name it in SPT_DATA"
    ):
        fetch((server,), "0" * 32)
    assert not list(own_cache.iterdir())


@pytest.mark.parametrize("when", ["making", "writing"])
def test_a_killed_generation_leaves_nothing_that_is_used(own_cache: Path, when: str) -> None:
    whole = {k: v.clone() for k, v in {"x": SMALL.load().train.x}.items()}
    for file in own_cache.iterdir():
        file.unlink()
    dying = {
        "making": "pathfinder.pathfinder_images = lambda *a: os.kill(os.getpid(), 9)",
        "writing": "safetensors.torch.save_file = lambda arrays, path, *a: (open(path, 'wb').write(b'half'), os.kill(os.getpid(), 9))",
    }[when]
    process = in_python(f"import os, safetensors.torch\nfrom spt_nbdev import pathfinder\n{dying}\npathfinder.PathFinderTask(16, 20, 4, 4).load()")
    assert process.wait() == -9, process.stderr.read()
    assert not list(own_cache.glob("*.safetensors")) and len(list(own_cache.glob("*.draft"))) == (when == "writing")
    assert torch.equal(SMALL.load().train.x, whole["x"])
    assert not list(own_cache.glob("*.draft"))


def test_two_processes_make_a_set_once(tmp_path: Path) -> None:
    code = f"""
import time, torch
from pathlib import Path
from spt_nbdev.sources import cached
def make():
    with open({str(tmp_path / "made")!r}, "a") as f:
        f.write("made ")
    time.sleep(1)
    return {{"x": torch.arange(5)}}
print(cached("set", "0", make)["x"].tolist())
"""
    both = [in_python(code) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["[0, 1, 2, 3, 4]"] * 2
    assert (tmp_path / "made").read_text() == "made "


def test_a_script_without_a_main_guard_can_make_a_set(tmp_path: Path) -> None:
    """Its processes must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text("from spt_nbdev.listops import ListOpsTask\nprint(ListOpsTask(2500, 10, 10, 10, 60).load().shape.n_train)")
    done = subprocess.run([sys.executable, script], env=os.environ | {"SPT_WORKERS": "2"}, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("2500\n", "")


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_the_processes_of_a_killed_generation_end(tmp_path: Path) -> None:
    script = "from spt_nbdev import pathfinder; pathfinder.pathfinder_images(32, 50_000, 0)"
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"SPT_WORKERS": "2"})

    until(lambda: len(psutil.Process(parent.pid).children()) == 2)
    children = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(child) for child in children))


def test_an_interrupt_of_the_parent_alone_ends_at_once(tmp_path: Path) -> None:
    """The images would take minutes."""
    script = "from spt_nbdev import pathfinder; print(1, flush=True); pathfinder.PathFinderTask(32, 300_000, 10, 10).load()"
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"SPT_WORKERS": "2"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    parent.stdout.readline()
    time.sleep(4)
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=120)[1] and parent.returncode


def test_a_cache_that_has_all_need_not_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SMALL.load().train.x
    monkeypatch.setattr("spt_nbdev.sources.cache_folder", lambda: pytest.fail("written to"))
    assert torch.equal(SMALL.load().train.x, before)


def test_an_error_of_a_part_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_WORKERS", "2")
    with pytest.raises(DataError, match=r"^too few expressions have a length between 10 and 13 with a depth of at most 1; widen the bounds$"):
        ListOpsTask(2500, 10, 10, 10, 13, 1).load()
    monkeypatch.setenv("SPT_WORKERS", "many")
    with pytest.raises(ParameterError, match="SPT_WORKERS = 'many' is not allowed"):
        ListOpsTask(2500, 10, 10, 10, 60).load()


TRAINABLE = ("listops", "characters", "characterpairs", "digits", "pathfinder", "gunpoint")


@pytest.mark.parametrize("name", TRAINABLE)
def test_both_objectives_overfit_eight_sequences_of_every_kind_of_task(name: str) -> None:
    """Labels are learned by heart, hidden steps better and better; scores are finite, and the pretrained encoder fits the classifier."""
    task = named_task(name, "smoke").load()
    config = ModelConfig(d_model=32, n_layers=1, n_heads=2, d_ff=64, head="pair" if task.shape.n_documents == 2 else "mlp")
    few = replace(task, train=task.train.rows(slice(8)), test=task.test.rows(slice(8)), val=None)
    models = {}
    for objective in (Reconstruction(0.3), Classification()):
        torch.manual_seed(0)
        training = Training(objective.build(config, few.shape), objective, few, Budget(1, batch_size=8), Optimiser(5e-3, warmup_steps=10), 0)
        losses = []
        for _ in range(300):
            training.permutation, training.position = torch.arange(8), 0
            losses.append(training.update().item())
        scores = training.evaluate()
        assert all(np.isfinite(v) for v in scores.values())
        if isinstance(objective, Classification):
            assert scores["train_acc"] == 1
        else:
            assert sum(losses[-10:]) / 10 < 0.75 * losses[0]
        models[type(objective)] = training.model
    transfer(models[Reconstruction].state_dict(), models[Classification], flag=not task.shape.vocabulary)
    for k, v in models[Classification].encoder.named_parameters():
        old = models[Reconstruction].encoder.get_parameter(k)
        assert torch.equal(v, old[:, : v.shape[1]] if k == "embed.weight" else old)


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_kind_of_task_goes_from_pretraining_to_labels_through_the_store(name: str, tmp_path: Path) -> None:
    task = named_task(name, "smoke")
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, head="pair" if task.shape().n_documents == 2 else "linear")
    pretraining = RunSpec(task, config, Reconstruction(0.3), Budget(1, batch_size=32), Optimiser(1e-3, warmup_steps=5))
    finetuning = replace(pretraining, objective=Classification(), init=Init(pretraining))
    first, second = sweep([pretraining, finetuning], store=Store(tmp_path))
    splits = {n for n in ("train", "val", "test") if n != "val" or task.shape().n_val}
    symbols = bool(task.shape().vocabulary or task.shape().levels)
    assert {c for c in first.curves if c.endswith("acc")} == ({f"{s}_acc" for s in splits - {"train"}} if symbols else set())
    assert {c for c in second.curves if c.endswith("acc")} == {f"{s}_acc" for s in splits}
    assert first.facts["outcome"] in ("learned", "no better than a constant") and second.facts["outcome"] in ("learned", "stuck at chance")
    assert first.facts["sequences"] == second.facts["sequences"] == task.shape().n_train


def test_padding_does_not_count_in_the_class(own_cache: Path) -> None:
    task = named_task("listops", "smoke").load()
    model = Classification().build(ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32), task.shape)
    batch = task.train.rows(slice(6))
    steps = model.encoder(task.form.inputs(batch.x[:, : batch.lengths.max()]))
    by_hand = torch.stack([model.head(s[:n].mean(0)) for s, n in zip(steps, batch.lengths.tolist(), strict=True)])
    torch.testing.assert_close(Classification().logits(model, task.form, batch), by_hand)


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"the cache folder .*/file/cache can't be written to .*; name another in SPT_CACHE"):
        SMALL.load()


def test_a_full_disk_is_said_and_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", no_room)
    with pytest.raises(DataError, match=r"can't be written .*No space left on device.*; make room, or name another folder in SPT_CACHE"):
        SMALL.load()
    assert [p.suffix for p in own_cache.iterdir()] == [".lock"]


def test_a_data_folder_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("SPT_DATA", str(folder))
    for name in (*OFFLINE, "image", "text", "retrieval", "ecg200"):
        if name not in ("pathx", "pathx256", "gunpoint"):
            try:
                named_task(name, "smoke").load()
            except DataError as e:
                assert name not in OFFLINE and str(folder) in str(e)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["image", "scifar", "text", "reviewpairs", "retrieval", "ecg200"])
@pytest.mark.parametrize("folder", [True, False])
def test_what_cannot_be_had_is_an_error_with_a_remedy(
    name: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With a folder of the wrong files, and without a folder and without a network."""
    (tmp_path / "other.csv").write_text("1,2")
    if folder:
        monkeypatch.setenv("SPT_DATA", str(tmp_path))
    assert main(["data", name]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and captured.err.startswith("spt: ") and "Traceback" not in captured.err
    assert "SPT_DATA" in captured.err and (not folder or str(tmp_path) in captured.err)


def test_a_data_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("SPT_DATA", "/nowhere/at/all")
    assert main(["data", "image"]) == 1
    assert "the data folder /nowhere/at/all, named in SPT_DATA, is not a folder" in capsys.readouterr().err


def test_the_command_shows_a_task(capsys: pytest.CaptureFixture) -> None:
    assert main(["data", "gunpoint"]) == 0
    out = capsys.readouterr().out
    assert "GunPoint: 2 classes, up to 150 steps" in out and "train: 50 (gun: 24, point: 26)" in out and "test: 150 (gun: 76, point: 74)" in out
    assert main(["data", "characters"]) == 0
    assert "lengths" in capsys.readouterr().out
    assert main(["data"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TASKS)
    assert main(["data", "imdb"]) == 2
    assert "there is no task 'imdb'; choose one of listops" in capsys.readouterr().err


def test_sizes_are_known_without_the_data() -> None:
    """Of every task at every profile; and those that need no data keep the promise."""
    for specs in TASKS.values():
        assert all(spec.shape().n_train > 0 and spec.label() and spec.fingerprint() for spec in specs.values())
    for name in set(OFFLINE) - {"pathx", "pathx256"}:
        spec = named_task(name, "smoke")
        assert spec.load().shape == spec.shape()


def test_the_parts_of_a_set_do_not_depend_on_who_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spt_nbdev.pathfinder.part_sizes", lambda size, n: [8, 8, 4])
    monkeypatch.setenv("SPT_WORKERS", "3")
    shared = pathfinder_images(16, 20, 3)
    monkeypatch.setenv("SPT_WORKERS", "1")
    assert sha256_of(shared) == sha256_of(pathfinder_images(16, 20, 3))
    assert np.array_equal(shared["images"][8:16].numpy(), image_part(16, 8, 3, 1)[0])
    assert sum(part_sizes(32, 200_000)) == 200_000


def test_a_bad_label_or_value_never_becomes_a_task() -> None:
    y = torch.tensor([0, 1])
    good = Split(torch.zeros(2, 3, 1), y)
    with pytest.raises(DataError, match="bad, test split: expected int64 labels from 0 to 1, found torch.int64 from 0 to 2"):
        Task("bad", good, Split(good.x, 2 * y), 2)
    with pytest.raises(DataError, match="bad, train split: a value is not finite"):
        Task("bad", Split(good.x / 0, y), good, 2)


REFERENCE = Path(os.environ.get("SPT_DATA", "/nowhere"), "pathfinder", "pathfinder32_cl14_reference.npz")


def told_apart(a: np.ndarray, b: np.ndarray) -> float:
    """How often a small convolutional network tells held-out images of two kinds apart; half is chance."""
    torch.manual_seed(0)
    n = min(len(a), len(b))
    x = torch.from_numpy(np.stack([a[:n], b[:n]], 1).reshape(-1, 1, 32, 32)).float() / 127.5 - 1
    y = torch.arange(2 * n) % 2
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 2),
    )
    optimiser, cut = torch.optim.AdamW(model.parameters(), lr=2e-3), int(1.5 * n)
    for _ in range(6):
        for batch in torch.randperm(cut).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        return (model(x[cut:]).argmax(1) == y[cut:]).float().mean().item()


needs_original = pytest.mark.skipif(not REFERENCE.exists(), reason="needs the sample of the original generator, in SPT_DATA")


@needs_original
def test_the_numbers_of_the_original_are_those_of_its_images(root: Path) -> None:
    cells = [c.source for c in nbformat.read(root / "nbs/01_pathfinder.ipynb", 4).cells]
    scope: dict[str, object] = {"np": np}
    exec(next(c for c in cells if c.startswith("ORIGINAL =")) + "\n" + next(c for c in cells if c.startswith("def statistics")).partition("\n\n\n")[0], scope)
    for name, values in scope["statistics"](np.load(REFERENCE)["images"]).items():
        assert scope["ORIGINAL"][name] == pytest.approx((values.mean(), values.std() / len(values) ** 0.5), rel=0.05, abs=1e-4)


@needs_original
def test_a_network_cannot_tell_our_images_from_the_originals() -> None:
    original = np.load(REFERENCE)["images"]
    ours = np.concatenate([image_part(32, 1000, 42, part)[0].reshape(-1, 32, 32) for part in range(2)])
    assert abs(told_apart(original, ours) - 0.5) < 3 * 0.5 / 1000**0.5
    field = Field(rules_for(32), 1)
    field.usable = np.ones_like(field.usable)  # a planted fault: contours may start in any direction
    assert told_apart(original, draw_margin(field, Draws(5), np.tile([0, 1], 1000)).images) > 0.7


def test_the_cache_remakes_what_is_damaged(own_cache: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"x": torch.arange(100)}

    damage: list[Callable[[bytes], bytes]] = [lambda b: b[:-1], lambda b: b[:-3] + b"\xff\xff\xff", lambda b: b"", lambda b: b"\x00" * len(b)]
    for spoil in damage:
        cached("set", "0", make)
        file = next(own_cache.glob("*.safetensors"))
        file.write_bytes(spoil(file.read_bytes()))
        assert torch.equal(cached("set", "0", make)["x"], torch.arange(100))
    assert len(made) == 1 + len(damage)
