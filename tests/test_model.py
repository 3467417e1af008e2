"""The model against torch's own Transformer layer, and what it may import."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from spt_nbdev.data import Task, load_ucr
from spt_nbdev.model import Block, Classifier, ModelConfig
from spt_nbdev.runs import in_parallel, load_record
from spt_nbdev.spt import Fit, finetune, mask_steps, masked_loss, pretrain
from spt_nbdev.ucr import BUDGETS, Budget, Search, choose, run_seed, search_fold, settings


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
    model, x = Classifier(ModelConfig(), 1, 30, 2), torch.randn(2, 30, 1)
    shuffled = x[:, torch.randperm(30)]
    assert not torch.allclose(model(x), model(shuffled), atol=1e-4)
    model.encoder.positions.zero_()
    torch.testing.assert_close(model(x), model(shuffled), atol=1e-5, rtol=1e-4)


def copying_task(n: int = 64) -> Task:
    """Each series is constant; its value can be read off any visible step."""
    x = torch.randn(n, 1, 1, generator=torch.Generator().manual_seed(0)).expand(n, 24, 1).contiguous()
    y = (x[:, 0, 0] > 0).long()
    return Task("copying", x, y, x, y, 2)


def test_pretraining_learns_to_copy_and_the_loss_sees_hidden_steps_only() -> None:
    task = copying_task()
    _, curves = pretrain(
        task,
        ModelConfig(d_model=16, n_layers=1, d_ff=32),
        Fit(60, lr=1e-2),
        mask_ratio=0.5,
    )
    assert curves.loss.iloc[-1] < 0.05 * task.x_train.var()
    seen, mask = mask_steps(task.x_train, 0.3, torch.Generator().manual_seed(1))
    wrong_where_visible = torch.where(mask[..., None], task.x_train, task.x_train + 5)
    assert masked_loss(wrong_where_visible, task.x_train, mask) == 0 and seen[..., 0][mask].abs().max() == 0


def test_labels_do_not_reach_pretraining() -> None:
    task = copying_task()
    other = Task(task.name, task.x_train, 1 - task.y_train, task.x_test, 1 - task.y_test, 2)
    config, fit = ModelConfig(d_model=16, n_layers=1, d_ff=32), Fit(2)
    (a, _), (b, _) = pretrain(task, config, fit), pretrain(other, config, fit)
    assert all(torch.equal(u, v) for u, v in zip(a.parameters(), b.parameters(), strict=True))


def test_the_test_split_does_not_reach_training() -> None:
    task = copying_task()
    other = Task(
        task.name,
        task.x_train,
        task.y_train,
        task.x_test[:5] + 3,
        1 - task.y_test[:5],
        2,
    )
    config, fit = ModelConfig(d_model=16, n_layers=1, d_ff=32), Fit(3)
    (a, _), (b, _) = finetune(task, config, fit), finetune(other, config, fit)
    assert all(torch.equal(u, v) for u, v in zip(a.parameters(), b.parameters(), strict=True))


def test_a_diverging_run_stops_with_advice() -> None:
    task = copying_task()
    with pytest.raises(FloatingPointError, match="is not finite after .* lower lr = 0.9"):
        pretrain(
            Task("large", task.x_train * 1e18, task.y_train, task.x_test, task.y_test, 2),
            ModelConfig(d_model=16, n_layers=1, d_ff=32),
            Fit(50, lr=0.9, warmup_steps=0),
        )


def test_the_search_ranks_every_cell_on_every_fold() -> None:
    task = copying_task(20)
    blind = Task(task.name, task.x_train, task.y_train, task.x_test + 7, 1 - task.y_test, 2)
    grid, budget = Search(n_layers=(1,), lr=(1e-3, 3e-3), n_seeds=1, n_folds=2, tail=1), Budget(1, 1, 2)
    runs, again = (pd.concat([search_fold(t, grid, budget, 1, 0, k) for k in range(2)]) for t in (task, blind))
    assert runs.groupby(["condition", "lr", "fold"]).size().eq(1).all() and len(runs) == 8
    pd.testing.assert_frame_equal(runs, again, obj="the test split has no say")


def test_the_stored_run_is_what_the_code_gives(root: Path) -> None:
    """The first epochs of the stored laptop run, trained again; other processors may differ in the last digits."""
    record, curves = load_record(root / "results/18_ucr/GunPoint-laptop-5")
    runs = load_record(root / "results/18_ucr/search")[1]
    choice = choose(runs)
    assert record["settings"] == json.loads(json.dumps(settings(load_ucr("GunPoint"), choice, BUDGETS["laptop"])))
    torch.set_num_threads(1)
    again = run_seed(load_ucr("GunPoint"), choice, Budget(1, 3, 3), seed=0)
    stored = curves[(curves.seed == 0) & (curves.epoch <= 3)]
    for condition, stage in [("SPT", "pretrain"), ("scratch", "finetune"), ("scratch, SPT's lr", "finetune")]:
        a, b = (c[(c.condition == condition) & (c.stage == stage)].loss.to_numpy() for c in (again, stored))
        np.testing.assert_allclose(a, b, rtol=1e-3, err_msg=f"{condition}, {stage}")


def test_parallel_calls_keep_their_order_and_have_one_thread() -> None:
    assert in_parallel(divmod, [(7, 2), (9, 4), (5, 5)]) == [(3, 1), (2, 1), (1, 0)]
    assert in_parallel(torch.get_num_threads, [(), ()]) == [1, 1]


def test_training_needs_no_notebook_tools() -> None:
    """A GPU machine has no notebook tools; the training modules must import and run without them."""
    code = """
import sys
class Block:
    blocked = {"aeon", "seaborn", "matplotlib", "pydantic", "fastcore", "nbdev", "papermill", "IPython", "rich", "platformdirs"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from spt_nbdev import data, model, runs, spt, ucr, paper
import torch
task = data.Task("t", torch.randn(8, 12, 1), torch.arange(8) % 2, torch.randn(4, 12, 1), torch.arange(4) % 2, 2)
print(len(ucr.run_seed(task, ucr.Choice(1, 1e-3, 1e-3), ucr.Budget(1, 1, 2), 0)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "7"
