"""What reaches a training and what doesn't, the published runs, and what the model may import."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Copying

from spt_nbdev.data import Fold, Split, Values, masked_view
from spt_nbdev.keys import key_of
from spt_nbdev.model import ModelConfig
from spt_nbdev.records import Record, Store
from spt_nbdev.runs import run_spec
from spt_nbdev.spt import Classification, Reconstruction, draw_mask, reconstruction_loss
from spt_nbdev.train import Budget, Optimiser, RunSpec
from spt_nbdev.ucr import Search, search_runs, table_6

SMALL = ModelConfig(d_model=16, n_layers=1, d_ff=32)


def run(folder: Path, objective: object, change: str = "", epochs: int = 3, **optimiser: float) -> Record:
    return run_spec(RunSpec(Copying(change=change), SMALL, objective, Budget(epochs), Optimiser(**optimiser)), Store(folder))


def same_weights(a: Record, b: Record) -> bool:
    return a.facts["files"]["weights.safetensors"] == b.facts["files"]["weights.safetensors"] and a.key != b.key


def test_pretraining_learns_to_copy_and_the_loss_sees_hidden_steps_only(tmp_path: Path) -> None:
    x = Copying().load().train.x
    assert run(tmp_path, Reconstruction(), epochs=60, lr=1e-2).curves.loss.iloc[-1] < 0.05 * x.var()
    batch = Split(x, torch.zeros(len(x), dtype=torch.int64))
    view = masked_view(Values(), batch, draw_mask(batch, 0.3, torch.Generator().manual_seed(1)))
    wrong_where_visible = torch.where(view.scored[..., None], x, x + 5)
    assert reconstruction_loss(wrong_where_visible[view.scored], view, "l2") == 0 and view.inputs[..., 0][view.scored].abs().max() == 0


def test_labels_do_not_reach_pretraining(tmp_path: Path) -> None:
    assert same_weights(run(tmp_path, Reconstruction()), run(tmp_path, Reconstruction(), "labels"))


@pytest.mark.parametrize("objective", [Reconstruction(), Classification()])
def test_the_test_split_does_not_reach_training(tmp_path: Path, objective: object) -> None:
    assert same_weights(run(tmp_path, objective), run(tmp_path, objective, "test split"))


def test_labels_do_reach_classification(tmp_path: Path) -> None:
    """The comparison of weights would notice."""
    assert not same_weights(run(tmp_path, Classification()), run(tmp_path, Classification(), "labels"))


def test_a_diverging_run_stops_with_advice_and_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"is not finite after .* lower lr = 0.9"):
        run(tmp_path, Reconstruction(), "huge", epochs=50, lr=0.9, warmup_steps=0)
    assert not list(tmp_path.glob("*/record.json"))


def test_the_search_covers_every_cell_on_every_fold_and_never_the_test_split() -> None:
    grid = Search(n_layers=(1, 2), lr=(1e-3, 3e-3), n_seeds=2, n_folds=3)
    runs = search_runs(grid)
    assert len(runs) == len(set(runs.values())) == 2 * 2 * 2 * 2 * 3
    for (condition, n_layers, lr, seed, k), spec in runs.items():
        assert (spec.model.n_layers, spec.optimiser.lr, spec.seed, spec.task.fold) == (n_layers, lr, seed, Fold(k, 3, seed))
        assert (spec.init is not None) == (condition == "SPT") and (spec.init is None or spec.init.source.task == spec.task)


def test_the_published_runs_are_what_the_code_gives(tmp_path: Path, root: Path) -> None:
    """The first epochs of published runs, trained again; other processors may differ in the last digits."""
    laptop, published = table_6("laptop"), Store(tmp_path, root / "results")
    for spec in (laptop["scratch", 0], laptop["SPT", 0].init.source):
        record = published.find(key_of(spec))
        assert record, "the code has changed since: reproduce 18_ucr at laptop, and publish it"
        again = run_spec(replace(spec, budget=replace(spec.budget, epochs=3, eval_every=1)), published)
        assert again.curves.epoch.max() == 3
        same = again.curves.merge(record.curves, on="epoch", suffixes=("", " published"))
        assert spec.init is None and len(same) == (3 if spec.budget.eval_every == 1 else 0)
        np.testing.assert_allclose(same.loss, same["loss published"], rtol=1e-3)


def test_training_needs_no_notebook_tools(tmp_path: Path) -> None:
    """A GPU machine has no notebook tools; the training modules must import and run without them."""
    code = """
import sys
class Block:
    blocked = {"aeon", "dask", "distributed", "seaborn", "matplotlib", "pydantic", "fastcore", "nbdev", "papermill", "IPython", "rich", "PIL", "transformers", "x_transformers", "accelerate"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from spt_nbdev import data, model, paper, presets, spt, sweep, tasks, train, ucr
from spt_nbdev.records import Store
import tiny
records = sweep.sweep([tiny.finetuning(), tiny.scratch()], store=Store(sys.argv[1]))
tasks.named_task("listops", "smoke").load()
presets.preset("pathfinder").runs()
print(*(len(r.curves) for r in records))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 2"
