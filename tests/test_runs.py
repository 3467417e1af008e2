"""Runs that are killed, resumed, shared and damaged."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import dask
import deadly
import killed
import pytest
import tiny
import torch
from distributed import Client, Status

from spt_nbdev import code
from spt_nbdev.keys import key_of
from spt_nbdev.records import Record, RecordError, Store
from spt_nbdev.runs import publish, run_spec, verify
from spt_nbdev.spt import Reconstruction
from spt_nbdev.sweep import MEMORY, SweepError, local_client, sweep, to_do, without_workers
from spt_nbdev.train import Optimiser, Training
from spt_nbdev.watch import events

TESTS = Path(__file__).parent
ENV = {**os.environ, "SPT_WORKERS": "1", "PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module", autouse=True)
def importable_by_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("SPT_WORKERS", "1")
        yield


def bits(record: Record) -> tuple[str, str]:
    """What a run gave, to the bit."""
    return tuple(record.facts["files"][name] for name in ("curves.parquet", "weights.safetensors"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """The runs of `killed.py`, undisturbed."""
    store = Store(tmp_path_factory.mktemp("reference"))
    return {r.key: r for r in (run_spec(s, store) for s in killed.SPECS)}


def check_against(store: Store, reference: dict[str, Record], complete: bool = True) -> None:
    """Every record in the store is that of an undisturbed run, whole, and there once."""
    sound, problems = verify(store)
    assert problems == []
    found = {p.parent.name: store.find(p.parent.name, weights=True) for p in store.root.glob("*/record.json")}
    assert sound == len(found) and (not complete or found.keys() == reference.keys())
    for key, record in found.items():
        assert bits(record) == bits(reference[key])
        assert [record.facts[k] for k in ("steps", "sequences")] == [reference[key].facts[k] for k in ("steps", "sequences")]
        assert record.curves.epoch.is_unique


def start(store: Path, *args: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TESTS / "killed.py"), str(store), *args]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("point", "n"),
    [
        ("step", 1), ("step", 33), ("evaluation", 2), ("checkpoint half written", 1), ("checkpoint half written", 23), ("checkpoint not renamed", 24),
        ("checkpoint just renamed", 21), ("curves half written", 2), ("weights half written", 1), ("record half written", 3), ("record not renamed", 1),
        ("record just renamed", 2), ("between runs", 1),
    ],
)  # fmt: skip
def test_a_run_that_is_killed_anywhere_ends_the_same(tmp_path: Path, reference: dict[str, Record], point: str, n: int) -> None:
    first = start(tmp_path, point, str(n))
    assert first.returncode == -9, first.stderr
    store = Store(tmp_path)
    check_against(store, reference, complete=False)
    done = {p.parent.name: p.stat().st_mtime_ns for p in store.root.glob("*/record.json")}
    assert len(done) < 3
    second = start(tmp_path)
    assert second.returncode == 0, second.stderr
    check_against(store, reference)
    assert all((store.root / key / "record.json").stat().st_mtime_ns == t for key, t in done.items()), "what was finished is not trained again"
    log = events(store)
    starts = [e["key"] for e in log if e["event"] == "starts"]
    begun = len(starts) - len(set(starts))
    assert begun <= 1 and len([e for e in log if e["event"] == "resumes"]) <= 1, "only the run that was killed is taken up again"
    if "step" in point or "checkpoint" in point:
        assert begun == (n == 1), "it goes on from its checkpoint, unless there was none yet"
    assert not list(store.root.glob(".work/*"))


def small_disk(folder: Path, size: int) -> bool:
    """Mount a small disk, if this system lets us."""
    return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("free", [8, 28, 48, 68])  # KiB: for nothing, for a checkpoint, for two, and for some of a record
def test_a_full_disk_loses_nothing(tmp_path: Path, reference: dict[str, Record], free: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not small_disk(disk, 2000):
        pytest.skip("mounting a disk is not allowed here; the next test limits the size of files")
    try:
        (disk / "other").write_bytes(b"x" * 1024 * (2000 - free))
        first = start(disk / "runs")
        assert first.returncode == 1 and "No space left on device" in first.stderr, first.stderr
        (disk / "other").unlink()
        check_against(Store(disk / "runs"), reference, complete=False)
        assert start(disk / "runs").returncode == 0
        check_against(Store(disk / "runs"), reference)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("limit", [4_000, 13_000])
def test_a_quota_loses_nothing(tmp_path: Path, reference: dict[str, Record], limit: int) -> None:
    first = start(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert first.returncode == 1 and "File too large" in first.stderr, first.stderr
    check_against(Store(tmp_path), reference, complete=False)
    assert start(tmp_path).returncode == 0
    check_against(Store(tmp_path), reference)


class Stopped(Exception):
    pass


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    update = Training.update

    def stopping(self: Training) -> float:
        if self.step == step:
            raise Stopped
        return update(self)

    patch.setattr(Training, "update", stopping)


SPECS = {
    "pretraining": lambda seed: tiny.pretraining(seed=seed),
    "finetuning": lambda seed: tiny.finetuning(seed=seed),
    "frozen": lambda seed: tiny.finetuning(seed=seed, freeze=("QK",)),
    "bfloat16": lambda seed: tiny.pretraining(seed=seed, precision="bfloat16"),
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("seed", range(4))
def test_resuming_at_a_random_step_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    spec = SPECS[kind](seed)
    whole = sweep([spec], store=Store(tmp_path / "whole"))[0]
    store = Store(tmp_path / "stopped")
    before = sum(1 for _ in to_do([spec], store)) - 1
    for _ in range(before):
        run_spec(spec.init.source, store)
    steps = whole.facts["steps"]
    for step in sorted(draw.sample(range(1, steps), 2)):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            torch.manual_seed(draw.randrange(1000))  # whatever else the process draws must not matter
            with pytest.raises(Stopped):
                run_spec(spec, store, checkpoint_every=draw.choice([0, 0.005]))
    resumed = run_spec(spec, store, checkpoint_every=0)
    assert bits(resumed) == bits(whole) and len(resumed.facts["sessions"]) == 3


@pytest.mark.parametrize("lost", ["optimiser", "order", "draws", "permutation", "position", "step", "total"])
def test_each_part_of_the_state_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The comparison of bits would notice a state that is not saved."""
    spec = tiny.pretraining()
    whole = run_spec(spec, Store(tmp_path / "whole"))
    restore = Training.restore

    def forgetful(self: Training, tensors: dict, facts: dict) -> None:
        fresh_tensors, fresh_facts = self.state()
        tensors = {k: v for k, v in tensors.items() if not k.startswith("optimiser")} if lost == "optimiser" else tensors
        restore(self, {**tensors, **{k: v for k, v in fresh_tensors.items() if k == lost}}, {**facts, **{k: v for k, v in fresh_facts.items() if k == lost}})

    store = Store(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(Stopped):
            run_spec(spec, store, checkpoint_every=0)
    monkeypatch.setattr(Training, "restore", forgetful)
    try:
        assert bits(run_spec(spec, store)) != bits(whole)
    except IndexError:
        assert lost == "permutation"


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, Record]) -> None:
    store, spec = Store(tmp_path), tiny.pretraining()
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(Stopped):
            run_spec(spec, store, checkpoint_every=0)
    saved = store.work(key_of(spec)) / "checkpoint"
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 4
    saved.write_bytes(data)
    with pytest.warns(UserWarning, match="the checkpoint is damaged; it was set aside, and the run starts again"):
        record = run_spec(spec, store)
    assert bits(record) == bits(reference[record.key]) and "damaged" in [e["event"] for e in events(store)]


def spoil_byte(folder: Path) -> None:
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "weights.safetensors").write_bytes(data)


def truncate(folder: Path) -> None:
    (folder / "curves.parquet").write_bytes((folder / "curves.parquet").read_bytes()[:-40])


def improve(folder: Path) -> None:
    facts = json.loads((folder / "record.json").read_text())
    facts["metrics"]["test_loss"]["peak"] = 0.0
    (folder / "record.json").write_text(json.dumps(facts))


def exchange(folder: Path) -> None:
    """Another run's record under this key, whole in itself."""
    other = run_spec(tiny.pretraining(seed=9), Store(folder.parent))
    shutil.rmtree(folder)
    os.rename(other.folder, folder)


@pytest.mark.parametrize("damage", [spoil_byte, truncate, improve, exchange])
@pytest.mark.parametrize("found_by", ["sweep", "verify"])
def test_damage_is_found_and_never_used(tmp_path: Path, reference: dict[str, Record], damage: object, found_by: str) -> None:
    store, first, second = Store(tmp_path), tiny.pretraining(), tiny.finetuning()
    record = run_spec(first, store)
    damage(record.folder)
    if found_by == "verify":
        assert len(verify(store)[1]) == 1
        assert verify(store) == (0, [])
        assert [s.label() for s in to_do([second], store)] == [first.label(), second.label()]
    else:
        with pytest.warns(UserWarning, match="damaged record"):
            child = sweep([second], store=store)[0]
        assert bits(child) == bits(reference[child.key])
        check_against(store, reference, complete=False)
    assert len(list(store.root.glob(".damaged/*"))) == 1


def test_a_published_record_is_used_marked_and_not_trusted_blindly(tmp_path: Path, reference: dict[str, Record]) -> None:
    published = tmp_path / "results"
    for key, record in reference.items():
        shutil.copytree(record.folder, published / key, ignore=shutil.ignore_patterns("weights*"))
    store, specs = Store(tmp_path / "runs", published), killed.SPECS
    assert to_do(specs, store) == []
    assert sweep(specs, store=store)[0].folder.parent == published
    # A run that starts from a published one needs its weights.
    longer = tiny.finetuning(epochs=4)
    assert to_do([longer], store) == [longer.init.source, longer]
    spoilt = published / key_of(specs[1])
    truncate(spoilt)
    with pytest.warns(UserWarning, match="restore it with `git checkout -- "):
        assert to_do(specs, store) == [specs[1]]
    assert spoilt.exists()


def test_two_processes_share_one_training(tmp_path: Path) -> None:
    script = "import sys, tiny; from spt_nbdev.runs import run_spec; from spt_nbdev.records import Store; print(run_spec(tiny.scratch(400), Store(sys.argv[1])).facts['digest'])"
    both = [subprocess.Popen([sys.executable, "-c", script, tmp_path], env=ENV, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (p.communicate()[0] for p in both)
    assert first == second != "" and [p.returncode for p in both] == [0, 0]
    assert sorted(e["event"] for e in events(Store(tmp_path))) == ["finishes", "starts", "waits"]


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    store = Store(tmp_path)
    script = "import sys, time; from spt_nbdev.records import Store; lock = Store(sys.argv[1]).lock('k'); lock.acquire(); print('locked', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    assert store.is_running("k")
    holder.kill()
    holder.wait()
    assert not store.is_running("k")


def test_a_worker_that_is_killed_costs_little(tmp_path: Path) -> None:
    specs = [tiny.scratch(250, seed=seed) for seed in range(3)]
    serial = [run_spec(s, Store(tmp_path / "serial")) for s in specs]
    store = Store(tmp_path / "cluster")

    def kill_one() -> None:
        while True:
            time.sleep(0.05)
            for saved in store.root.glob(".work/*/checkpoint"):
                pid = next(e["pid"] for e in events(store) if e["event"] == "starts" and e["key"] == saved.parent.name)
                os.kill(pid, 9)
                return

    killer = threading.Thread(target=kill_one)
    killer.start()
    with local_client(2) as client:
        parallel = sweep(specs, client, store, checkpoint_every=0.05)
    killer.join()
    assert [bits(r) for r in parallel] == [bits(r) for r in serial]
    log = events(store)
    assert sum(e["event"] == "resumes" for e in log) == 1 and len({e["pid"] for e in log}) == 3
    assert sum(e["event"] == "finishes" for e in log) == 3 and verify(store) == (3, [])


def test_gpu_workers_get_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with local_client(2) as client:
        assert sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()) == ["0", "1"]


def test_workers_keep_their_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1000")
    with local_client(1) as client:
        (found,) = client.run(lambda: {k: os.environ.get(k) for k in MEMORY}).values()
    assert found == MEMORY | {"MALLOC_TOP_PAD_": "1000"}


def test_a_scheduler_by_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler and a worker as separate commands, with a shared folder for the runs."""
    dask, address = str(Path(sys.executable).parent / "dask"), tmp_path / "scheduler.json"
    commands = [
        ["scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", address],
        ["worker", "--scheduler-file", address, "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"],
    ]
    processes = [subprocess.Popen([dask, *c], env=ENV, stderr=subprocess.DEVNULL, cwd=tmp_path) for c in commands]
    try:
        while not address.exists():
            time.sleep(0.1)
        monkeypatch.setenv("SPT_SCHEDULER", json.loads(address.read_text())["address"])
        store = Store(tmp_path / "runs")
        sweep([tiny.finetuning()], store=store)
        log = events(store)
        assert [e["event"] for e in log] == ["starts", "finishes"] * 2 and os.getpid() not in {e["pid"] for e in log}
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def test_data_that_change_while_a_run_is_trained_leave_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seed").write_text("1")
    spec, store = tiny.pretraining(task=tiny.Waves(file=str(tmp_path / "seed"))), Store(tmp_path / "runs")
    update = Training.update

    def disturbing(self: Training) -> float:
        (tmp_path / "seed").write_text("2")
        return update(self)

    monkeypatch.setattr(Training, "update", disturbing)
    with pytest.raises(RuntimeError, match="its data changed while it was trained"):
        run_spec(spec, store)
    assert not list(store.root.glob("*/record.json"))


def test_threads_of_one_process_take_turns(tmp_path: Path, reference: dict[str, Record]) -> None:
    store = Store(tmp_path)
    threads = [threading.Thread(target=run_spec, args=(tiny.scratch(seed=s), store)) for s in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    for seed in range(4):
        assert bits(store.find(key_of(tiny.scratch(seed=seed)))) == bits(run_spec(tiny.scratch(seed=seed), Store(tmp_path / "serial")))


def test_a_run_does_not_depend_on_its_caller(tmp_path: Path, reference: dict[str, Record]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        record = run_spec(tiny.pretraining(), Store(tmp_path))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert bits(record) == bits(reference[record.key])


@contextmanager
def killing(client: Client, folder: Path) -> Iterator[None]:
    """Kill the worker process each time that it waits for it, as the plugin makes it do."""
    nanny, done = client.cluster.workers[0], threading.Event()

    def kill() -> None:
        while not done.wait(0.05):
            # One that dies while it starts up, Dask might not replace.
            if (process := nanny.process) and process.status is Status.running and (waits := folder / str(process.pid)).exists():
                waits.unlink()
                os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_run_whose_workers_keep_dying_is_tried_again_while_it_gets_further(tmp_path: Path) -> None:
    """Each worker is killed at its next checkpoint, more often than Dask allows for one task."""
    spec, store = tiny.scratch(2, task=tiny.Waves(n=20)), Store(tmp_path / "cluster")
    with local_client(1) as client, killing(client, tmp_path):
        client.register_plugin(deadly.WaitAtCheckpoint(tmp_path))
        record = sweep([spec], client, store, checkpoint_every=0)[0]
    assert sum(e["event"] == "resumes" for e in events(store)) > 4
    assert bits(record) == bits(run_spec(spec, Store(tmp_path / "serial")))


def test_a_sweep_ends_when_no_worker_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spt_nbdev.sweep.LOOK", 0.1)
    with local_client(1) as client:
        client.register_plugin(deadly.WaitAtCheckpoint(tmp_path))
        client.cluster.sync(client.cluster.workers[0].close)
        assert without_workers(client)
        with pytest.raises(SweepError, match="all worker processes on this machine died; what was finished is stored in "):
            sweep([tiny.scratch(2)], client, Store(tmp_path), checkpoint_every=0)


def test_a_worker_that_starts_slowly_keeps_its_place() -> None:
    """A worker is missing for longer than Dask would wait, since the next one takes its time to start; it comes back all the same."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}), local_client(1) as client:
        nanny = client.cluster.workers[0]
        first = client.submit(os.getpid).result(timeout=60)
        os.kill(nanny.process.pid, signal.SIGKILL)
        client.wait_for_workers(1, timeout=60)
        assert client.submit(os.getpid, pure=False).result(timeout=60) != first
        assert client.cluster.workers and not without_workers(client)


def test_published_records_are_replaced_by_those_of_newer_code(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs", tmp_path / "results")
    spec = tiny.pretraining()
    record = run_spec(spec, store)
    assert publish(store, [spec]) == (1, 0)
    old = json.loads((record.folder / "record.json").read_text()) | {"code": {}}
    old["key"] = code.digest({k: old[k] for k in ("spec", "data", "code", "sources")}, 16)
    old["digest"] = code.digest({k: v for k, v in old.items() if k != "digest"}, 64)
    shutil.copytree(store.published / record.key, store.published / old["key"])
    (store.published / old["key"] / "record.json").write_text(json.dumps(old))
    (store.published / f".new-{record.key}").mkdir()  # left behind by a publication that was killed
    assert publish(store, [spec]) == (0, 1)
    truncate(store.published / record.key)
    assert publish(store, [spec]) == (1, 0)
    assert verify(store) == (2, [])


@pytest.mark.parametrize("n_workers", ["1", "2"])
def test_a_failing_run_stops_only_what_starts_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_workers: str) -> None:
    monkeypatch.setenv("SPT_WORKERS", n_workers)
    wild = tiny.pretraining(task=tiny.Waves(file=str(tmp_path / "seed")))
    (tmp_path / "seed").write_text("not a number")
    specs = [wild, tiny.scratch(init=tiny.Init(wild)), tiny.scratch()]
    store = Store(tmp_path / "runs")
    with pytest.raises(SweepError) as error:
        sweep(specs, store=store)
    lines = str(error.value).splitlines()
    assert lines[0] == "2 of 3 runs failed; what the others gave is stored"
    assert lines[2].endswith(f"not started: it starts from {wild.label()}")
    assert "ValueError: invalid literal for int() with base 10: 'not a number'" in lines[1]
    assert store.find(key_of(tiny.scratch())) and store.find(key_of(wild)) is None


def test_a_run_whose_source_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="pretrain waves 1L lr 0.01 seed 0 .* is not finished, and finetune waves"):
        run_spec(tiny.finetuning(), Store(tmp_path))


# The oracle of staleness: what is changed, and which runs are then to be trained again.

PRETRAINED, SCRATCH, FINETUNED, OTHER = "pretrained", "scratch", "finetuned", "other data"
EVERYTHING = {PRETRAINED, SCRATCH, FINETUNED, OTHER}


def oracle_specs(folder: Path, **changes: object) -> dict[str, object]:
    waves = replace(tiny.Waves(), file=str(folder / "seed"))
    start = tiny.pretraining(task=waves, **changes)
    tuned = tiny.scratch(task=waves, init=tiny.Init(start))
    return {PRETRAINED: start, SCRATCH: tiny.scratch(task=waves), FINETUNED: tuned, OTHER: tiny.scratch(task=tiny.Waves(length=10))}


@contextmanager
def edited(patch: pytest.MonkeyPatch, module: str, old: str, new: str) -> Iterator[None]:
    """The package as if a module's text were another."""
    source = code.module_source

    def text(name: str) -> str:
        whole = source(name)
        if name == module:
            assert whole.count(old) == 1, f"{old!r} is there {whole.count(old)} times"
            whole = whole.replace(old, new)
        return whole

    with patch.context() as inner:
        inner.setattr(code, "module_source", text)
        code.definitions.cache_clear()
        yield
    code.definitions.cache_clear()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store, dict[str, object]]:
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "seed").write_text("3")
    specs, store = oracle_specs(folder), Store(folder / "runs")
    sweep(list(specs.values()), store=store)
    return folder, store, specs


def names(specs: dict[str, object], missing: list[object]) -> set[str]:
    return {n for n, s in specs.items() if s in missing}


EDITS = [
    ("spt_nbdev.spt", ".sum() / max(1, error.numel())", ".sum() / max(2, error.numel())", {PRETRAINED, FINETUNED}),
    ("spt_nbdev.spt", "return F.cross_entropy(self.logits(", "return 2 * F.cross_entropy(self.logits(", {SCRATCH, FINETUNED, OTHER}),
    ("spt_nbdev.spt", "model.load_state_dict(own |", "model.load_state_dict({} | own |", {FINETUNED}),
    ("spt_nbdev.positions", "10000.0", "20000.0", EVERYTHING),
    ("spt_nbdev.groups", '"VO": BLOCK', '"VO": "(?#)" + BLOCK', EVERYTHING),
    ("spt_nbdev.train", "torch.optim.AdamW(", "torch.optim.Adam(", EVERYTHING),
    ("spt_nbdev.train", "import Tensor, nn", "import Tensor, nn  # noqa", set()),
    ("spt_nbdev.train", "loss.backward()", "loss.backward()  # and now the gradient is there\n", set()),
    ("spt_nbdev.train", "self.position, self.total = 0, torch", "self.position, self.total = \\\n                0, torch", set()),
    ("spt_nbdev.train", '"A model in training."', '"A model that is being trained."', set()),
    ("spt_nbdev.train", "def rate(self, step: int) -> float:", "def rate(self, step):", set()),
    ("spt_nbdev.train", "seed {self.seed}\"", "no. {self.seed}\"", set()),
    ("spt_nbdev.train", "3 * self.budget.epochs * shape.n_train", "2 * self.budget.epochs * shape.n_train", set()),
    ("spt_nbdev.data", "a value is not finite; clean the data first", "a value is not finite", EVERYTHING),
    ("spt_nbdev.series", "the file is cut off or of another set", "the file is another", set()),
    ("spt_nbdev.page", "#d55e00", "#000000", set()),
    ("spt_nbdev.ucr", '(peak="max", last="last")', '(peak="min", last="last")', set()),
    ("spt_nbdev.runs", "self.saved = time.monotonic()\n\n    def due", "self.saved = time.monotonic() + 1\n\n    def due", set()),
    ("spt_nbdev.records", "VERSION = 1", "VERSION = 2", set()),
    ("spt_nbdev.sweep", "60s", "61s", set()),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "stale"), EDITS, ids=[f"{m.split('.')[1]}: {n[:30]}" for m, _, n, _ in EDITS])
def test_an_edit_reruns_what_depends_on_it_and_nothing_else(
    oracle: tuple[Path, Store, dict[str, object]], monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str, stale: set[str]
) -> None:
    _, store, specs = oracle
    with edited(monkeypatch, module, old, new):
        assert names(specs, to_do(list(specs.values()), store)) == stale


HOLES = {
    "a name that is handed on": "from .b import f\ndef start(): return f()",
    "a star": "from .b import *\ndef start(): return f()",
    "a module": "from . import b\ndef start(): return b.f()",
    "a dotted module": "import spt_nbdev.b\nimport spt_nbdev.code\ndef start(): return spt_nbdev.b.f()",
    "an import inside": "def start():\n    from .b import f\n    return f()",
    "one of two imports": "try:\n    from .b import f\nexcept ImportError:\n    from .code import digest as f\ndef start(): return f()",
    "a default": "from .b import f\ndef start(x=f()): return x",
    "a base class": "from .b import A\nclass start(A): pass",
    "a register": "from .b import f, register\n@register\ndef other(): return f()\ndef start(): return register.all",
    "an import for its effect": "from . import b\ndef start(): return 1",
    "an assignment to _": "from .b import f\n_ = f()\ndef start(): return 1",
}


@pytest.mark.parametrize("hole", HOLES)
def test_no_way_to_use_code_escapes_the_trace(monkeypatch: pytest.MonkeyPatch, hole: str) -> None:
    """A made-up module `a` uses `b` in one way or another, and `b` is changed."""

    def trace(number: int) -> dict[str, str]:
        texts = {
            "spt_nbdev.c": "from .a import start",
            "spt_nbdev.a": HOLES[hole],
            "spt_nbdev.b": f"import torch\ndef f(): return {number}\nclass A:\n    x = {number}\ndef register(f): return f\ntorch.set_default_dtype(torch.float{number})\n",
        }
        source, spec = code.module_source, code.importlib.util.find_spec
        with monkeypatch.context() as patch:
            patch.setattr(code, "module_source", lambda m: texts.get(m) or source(m))
            patch.setattr(code, "check_fresh", lambda m: None)
            patch.setattr(code.importlib.util, "find_spec", lambda m: m in texts or spec(m))
            code.definitions.cache_clear()
            found = code.code_used([("spt_nbdev.c", "start")])
        code.definitions.cache_clear()
        return found

    assert trace(32) == trace(32) != trace(64)


CELLS = [
    "from dataclasses import dataclass\nfrom spt_nbdev.keys import identify, key_of\nfrom spt_nbdev.positions import sinusoids",
    "SCALE = 1\ndef helper(): return 1",
    "@dataclass(frozen=True)\nclass InCell:\n    n: int = 0\n    def train(self, run): return helper() * SCALE + sinusoids(2, 2)",
    "print(key_of(InCell()), 'positions.sinusoids' in identify(InCell())['code'])",
    "SCALE = 2",
    "print(key_of(InCell()))",
    "def helper(): return 2",
    "print(key_of(InCell()))",
    "# a comment",
    "print(key_of(InCell()))",
]


def test_a_spec_in_a_cell_rests_on_the_other_cells() -> None:
    script = "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\nfor cell in sys.argv[1:]: shell.run_cell(cell).raise_error()"
    out = subprocess.run([sys.executable, "-c", script, *CELLS], env=ENV, capture_output=True, text=True, check=True).stdout.split()
    first, traced, *others = out
    assert traced == "True" and len({first, *others}) == 3 and others[1] == others[2]


def test_a_field_a_seed_or_a_data_file_reruns_what_depends_on_it(oracle: tuple[Path, Store, dict[str, object]]) -> None:
    folder, store, specs = oracle
    assert to_do(list(specs.values()), store) == []
    for change in ({"objective": Reconstruction(0.4)}, {"seed": 5}, {"optimiser": Optimiser(lr=2e-3)}, {"precision": "bfloat16"}):
        changed = oracle_specs(folder, **change)
        assert names(changed, to_do(list(changed.values()), store)) == {PRETRAINED, FINETUNED}
    (folder / "seed").write_text("4")
    assert names(specs, to_do(list(specs.values()), store)) == {PRETRAINED, SCRATCH, FINETUNED}
    sweep(list(specs.values()), store=store)
    (folder / "seed").write_text("3")
    assert to_do(list(specs.values()), store) == [], "the old records are still there"
