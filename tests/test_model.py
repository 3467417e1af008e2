"""The model against torch's own Transformer layer, and what it may import."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Copying
from torch import nn

from spt_nbdev.data import Fold, Shape, Split, Values, masked_view
from spt_nbdev.keys import key_of
from spt_nbdev.model import Block, Classifier, ModelConfig
from spt_nbdev.records import Record, Store
from spt_nbdev.runs import run_spec
from spt_nbdev.spt import Classification, Reconstruction, draw_mask, reconstruction_loss
from spt_nbdev.train import Budget, Optimiser, RunSpec
from spt_nbdev.ucr import Search, search_runs, table_6


def torch_layer(block: Block, config: ModelConfig) -> nn.TransformerEncoderLayer:
    """torch's pre-norm layer with the weights of our block."""
    layer = nn.TransformerEncoderLayer(
        config.d_model,
        config.n_heads,
        config.d_ff,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    a = block.attention
    layer.load_state_dict({
        "self_attn.in_proj_weight": torch.cat([a.query.weight, a.key.weight, a.value.weight]),
        "self_attn.in_proj_bias": torch.cat([a.query.bias, a.key.bias, a.value.bias]),
        "self_attn.out_proj.weight": a.out.weight, "self_attn.out_proj.bias": a.out.bias,
        "linear1.weight": block.mlp[0].weight, "linear1.bias": block.mlp[0].bias,
        "linear2.weight": block.mlp[2].weight, "linear2.bias": block.mlp[2].bias,
        "norm1.weight": block.attention_norm.weight, "norm1.bias": block.attention_norm.bias,
        "norm2.weight": block.mlp_norm.weight, "norm2.bias": block.mlp_norm.bias,
    })  # fmt: skip
    return layer


@pytest.mark.parametrize("tied", [True, False])
def test_block_is_torchs_pre_norm_layer(tied: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(tied_qkvo_init=tied)
    block = Block(config)
    for w in block.parameters():
        nn.init.normal_(w, std=0.2)
    x = torch.randn(3, 40, config.d_model)
    layer = torch_layer(block, config)
    torch.testing.assert_close(block(x), layer(x), atol=1e-5, rtol=1e-5)


def test_the_classifier_does_not_see_the_order_without_positions() -> None:
    torch.manual_seed(0)
    model, x = Classifier(ModelConfig(), Shape(30, 1, 2)), torch.randn(2, 30, 1)
    shuffled = x[:, torch.randperm(30)]
    assert not torch.allclose(model(x), model(shuffled), atol=1e-4)
    model.encoder.positions.zero_()
    torch.testing.assert_close(model(x), model(shuffled), atol=1e-5, rtol=1e-4)


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
    blocked = {"aeon", "dask", "distributed", "seaborn", "matplotlib", "pydantic", "fastcore", "nbdev", "papermill", "IPython", "rich", "PIL"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from spt_nbdev import data, model, paper, spt, sweep, tasks, train, ucr
from spt_nbdev.records import Store
import tiny
records = sweep.sweep([tiny.finetuning(), tiny.scratch()], store=Store(sys.argv[1]))
tasks.named_task("listops", "smoke").load()
print(*(len(r.curves) for r in records))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 2"
