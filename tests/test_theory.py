"""The theory's formulas against autograd and finite differences on random data, and against wrong constants planted in their code."""

import inspect
import itertools
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spt_nbdev import theory

LENGTH, WIDTH, N = 6, 3, 15


class Case:
    """Random data, labels, a loss and a pattern, none of them special."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        mixing, noise, means = self.randn(LENGTH, LENGTH), self.randn(N, LENGTH, WIDTH), self.randn(LENGTH, WIDTH)
        self.x = torch.einsum("st,ntd->nsd", mixing, noise) + means
        self.y, self.direction = self.randn(N).sign(), self.randn(WIDTH)
        self.pattern = self.randn(LENGTH, LENGTH)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def loss(self, h: Tensor) -> Tensor:
        """Logistic, with a bowl, so that its second derivative is no multiple of one direction."""
        return F.softplus(-self.y * (h @ self.direction)) + 0.1 * h.square().sum(-1) ** 2


def softmax(scores: Tensor) -> Tensor:
    """By hand, so that the code under test isn't what it is compared with."""
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def of_labels(case: Case, weights: Tensor, values: Tensor | None = None) -> Tensor:
    return case.loss(torch.einsum("...ij,njd->nid", weights, case.x if values is None else values).mean(1)).mean()


def of_spt(case: Case, weights: Tensor, values: Tensor | None = None) -> Tensor:
    mixed = torch.einsum("ij,njd->nid", weights, case.x if values is None else values)
    return sum((case.x[:, i] - mixed[:, i]).square().sum(-1).mean() for i in range(LENGTH)) / (2 * LENGTH)


def derivative(f: Callable[[Tensor], Tensor], order: int = 1, at: float = 0.0) -> Tensor:
    alpha = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    value = f(alpha)
    for _ in range(order):
        (value,) = torch.autograd.grad(value, alpha, create_graph=True)
    return value.detach()


def central_difference(f: Callable[[float], Tensor], step: float = 1e-5) -> Tensor:
    return (f(step) - f(-step)) / (2 * step)


def gradient(f: Callable[[Tensor], Tensor], size: int) -> Tensor:
    return torch.autograd.functional.jacobian(f, torch.zeros(size, size, dtype=torch.float64))


def without_own_step(scores: Tensor) -> Tensor:
    weights = scores.exp() * (1 - torch.eye(LENGTH, dtype=torch.float64))
    return weights / weights.sum(-1, keepdim=True)


# What each formula says, in code that is given (it can be a spoilt copy), beside the truth


def weights(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.row_centred(c.pattern) / LENGTH, torch.stack([derivative(lambda a, k=k: softmax(a * c.pattern).flatten()[k]) for k in range(LENGTH**2)]).view(
        LENGTH, LENGTH
    )


def losses(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    w, values = softmax(c.pattern), c.x.flip(0)
    found = [t.label_loss(w, c.x, c.loss), t.spt_loss(w, c.x), t.spt_loss(w, c.x, values)]
    return torch.stack(found), torch.stack([of_labels(c, w), of_spt(c, w), of_spt(c, w, values)])


def attention(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    found = [t.attention_along(c.pattern, 0.7), t.attention_along(c.pattern, 0.7, own_step=False)]
    return torch.stack(found), torch.stack([softmax(0.7 * c.pattern), without_own_step(0.7 * c.pattern)])


def label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.label_slope(c.pattern, t.label_pull(c.x, c.loss)), derivative(lambda a: of_labels(c, softmax(a * c.pattern)))


def spt_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.spt_slope(c.pattern, t.inner_products(c.x)), derivative(lambda a: of_spt(c, softmax(a * c.pattern)))


def label_score_gradient(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.label_score_gradient(t.label_pull(c.x, c.loss)), gradient(lambda s: of_labels(c, softmax(s)), LENGTH)


def spt_score_gradient(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.spt_score_gradient(t.inner_products(c.x)), gradient(lambda s: of_spt(c, softmax(s)), LENGTH)


def visible_share(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    """By projection on an orthonormal basis of the matrices whose rows are all alike and sum to 0."""
    basis = torch.linalg.svd(torch.eye(LENGTH, dtype=torch.float64) - 1 / LENGTH)[2][: LENGTH - 1]
    rows = c.pattern - c.pattern.mean(1, keepdim=True)
    seen = sum((rows * b.expand(LENGTH, -1) / math.sqrt(LENGTH)).sum() ** 2 for b in basis)
    return t.visible_share(c.pattern), seen / rows.square().sum()


def masked_label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.masked_label_slope(c.pattern, t.label_pull(c.x, c.loss)), derivative(lambda a: of_labels(c, without_own_step(a * c.pattern)))


def masked_spt_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.masked_spt_slope(c.pattern, t.inner_products(c.x)), derivative(lambda a: of_spt(c, without_own_step(a * c.pattern)))


def hidden_spt_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    """The truth is the mean over all 64 masks."""
    hidden = 0.3

    def expected(alpha: Tensor) -> Tensor:
        w, total = softmax(alpha * c.pattern), 0.0
        for mask in itertools.product((False, True), repeat=LENGTH):
            chance = hidden ** sum(mask) * (1 - hidden) ** (LENGTH - sum(mask))
            shown = c.x * (~torch.tensor(mask))[:, None]
            errors = [(c.x[:, i] - torch.einsum("j,njd->nd", w[i], shown)).square().sum(-1).mean() for i in range(LENGTH) if mask[i]]
            total = total + chance * sum(errors) / hidden / (2 * LENGTH)
        return total

    return t.hidden_spt_slope(c.pattern, t.inner_products(c.x), hidden), derivative(expected)


def label_curvature(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.label_curvature(c.pattern, c.x, c.loss), derivative(lambda a: of_labels(c, softmax(a * c.pattern)), order=2)


def spt_curvature(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.spt_curvature(c.pattern, c.x), derivative(lambda a: of_spt(c, softmax(a * c.pattern)), order=2)


def row_label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    return t.row_label_slope(c.pattern, t.label_pull(c.x, c.loss), 2), derivative(
        lambda a: c.loss(torch.einsum("j,njd->nd", softmax(a * c.pattern)[2], c.x)).mean()
    )


def max_label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    """By autograd a little to the right of the kink."""
    return t.max_label_slope(c.pattern, c.x, c.loss), derivative(lambda a: c.loss((softmax(a * c.pattern) @ c.x).amax(1)).mean(), at=1e-8)


def residual_label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    mixing = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)

    def after(h: Tensor) -> Tensor:
        return F.layer_norm(h, (WIDTH,)) + F.gelu(h @ mixing)

    return t.residual_label_slope(c.pattern, c.x, after, c.loss), derivative(lambda a: c.loss(after(c.x + softmax(a * c.pattern) @ c.x).mean(1)).mean())


def values_spt_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    values = (c.x + torch.linspace(0, 1, LENGTH, dtype=torch.float64)[:, None]).flip(-1) * 0.7
    return t.values_spt_slope(c.pattern, c.x, values), derivative(lambda a: of_spt(c, softmax(a * c.pattern), values))


def content_label_slope(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    patterns = torch.einsum("nid,njd->nij", c.x.roll(1, -1), c.x)
    truth = derivative(lambda a: c.loss(torch.einsum("nij,njd->nid", softmax(a * patterns), c.x).mean(1)).mean())
    return t.content_label_slope(patterns, c.x, c.loss), truth


def positional_label_gradient(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    p = c.pattern[:, :4]
    return t.positional_label_gradient(p, t.label_pull(c.x, c.loss)), gradient(lambda m: of_labels(c, softmax(p @ m @ p.T / 2)), 4)


def positional_spt_gradient(t: ModuleType, c: Case) -> tuple[Tensor, Tensor]:
    p = c.pattern[:, :4]
    return t.positional_spt_gradient(p, t.inner_products(c.x)), gradient(lambda m: of_spt(c, softmax(p @ m @ p.T / 2)), 4)


Claim = Callable[[ModuleType, Case], tuple[Tensor, Tensor]]
# Claim; function, and a piece of its code with what is planted in its place.
PLANTS: list[tuple[Claim, str, str, str]] = [
    (attention, "attention_along", "alpha * pattern", "pattern"),
    (attention, "attention_along", "if not own_step", "if own_step"),
    (losses, "spt_loss", "2 * x.shape[1]", "x.shape[1]"),
    (losses, "label_loss", ".mean(1)", ".sum(1)"),
    (weights, "row_centred", "pattern - pattern.mean(-1, keepdim=True)", "pattern"),
    (label_slope, "label_slope", "len(pull) ** 2", "len(pull)"),
    (label_slope, "row_centred", "pattern - pattern.mean(-1, keepdim=True)", "pattern"),
    (label_slope, "column_sums", ".sum(-2)", ".sum(-1)"),
    (label_slope, "label_pull", " / len(x)", ""),
    (spt_slope, "spt_slope", "len(products) ** 2", "len(products)"),
    (spt_slope, "spt_slope", "return -", "return "),
    (spt_slope, "double_centred", "rows - rows.mean(-2, keepdim=True)", "rows"),
    (spt_slope, "inner_products", " / len(x)", ""),
    (label_score_gradient, "label_score_gradient", "len(pull) ** 2", "len(pull)"),
    (label_score_gradient, "label_score_gradient", "(pull - pull.mean())", "pull"),
    (spt_score_gradient, "spt_score_gradient", "len(products) ** 2", "len(products)"),
    (spt_score_gradient, "spt_score_gradient", "double_centred", "row_centred"),
    (visible_share, "visible_share", "len(pattern) * ", "len(pattern) ** 2 * "),
    (visible_share, "visible_share", "row_centred(pattern)", "pattern"),
    (masked_label_slope, "masked_label_slope", "(len(pull) * (len(pull) - 1))", "len(pull) ** 2"),
    (masked_label_slope, "off_diagonal_centred", "/ (len(pattern) - 1)", "/ len(pattern)"),
    (masked_spt_slope, "masked_spt_slope", "(len(products) - 1) ** 2", "len(products) ** 2"),
    (masked_spt_slope, "masked_spt_slope", "(others - others.mean(0))", "others"),
    (masked_spt_slope, "off_diagonal_centred", "others * (pattern - ", "(pattern - "),
    (hidden_spt_slope, "hidden_spt_slope", "(1 + visible / length)", "1"),
    (hidden_spt_slope, "hidden_spt_slope", "length**3", "length**2"),
    (hidden_spt_slope, "hidden_spt_slope", "hidden * products.diagonal()", "products.diagonal()"),
    (hidden_spt_slope, "hidden_spt_slope", ".fill_diagonal_(0)", ""),
    (label_curvature, "label_curvature", "length**4", "length**3"),
    (label_curvature, "label_curvature", "rows.square().sum() / length", "rows.square().sum()"),
    (label_curvature, "label_curvature", "length**2", "length"),
    (spt_curvature, "spt_curvature", "(rows.square() - rows.square().mean(-1, keepdim=True))", "rows.square()"),
    (spt_curvature, "spt_curvature", "rows @ x / length", "rows @ x"),
    (row_label_slope, "row_label_slope", "/ len(pull)", "/ len(pull) ** 2"),
    (max_label_slope, "max_label_slope", "/ len(pattern)", "/ len(pattern) ** 2"),
    (max_label_slope, "max_label_slope", "amax", "mean"),
    (residual_label_slope, "residual_label_slope", "x + x.mean(1, keepdim=True)", "x"),
    (residual_label_slope, "residual_label_slope", "loss_gradient(out.mean(1), loss)", "loss_gradient(x.mean(1), loss)"),
    (values_spt_slope, "values_spt_slope", ".mean(1)", ".sum(1)"),
    (values_spt_slope, "values_spt_slope", "among - ", "-"),
    (values_spt_slope, "values_spt_slope", "len(pattern) ** 2", "len(pattern)"),
    (content_label_slope, "content_label_slope", "x.shape[1] ** 2", "x.shape[1]"),
    (content_label_slope, "column_sums", "row_centred(pattern)", "pattern"),
    (positional_label_gradient, "positional_label_gradient", "math.sqrt(d)", "d"),
    (positional_label_gradient, "positional_label_gradient", "(pull - pull.mean())", "pull"),
    (positional_spt_gradient, "positional_spt_gradient", "math.sqrt(positions.shape[1])", "positions.shape[1]"),
]
CLAIMS = list(dict.fromkeys(claim for claim, *_ in PLANTS))


def gap(claim: Claim, code: ModuleType, seed: int) -> float:
    """How far the formula is from the truth, relative to the truth's largest entry."""
    formula, truth = claim(code, Case(seed))
    return ((formula - truth).abs().max() / truth.abs().max()).item()


def planted(function: str, old: str, new: str) -> ModuleType:
    """A copy of the module in which one piece of one function is another."""
    source, part = inspect.getsource(theory), inspect.getsource(getattr(theory, function))
    assert part.count(old) == 1, f"{function} has {old!r} {part.count(old)} times, not once"
    code = ModuleType("planted")
    exec(source.replace(part, part.replace(old, new)), vars(code))
    return code


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda f: f.__name__)
def test_formula_is_what_autograd_says(claim: Claim, seed: int) -> None:
    assert gap(claim, theory, seed) < (1e-6 if claim is max_label_slope else 1e-11)


@pytest.mark.parametrize(("claim", "function", "old", "new"), PLANTS, ids=[f"{claim.__name__}: {old} -> {new}" for claim, _, old, new in PLANTS])
def test_a_planted_constant_is_found(claim: Claim, function: str, old: str, new: str) -> None:
    assert gap(claim, planted(function, old, new), seed=0) > 1e-3


def test_every_exported_function_is_under_a_claim() -> None:
    """Spoilt, each function makes some claim fail; but for `usual_patterns` and `loss_gradient`, which have no constant."""
    functions = {name for name in theory.__all__ if inspect.isfunction(getattr(theory, name))}
    assert functions - {function for _, function, _, _ in PLANTS} == {"usual_patterns", "loss_gradient"}


@pytest.mark.parametrize("slope", [(theory.label_slope, theory.label_pull, of_labels), (theory.spt_slope, None, of_spt)], ids=["labels", "SPT"])
def test_slopes_are_those_of_finite_differences(slope: tuple) -> None:
    """Once without autograd at all."""
    formula, pull, loss = slope
    c = Case(3)
    seen = pull(c.x, c.loss) if pull else theory.inner_products(c.x)
    torch.testing.assert_close(formula(c.pattern, seen), central_difference(lambda a: loss(c, softmax(a * c.pattern))), rtol=1e-6, atol=1e-9)


# The proposition


@pytest.mark.parametrize("seed", range(5))
def test_labels_see_a_pattern_if_and_only_if_its_column_sums_differ(seed: int) -> None:
    c = Case(seed)
    blind = theory.double_centred(c.pattern) + c.randn(LENGTH, 1)  # numbers added to rows change nothing
    one_by_one = torch.autograd.functional.jacobian(lambda a: c.loss((softmax(a * blind) @ c.x).mean(1)), torch.tensor(0.0, dtype=torch.float64))
    assert one_by_one.abs().max() < 1e-13, "not one sequence has a slope"
    torch.testing.assert_close(
        derivative(lambda a: of_spt(c, softmax(a * blind))), -(theory.double_centred(blind) * theory.inner_products(c.x)).sum() / LENGTH**2
    )
    visible = blind.clone()
    visible[:, 0] += 0.1
    witness = theory.column_sums(visible)[:, None] * torch.ones(WIDTH, dtype=torch.float64)
    assert derivative(lambda a: (softmax(a * visible) @ witness).mean()) > 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_the_gradients_are_orthogonal_and_complementary(seed: int) -> None:
    c = Case(seed)
    labels, spt = gradient(lambda s: of_labels(c, softmax(s)), LENGTH), gradient(lambda s: of_spt(c, softmax(s)), LENGTH)
    assert abs((labels * spt).sum() / labels.norm() / spt.norm()) < 1e-14
    torch.testing.assert_close(labels, labels[:1].expand(LENGTH, -1))
    for sums in (labels.sum(1), spt.sum(1), spt.sum(0)):
        torch.testing.assert_close(sums, torch.zeros(LENGTH, dtype=torch.float64), atol=1e-14, rtol=0)


def test_a_law_that_shifts_leave_as_it_is_hides_every_pattern() -> None:
    c = Case(0)
    assert abs(derivative(lambda a: of_labels(c, softmax(a * c.pattern)))) > 1e-3, "without shifts it is visible"
    every = torch.cat([c.x.roll(k, 1) for k in range(LENGTH)])
    c.y = c.y.repeat(LENGTH)
    assert abs(theory.label_slope(c.pattern, theory.label_pull(every, c.loss))) < 1e-14
    assert abs(derivative(lambda a: of_labels(c, softmax(a * c.pattern), every))) < 1e-14


@pytest.mark.parametrize("alpha", [-3.0, 0.5, 20.0])
def test_circulant_patterns_are_invisible_everywhere(alpha: float) -> None:
    c = Case(0)
    circulant = torch.stack([c.pattern[0].roll(k) for k in range(LENGTH)])
    torch.testing.assert_close((theory.attention_along(circulant, alpha) @ c.x).mean(1), c.x.mean(1))
    other = circulant.clone()
    other[0] = other[0].roll(1)  # no longer circulant
    assert ((theory.attention_along(other, alpha) @ c.x).mean(1) - c.x.mean(1)).abs().max() > 1e-3


# Usual patterns


def test_shares_of_usual_patterns() -> None:
    """Known numbers; a ninth is the limit for minus the distance: the integrals of the columns and of the pattern are 1/180 and 1/20."""
    shares = {name: theory.visible_share(p).item() for name, p in theory.usual_patterns(100).items()}
    assert shares["minus distance"] == pytest.approx(1 / 9, abs=1e-4)
    assert shares["exponential"] == pytest.approx(2.5e-3, rel=0.02)
    assert shares["Gaussian"] == pytest.approx(2.2e-3, rel=0.02)
    assert max(shares["minus distance, doubly centred"], shares["minus circular distance"]) < 1e-25
    assert theory.visible_share(theory.usual_patterns(100, 3)["near or not"]) == pytest.approx(4e-4, rel=0.05)


def test_a_random_pattern_shows_one_part_in_its_length() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = [theory.visible_share(torch.randn(20, 20, generator=generator, dtype=torch.float64)).item() for _ in range(1000)]
    assert sum(shares) / 1000 == pytest.approx(1 / 20, rel=0.03)


def test_the_share_goes_from_none_to_all() -> None:
    c = Case(0)
    assert theory.visible_share(c.pattern[:1].expand(LENGTH, -1)) == pytest.approx(1)
    assert theory.visible_share(theory.double_centred(c.pattern)) < 1e-30
    torch.testing.assert_close(theory.visible_share(c.pattern), theory.visible_share(3 * c.pattern + c.randn(LENGTH, 1)))


@pytest.mark.parametrize("name", ["minus distance", "minus distance, doubly centred", "exponential", "Gaussian"])
def test_reconstruction_never_opposes_locality(name: str) -> None:
    """Whatever the data, even if neighbours are opposite; without the own step it does."""
    pattern, signs = theory.usual_patterns(LENGTH)[name], torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(LENGTH // 2)
    for products in [theory.inner_products(Case(seed).x) for seed in range(20)] + [torch.outer(signs, signs)]:
        assert theory.spt_slope(pattern, products) < 0
    assert theory.masked_spt_slope(pattern, torch.outer(signs, signs)) > 0
