"""Run a small sweep in this process and kill it at a chosen point: `killed.py STORE [POINT [N]]`."""

import os
import signal
import sys
from pathlib import Path

from tiny import finetuning, pretraining, scratch

from spt_nbdev import records, runs, train
from spt_nbdev.records import Store
from spt_nbdev.sweep import sweep

SPECS = [pretraining(), scratch(), finetuning()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: object, name: str, n: int, die_first: bool = True, when: object = lambda *a: True) -> None:
    """Die in the n-th call of a function that `when` is true for, before it or after it."""
    original, calls = getattr(owner, name), [0]

    def patched(*args: object, **kwargs: object) -> object:
        calls[0] += bool(when(*args))
        mine = calls[0] == n and when(*args)
        if mine and die_first:
            die()
        result = original(*args, **kwargs)
        if mine:
            die()
        return result

    setattr(owner, name, patched)


def half_written(name: str, n: int) -> None:
    """Die when half of the n-th file of this name is on the disk."""
    original, calls = records.write_file, [0]

    def patched(path: Path, data: bytes) -> None:
        calls[0] += path.name == name
        if calls[0] == n and path.name == name:
            original(path, data[: len(data) // 2])
            die()
        original(path, data)

    records.write_file = runs.write_file = patched


POINTS = {
    "step": lambda n: on_call(train.Training, "update", n),
    "evaluation": lambda n: on_call(train.Training, "evaluate", n),
    "checkpoint half written": lambda n: half_written("checkpoint.new", n),
    "checkpoint not renamed": lambda n: on_call(os, "replace", n, when=lambda a, b: Path(b).name == "checkpoint"),
    "checkpoint just renamed": lambda n: on_call(os, "replace", n, die_first=False, when=lambda a, b: Path(b).name == "checkpoint"),
    "curves half written": lambda n: half_written("curves.parquet", n),
    "weights half written": lambda n: half_written("weights.safetensors", n),
    "record half written": lambda n: half_written("record.json", n),
    "record not renamed": lambda n: on_call(os, "rename", n),
    "record just renamed": lambda n: on_call(os, "rename", n, die_first=False),
    "between runs": lambda n: on_call(Store, "event", n, when=lambda store, kind, *a: kind == "finishes"),
}

if __name__ == "__main__":
    store, *point = sys.argv[1:]
    if point:
        POINTS[point[0]](int(point[1]))
    sweep(SPECS, store=Store(store), checkpoint_every=0)
