"""The toy task: its data by another formula, stacks against single models and torch, and what a reader of its page relies on."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from spt_nbdev.attention import locality
from spt_nbdev.keys import key_of
from spt_nbdev.plan import page_runs, plan_runs, with_sources
from spt_nbdev.portrait import Portrait
from spt_nbdev.records import Store
from spt_nbdev.runs import publish, run_spec
from spt_nbdev.toy import Comparison, at_chosen, comparisons, from_snapshots, planned_runs
from spt_nbdev.toymodel import ToyModel, ToyStack, label_losses, masked_losses
from spt_nbdev.toytraining import TOY_GROUPS, Start, ToyRun, ToyTraining, toy_weights
from spt_nbdev.train import Budget
from spt_nbdev.trajectories import ANCHORS, Trajectories, draw_trajectories, ellipses, outliers, seed_data, stacked_data

SMALL = Trajectories(n_train=20, n_val=10, n_test=12, n_unlabelled=60, length=16, most_outliers=2)
NARROW = ToyModel(d_model=8)


def pretraining(seeds: tuple[int, ...] = (0, 1), **changes: object) -> ToyRun:
    spec = ToyRun(SMALL, NARROW, Budget(3, batch_size=20), (1e-2,), seeds, mask_ratio=0.5, optimiser="AdamW", snapshots=(0, 4))
    return replace(spec, **changes)


def labels(seeds: tuple[int, ...] = (0, 1), **changes: object) -> ToyRun:
    return replace(ToyRun(SMALL, NARROW, Budget(3, batch_size=10, eval_every=3), (0.1, 0.5), seeds), **changes)


# The data


def test_points_lie_on_ellipses_around_the_anchors() -> None:
    """Seen from the middle of its anchors, a point is on an ellipse whose half axes are half their distance, and between 0.12 and 0.28."""
    y = torch.arange(2).repeat(200)
    path = ellipses(Trajectories(), y, torch.Generator().manual_seed(0)).double().numpy()
    for label, x in zip(y.tolist(), path, strict=True):
        a, b = np.array(ANCHORS[label])
        along = (a - b) / 2
        half = np.linalg.norm(along)
        assert half == pytest.approx(1.633 / 2, abs=1e-3)
        centred = x - (a + b) / 2
        cos, across = centred @ along / half**2, centred @ np.array([-along[1], along[0]]) / half
        assert np.abs(cos).max() <= 1 + 1e-6
        inside = np.abs(cos) < 0.9
        s = np.abs(across[inside]) / np.sqrt(1 - cos[inside] ** 2)
        assert 0.12 - 1e-6 <= s.min() <= s.max() <= 0.28 + 1e-6 and np.ptp(s) < 1e-4


@pytest.mark.parametrize("alpha", ["speed", "amplitude"])
def test_alpha_is_what_it_is_said_to_be(alpha: str) -> None:
    """Read off the path: the turns that a sequence makes, or how far it reaches."""
    data = Trajectories(alpha=alpha, warp=0.0)
    path = ellipses(data, torch.zeros(3000, dtype=torch.int64), torch.Generator().manual_seed(0))
    a, b = torch.tensor(ANCHORS[0])
    along, centred = (a - b) / 2, path - (a + b) / 2
    cos = centred @ along / along.square().sum()
    half_width = (centred @ torch.stack([-along[1], along[0]]) / along.norm()).abs().amax(1, keepdim=True)
    theta = torch.atan2(centred @ torch.stack([-along[1], along[0]]) / along.norm() / half_width, cos)
    turn = (theta.diff(dim=1) + math.pi) % (2 * math.pi) - math.pi
    turns, reach = turn.sum(1) / (2 * math.pi) * 100 / 99, cos.abs().amax(1)
    drawn, fixed = (turns, reach) if alpha == "speed" else (reach, turns)
    assert drawn.mean().item() == pytest.approx(1, abs=0.02) and drawn.std().item() == pytest.approx(0.1, abs=0.02)
    assert fixed.std() < 0.02


def test_the_time_warp_changes_speed_and_not_the_ellipse() -> None:
    y = torch.arange(2).repeat(50)
    even, warped = (ellipses(Trajectories(alpha="amplitude", warp=w), y, torch.Generator().manual_seed(0)) for w in (0.0, 0.9))
    speeds = [path.diff(dim=1).norm(dim=-1) for path in (even, warped)]
    assert (speeds[1].amax(1) / speeds[0].amax(1)).mean() > 1.3
    assert not torch.allclose(even, warped)


def test_statistics_of_what_is_drawn() -> None:
    """The class means are 0.078 apart; the covariance of x and y has the sign of the class; noise and outliers are as large as they should be."""
    data, y = Trajectories(), torch.arange(2).repeat(5000)
    x = draw_trajectories(data, y, torch.Generator().manual_seed(0))
    means = [x[y == label].mean((0, 1)) for label in (0, 1)]
    assert (means[0] - means[1]).norm().item() == pytest.approx(0.0778, abs=0.005)
    for label, sign in ((0, 1), (1, -1)):
        centred = x[y == label] - x[y == label].mean(1, keepdim=True)
        assert sign * centred.prod(-1).mean().item() == pytest.approx((0.8165**2 - 0.0421) / 4, abs=0.004)  # half axes 0.8165 and s, at 45 degrees
    thrown = outliers(data, 10_000, torch.Generator().manual_seed(1))
    counts = (thrown != 0).any(-1).sum(1).bincount() / 10_000
    assert len(counts) == 4 and (counts - 0.25).abs().max() < 0.02
    assert thrown[thrown != 0].std().item() == pytest.approx(1, abs=0.02)
    still = replace(data, most_outliers=0)
    noise = draw_trajectories(still, y, torch.Generator().manual_seed(0)) - ellipses(still, y, torch.Generator().manual_seed(0))
    assert noise.std().item() == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize(("flipped", "wrong"), [(0.0, 0), (0.15, 15), (0.5, 50)])
def test_exactly_that_share_of_the_training_labels_is_wrong(flipped: float, wrong: int) -> None:
    own = seed_data(Trajectories(flipped=flipped), 3)
    assert int((own.labels != own.true_labels).sum()) == wrong and int(own.true_labels.sum()) == 50
    centred = own.train - own.train.mean(1, keepdim=True)
    assert ((centred.prod(-1).mean(1) < 0).long() == own.true_labels).all()  # the sequences go with the true labels


def test_each_seed_and_each_split_has_data_of_its_own() -> None:
    both = stacked_data(SMALL, (0, 1))
    assert torch.equal(both.val[1], seed_data(SMALL, 1).val) and not torch.equal(both.val[0], both.val[1])
    assert not torch.equal(both.val[0, :10], both.test[0, :10])


# The model


@pytest.mark.parametrize("positions", ["sinusoidal", "none"])
def test_the_layer_is_that_of_torch(positions: str) -> None:
    """With the weights copied into torch's attention, the mixed steps and the weights are the same."""
    stack = ToyStack(ToyModel(positions=positions), 16, (5,), "labels")
    theirs = torch.nn.MultiheadAttention(32, 1, bias=False, batch_first=True)
    theirs.in_proj_weight.data = torch.cat([stack.query[0].T, stack.key[0].T, stack.value[0].T])
    theirs.out_proj.weight.data = stack.out[0].T
    x = torch.randn(1, 3, 16, 2, generator=torch.Generator().manual_seed(0))
    h = stack.embedded(x)
    mixed, weights, _ = stack.attend(h)
    expected, maps = theirs(h[0], h[0], h[0])
    torch.testing.assert_close(mixed[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[0], maps, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(stack.classify(x)[0], expected.mean(1) @ stack.head[0] + stack.head_bias[0], atol=1e-6, rtol=1e-5)


VARIANTS = [
    {},
    {"positions": "learned"},
    {"positions": "alibi"},
    {"positions": "none"},
    {"tied_qkvo_init": True},
    {"residual": True},
    {"pool": "cls"},
    {"pool": "cls", "residual": True},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_stack_has_the_losses_and_gradients_of_its_models_alone(changes: dict[str, object]) -> None:
    model, seeds = ToyModel(**changes), (4, 7, 9)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 5, 16, 2, generator=generator), torch.randint(2, (3, 5), generator=generator)
    mask = torch.rand(3, 5, 16, generator=generator) < 0.5
    for purpose, losses_of, asked in (("labels", label_losses, y), ("SPT", masked_losses, mask)):
        stack = ToyStack(model, 16, seeds, purpose)
        losses = losses_of(stack, x, asked)
        losses.sum().backward()
        for m, seed in enumerate(seeds):
            alone = ToyStack(model, 16, (seed,), purpose)
            loss = losses_of(alone, x[[m]], asked[[m]])
            loss.sum().backward()
            torch.testing.assert_close(loss[0], losses[m], atol=1e-6, rtol=0)
            for (name, own), (_, stacked) in zip(alone.named_parameters(), stack.named_parameters(), strict=True):
                assert (own.grad is None) == (stacked.grad is None), name
                if own.grad is not None:
                    torch.testing.assert_close(own.grad[0], stacked.grad[m], atol=1e-6, rtol=0)


@pytest.mark.parametrize("changes", VARIANTS[:6], ids=str)
def test_the_masked_loss_is_that_of_all_steps_with_the_hidden_ones_kept(changes: dict[str, object]) -> None:
    stack = ToyStack(ToyModel(**changes), 16, (0, 1), "SPT")
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(2, 5, 16, 2, generator=generator), torch.rand(2, 5, 16, generator=generator) < 0.3
    said = stack.read(stack.attend(stack.embedded(torch.cat([x.masked_fill(mask[..., None], 0), mask[..., None].float()], -1)))[0])
    for m, loss in enumerate(masked_losses(stack, x, mask)):
        torch.testing.assert_close(loss, F.mse_loss(said[m][mask[m]], x[m][mask[m]]))
    visible = x + ~mask[..., None] * torch.randn(x.shape, generator=generator)  # the answer depends on what is shown, and not on what is hidden
    hidden = x + mask[..., None] * 5
    at = torch.arange(16).expand(2, 5, 16)
    answers = [stack.attend(stack.embedded(torch.cat([z.masked_fill(mask[..., None], 0), mask[..., None].float()], -1)), at)[0] for z in (x, visible, hidden)]
    assert torch.equal(answers[0], answers[2]) and not torch.allclose(answers[0], answers[1])


# Training


def test_training_a_stack_is_training_its_models(tmp_path: Path) -> None:
    """The same weights to 1e-4 after the AdamW steps of a run, and the same curves."""
    store = Store(tmp_path)
    stacked = run_spec(pretraining((0, 1, 2)), store)
    for m in range(3):
        alone = run_spec(pretraining((m,)), store)
        for name, weight in alone.weights().items():
            torch.testing.assert_close(weight[0], stacked.weights()[name][m], atol=1e-4, rtol=0)
        np.testing.assert_allclose(alone.curves.loss, stacked.curves[stacked.curves.seed == m].loss, rtol=1e-4)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights with which stacks begin at each learning rate, from now on."""
    found, begin = [], ToyTraining.begin

    def noting(self: ToyTraining) -> None:
        begin(self)
        found.append({k: v.clone() for k, v in self.stack.state_dict().items()})

    monkeypatch.setattr(ToyTraining, "begin", noting)
    return found


def test_labels_start_at_the_pretrained_encoder_and_a_head_of_their_own(tmp_path: Path, begun: list[dict[str, torch.Tensor]]) -> None:
    store = Store(tmp_path)
    given = run_spec(pretraining(), store).weights()
    for step in (None, 4):
        begun.clear()
        run_spec(labels(init=Start(pretraining(), step)), store)
        source = toy_weights(given, 1e-2, step)
        assert len(begun) == 2
        for start in begun:  # one for each learning rate
            assert all(torch.equal(start[k], source[k]) for k in ("embed", "query", "key", "value", "out"))
            assert torch.equal(start["head"], ToyStack(NARROW, 16, (0, 1), "labels").head) and not torch.equal(start["head"], source["head"])


@pytest.mark.parametrize("groups", [("QK",), ("VO", "embed"), ("embed",)])
def test_only_the_parts_that_are_named_are_copied(groups: tuple[str, ...], tmp_path: Path, begun: list[dict[str, torch.Tensor]]) -> None:
    store = Store(tmp_path)
    source = toy_weights(run_spec(pretraining(), store).weights(), 1e-2)
    begun.clear()
    run_spec(labels(lrs=(0.1,), init=Start(pretraining(), groups=groups)), store)
    fresh = ToyStack(NARROW, 16, (0, 1), "labels").state_dict()
    copied = {"QK": {"query", "key"}, "VO": {"value", "out"}, "embed": {"embed"}}
    expected = set().union(*(copied[g] for g in groups))
    assert {k for k, v in begun[0].items() if not torch.equal(v, fresh[k])} == expected
    assert all(torch.equal(begun[0][k], source[k]) for k in expected)


@pytest.mark.parametrize("groups", [("QK",), ("encoder",)])
def test_a_start_that_takes_only_the_size_keeps_the_random_directions(groups: tuple[str, ...], tmp_path: Path, begun: list[dict[str, torch.Tensor]]) -> None:
    """Each matrix of each model is a multiple of the random one, with the norm of the pretrained one."""
    store = Store(tmp_path)
    source = toy_weights(run_spec(pretraining(), store).weights(), 1e-2)
    begun.clear()
    run_spec(labels(lrs=(0.1,), init=Start(pretraining(), groups=groups, take="size")), store)
    fresh = ToyStack(NARROW, 16, (0, 1), "labels").state_dict()
    for name, drawn in fresh.items():
        if name not in TOY_GROUPS[groups[0]]:
            assert torch.equal(begun[0][name], drawn)
            continue
        for m in range(2):
            ratio = begun[0][name][m] / drawn[m]
            assert ratio.max().item() == pytest.approx(ratio.min().item(), rel=1e-4) and abs(ratio.mean().item() - 1) > 1e-3
            assert begun[0][name][m].square().sum().item() == pytest.approx(source[name][m].square().sum().item(), rel=1e-4)


def test_one_model_that_diverges_does_no_harm_to_another(tmp_path: Path) -> None:
    wild, calm = (run_spec(labels(lrs=lrs), Store(tmp_path)) for lrs in ((1e-1, 99.0), (1e-1,)))
    assert wild.facts["outcome"].endswith("of 4 models diverged") and calm.facts["outcome"] == "finished"
    assert wild.curves[wild.curves.lr == 99.0].loss.isna().any()
    for name, weight in calm.weights().items():
        assert torch.equal(weight, wild.weights()[name])


@pytest.mark.parametrize("spec", [pretraining(), labels(lrs=(0.1, 0.5), optimiser="AdamW"), labels()], ids=lambda s: s.label())
def test_a_toy_run_that_is_stopped_goes_on_bit_for_bit(spec: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in each epoch once, it ends with the weights and curves of a run that was not."""
    whole = run_spec(spec, Store(tmp_path / "whole"))
    epoch, stops = ToyTraining.one_epoch, []

    def stopping(self: ToyTraining) -> None:
        place = (self.i_lr, self.epoch)
        if place not in stops:
            stops.append(place)
            raise KeyboardInterrupt
        epoch(self)

    monkeypatch.setattr(ToyTraining, "one_epoch", stopping)
    for _ in range(spec.budget.epochs * len(spec.lrs)):
        with pytest.raises(KeyboardInterrupt):
            run_spec(spec, Store(tmp_path / "stopped"), checkpoint_every=0)
    stopped = run_spec(spec, Store(tmp_path / "stopped"), checkpoint_every=0)
    assert len(stops) == spec.budget.epochs * len(spec.lrs) and len(stopped.facts["sessions"]) > len(stops) - len(spec.lrs)
    assert stopped.curves.equals(whole.curves)
    assert whole.weights().keys() == stopped.weights().keys()
    assert all(torch.equal(v, stopped.weights()[k]) for k, v in whole.weights().items())


def test_pretraining_sees_no_label(tmp_path: Path) -> None:
    """Other labels, and other labelled sequences, change nothing."""
    seen, other = (run_spec(pretraining(data=data), Store(tmp_path)) for data in (SMALL, replace(SMALL, flipped=0.5, n_train=8, n_test=4)))
    assert seen.key != other.key and seen.curves.equals(other.curves)
    assert all(torch.equal(w, other.weights()[k]) for k, w in seen.weights().items())


# The page


def test_measures_of_locality_by_hand() -> None:
    """Against loops over the definition."""
    scores = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(0)).double()
    weights = scores.softmax(-1)
    found = locality(weights, scores, within=2)
    for m in range(2):
        a, s = weights[m].numpy(), scores[m].numpy()
        away = np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
        assert found["distance"][m] == pytest.approx(np.mean([sum(a[i, j] * away[i, j] for j in range(9)) for i in range(9)]))
        assert found["near"][m] == pytest.approx(np.mean([sum(a[i, j] for j in range(9) if away[i, j] <= 2) for i in range(9)]))
        assert found["diagonal"][m] == pytest.approx(np.mean([away[i, a[i].argmax()] <= 2 for i in range(9)]))
        centred = [m - m.mean(1, keepdims=True) for m in (s, -away)]
        assert found["correlation"][m] == pytest.approx(np.corrcoef(*(c.ravel() for c in centred))[0, 1])


def test_the_page_asks_for_the_papers_budget(root: Path) -> None:
    full = comparisons("laptop")
    assert full == comparisons("paper")
    main = full["SGD, batch 25"]
    source = main.SPT.init.source
    assert (source.n_sequences, source.budget.epochs, main.scratch.n_sequences, main.scratch.budget.epochs, len(main.scratch.seeds)) == (
        12_000,
        10,
        100,
        20,
        10,
    )
    for pair in full.values():
        assert isinstance(pair, Comparison) and replace(pair.SPT, init=None) == pair.scratch and pair.SPT.init.step is None
    assert list(from_snapshots("laptop")) == [*source.snapshots, source.steps]
    asked = page_runs(root / "nbs" / "05_toy.ipynb", {"profile": "smoke"})
    assert asked == planned_runs("smoke")


def test_a_plan_prices_toy_runs_too(tmp_path: Path) -> None:
    main = comparisons("smoke")["SGD, batch 25"]
    plan = plan_runs([main.scratch, Portrait(*main)], Store(tmp_path))
    assert plan.runs == 4 and plan.seconds > 0
    assert plan.flops == sum(s.flops() for s in (main.scratch, main.SPT, main.SPT.init.source))


def test_a_portrait_is_published_with_its_weights(tmp_path: Path) -> None:
    """Whoever has only what is published can draw its figures; the other runs are published without weights."""
    start = Start(pretraining())
    portrait = Portrait(labels(), labels(init=start))
    store = Store(tmp_path / "runs", tmp_path / "results")
    for spec in with_sources([portrait]):
        run_spec(spec, store)
    assert publish(store, with_sources([portrait])) == (4, 0)
    reader = Store(tmp_path / "none", tmp_path / "results")
    own = reader.find(key_of(portrait), weights=True)
    assert own and reader.find(key_of(start.source), weights=True) is None and reader.find(key_of(start.source))
    stages = {"pretraining/0", "pretraining/4", "pretraining/9", "finetuned/9", "scratch/0", "scratch at its best/0"}
    assert {name.rpartition("/")[0] for name in own.weights()} == stages | {
        "by offset/pretraining",
        "by offset/finetuned",
        "by offset/scratch",
        "by offset/scratch at its best",
    }
    assert all(len(w) == (2 if name.startswith("by offset") else 1) for name, w in own.weights().items())
    assert set(own.curves.seed) == {0, 1} and set(own.curves.input) == {"sequences", "positions only"}


def test_a_portrait_measures_the_models_that_were_trained(tmp_path: Path) -> None:
    """The first seed's finetuned model, taken from the run itself, has the measures that the portrait says."""
    portrait = Portrait(labels(), labels(init=Start(pretraining())))
    store = Store(tmp_path)
    for spec in with_sources([portrait]):
        run_spec(spec, store)
    record = store.find(key_of(portrait), weights=True)
    rows = record.curves.query("stage == 'finetuned' and input == 'sequences' and seed == 1")
    stack = ToyStack(NARROW, 16, (0, 1), "labels")
    stack.load_state_dict(toy_weights(store.find(key_of(portrait.finetuning)).weights(), rows.lr.item()))
    x = torch.stack([seed_data(SMALL, seed).val[:20] for seed in (0, 1)])
    with torch.no_grad():
        _, weights, scores = stack.attend(stack.embedded(x))
    for name, value in locality(weights, scores).items():
        assert rows[name].item() == pytest.approx(value[1].mean().item(), abs=1e-6)
    assert torch.equal(record.weights()["finetuned/9/query"][0], stack.query[0])
    scratch = store.find(key_of(portrait.scratch))
    best = max(portrait.scratch.lrs, key=lambda lr: scratch.curves[(scratch.curves.lr == lr) & (scratch.curves.step == portrait.scratch.steps)].val_acc.mean())
    assert set(record.curves[record.curves.stage == "scratch at its best"].lr) == {best}
    assert torch.equal(record.weights()["scratch at its best/0/query"][0], toy_weights(scratch.weights(), best)["query"][0])


def test_the_published_toy_runs_are_what_the_code_gives(tmp_path: Path, root: Path) -> None:
    """The first epochs of a published run, trained again; other processors may differ in the last digits."""
    spec, published = comparisons("laptop")["SGD, batch 25"].scratch, Store(tmp_path, root / "results")
    record = published.find(key_of(spec))
    assert record, "the code has changed since: reproduce 05_toy at laptop, and publish it"
    again = run_spec(replace(spec, budget=replace(spec.budget, epochs=2, eval_every=2), lrs=spec.lrs[-2:-1]), published)
    same = again.curves.merge(record.curves, on=["lr", "seed", "step"], suffixes=("", " published"))
    assert len(same) == 2 * len(spec.seeds)
    np.testing.assert_allclose(same.loss, same["loss published"], rtol=1e-3)
    scores = at_chosen(record.curves)
    assert len(scores) == len(spec.seeds) and scores.lr.nunique() == 1
