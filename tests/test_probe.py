"""The probe of gradients with respect to attention scores, against finite differences and the proposition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spt_nbdev.images import DigitsTask
from spt_nbdev.model import ModelConfig
from spt_nbdev.probe import ToyProbe, batch_losses, proximity, read_gradients, score_gradients
from spt_nbdev.spt import Classification, Reconstruction
from spt_nbdev.theory import double_centred
from spt_nbdev.toymodel import ToyModel, ToyStack
from spt_nbdev.toytraining import ToyRun
from spt_nbdev.train import Budget
from spt_nbdev.trajectories import Trajectories, stacked_data

DATA = Trajectories(n_train=20, n_val=100, n_test=100, n_unlabelled=60, length=16)


def toy_probe(**changes: object) -> ToyProbe:
    model = ToyModel(d_model=16, **changes)
    scratch = ToyRun(DATA, model, Budget(2, batch_size=10), (0.1,), (0, 1, 2), snapshots=(0,))
    return ToyProbe(scratch, replace(scratch, budget=Budget(2, batch_size=20), mask_ratio=0.5), batch_size=25)


def untrained(probe: ToyProbe, how: str) -> ToyStack:
    return ToyStack(probe.scratch.model, DATA.length, probe.scratch.seeds, "labels" if how == "labels" else "SPT")


@pytest.mark.parametrize("objective", [Classification(), Reconstruction()])
def test_the_gradient_is_the_change_of_the_loss(objective: Classification | Reconstruction) -> None:
    """Each head's own, against finite differences in float64 along a random direction."""
    task = DigitsTask().load()
    torch.manual_seed(0)
    model = objective.build(ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=16), task.shape).double()
    batch = task.train.rows(slice(16))
    direction = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction[1] = 0
    torch.set_default_dtype(torch.float64)
    try:
        form = task.form
        object.__setattr__(task, "form", DoubleForm(form))
        gradient = score_gradients(batch_losses(model, objective, task, [batch], 0), (2, 64, 64))[0]
        values = [next(batch_losses(model, objective, task, [batch], 0))(sign * 1e-4 * direction).item() for sign in (1, -1)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert (gradient * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4)
    assert gradient[1].abs().max() > 0


class DoubleForm:
    """A form whose numbers are float64."""

    def __init__(self, form: object) -> None:
        self.form, self.loss = form, form.loss

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        return self.form.inputs(x).double()

    def targets(self, x: torch.Tensor) -> torch.Tensor:
        return self.inputs(x)

    def hide(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.form.hide(inputs, mask)


def test_what_is_read_off_by_hand() -> None:
    gradients = torch.randn(6, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    direction = proximity(9)
    found = read_gradients(gradients, direction)
    for m in range(2):
        g = gradients[:, m].numpy()
        pulls = np.array([-(b * direction.numpy()).sum() for b in g])
        assert found["pull"][m] == pytest.approx(pulls.mean(), rel=1e-5)
        assert found["signal_to_noise"][m] == pytest.approx(pulls.mean() / pulls.std(ddof=1), rel=1e-4)
        even, odd = g[::2].mean(0), g[1::2].mean(0)
        h = np.eye(9) - 1 / 9
        assert found["squared_norm"][m] == pytest.approx((even * odd).sum(), rel=1e-4)
        assert found["blind_share"][m] == pytest.approx(((h @ even @ h) * (h @ odd @ h)).sum() / (even * odd).sum(), rel=1e-3)


def test_the_direction_is_one_that_labels_cannot_see() -> None:
    for direction in (proximity(20), proximity(16, side=4)):
        assert direction.sum(0).abs().max() < 1e-5 and direction.sum(1).abs().max() < 1e-5
        assert direction.norm().item() == pytest.approx(1) and direction.diagonal().min() > 0
        torch.testing.assert_close(double_centred(direction), direction)


def test_near_uniform_attention_labels_see_column_sums_only() -> None:
    """The proposition, in the toy model as it starts, with its queries and keys made small: and with a residual and no other change, too."""
    for changes in ({}, {"residual": True}):
        probe = toy_probe(**changes)
        stack = untrained(probe, "labels")
        with torch.no_grad():
            stack.query.mul_(1e-3)
        labels = read_gradients(score_gradients(probe.losses("labels", stack, stacked_data(DATA, (0, 1, 2))), (3, 16, 16)), proximity(16))
        assert labels["blind_share"].abs().max() < 1e-3


def test_reconstruction_sees_where_labels_are_blind() -> None:
    """With values that are the inputs and a head that reads them, reconstruction pulls towards neighbours, as the proposition says."""
    probe = toy_probe(positions="none")
    stack = untrained(probe, "SPT")
    with torch.no_grad():
        for weight in (stack.embed, stack.value, stack.out, stack.head, stack.query):
            weight.zero_()
        stack.embed[:, 0, 0] = stack.embed[:, 1, 1] = 1
        stack.value[:] = stack.out[:] = torch.eye(16)
        stack.head[:, 0, 0] = stack.head[:, 1, 1] = 1
    found = read_gradients(score_gradients(probe.losses("SPT", stack, stacked_data(DATA, (0, 1, 2))), (3, 16, 16)), proximity(16))
    assert (found["pull"] > 0).all() and (found["signal_to_noise"] > 1).all() and (found["blind_share"] > 0.5).all()


def test_stacked_toy_models_have_gradients_of_their_own() -> None:
    probe = toy_probe()
    whole = score_gradients(probe.losses("labels", untrained(probe, "labels"), stacked_data(DATA, (0, 1, 2))), (3, 16, 16))
    one = ToyProbe(replace(probe.scratch, seeds=(1,)), replace(probe.pretraining, seeds=(1,)), batch_size=25)
    alone = score_gradients(one.losses("labels", ToyStack(one.scratch.model, DATA.length, (1,), "labels"), stacked_data(DATA, (1,))), (1, 16, 16))
    torch.testing.assert_close(alone[:, 0], whole[:, 1], atol=1e-7, rtol=1e-3)
