"""The encoder against independent implementations with the same weights: torch's, transformers' and x-transformers'."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import RoFormerConfig, ViTConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding
from transformers.models.speecht5.modeling_speecht5 import SpeechT5ScaledPositionalEncoding
from transformers.models.vit.modeling_vit import ViTLayer
from x_transformers.x_transformers import AlibiPositionalBias, RotaryEmbedding, apply_rotary_pos_emb

from spt_nbdev.data import Shape, Split, Task, Tokens, Values, View
from spt_nbdev.model import Block, Encoder, ModelConfig, Reconstructor
from spt_nbdev.positions import Fire, Positions, alibi_slopes, angles, rotate, sinusoids
from spt_nbdev.spt import Classification, NextStep, Objective, Reconstruction, reconstruction_loss
from spt_nbdev.train import Budget, Optimiser, Training

SCHEMES = get_args(Positions)
TINY = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, tied_qkvo_init=False)
LENGTHS = torch.tensor([20, 7, 13])  # of three sequences of 20 steps
MASKS = [{}, {"causal": True}, {"padding_mask": True}, {"causal": True, "padding_mask": True}]


@pytest.fixture(autouse=True)
def seed_and_one_thread() -> Iterator[None]:
    """bfloat16 on a CPU is slow with more threads than idle cores."""
    torch.manual_seed(0)
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def shaken(module: nn.Module) -> nn.Module:
    """With weights that tell everything apart: norms that aren't 1, biases that aren't small, a FIRE whose threshold of 6 steps is passed."""
    for name, w in module.named_parameters():
        if name.endswith("threshold"):
            nn.init.constant_(w, 6 / 512)
        elif not name.endswith("squeeze"):
            w.data += 0.2 * torch.randn_like(w)
    return module


def encoder(**changes: object) -> Encoder:
    return shaken(Encoder(replace(TINY, **changes), channels=3, length=20))


@dataclass
class Stack:
    """Layers and a final norm."""

    layers: list[nn.Module]
    norm: nn.LayerNorm

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# Weights of a block of ours, or their gradients, under the names of others.

Of = Callable[[Tensor], Tensor]


def ours(block: nn.Module, of: Of) -> dict[str, Tensor]:
    return {name: of(w) for name, w in block.named_parameters()}


def renamed(names: Mapping[str, str]) -> Callable[[Block, Of], dict[str, Tensor]]:
    """The first pattern that fits decides."""

    def layout(block: Block, of: Of) -> dict[str, Tensor]:
        def new(name: str) -> str:
            return next(re.sub(old, there, name) for old, there in names.items() if re.match(old, name))

        return {new(name): w for name, w in ours(block, of).items()}

    return layout


def as_torch(block: Block, of: Of) -> dict[str, Tensor]:
    """torch keeps Q, K and V in one matrix."""
    w = ours(block, of)
    fused = {f"self_attn.in_proj_{kind}": torch.cat([w.pop(f"attention.{part}.{kind}") for part in ("query", "key", "value")]) for kind in ("weight", "bias")}
    names = {"attention.out": "self_attn.out_proj", "mlp.0": "linear1", "mlp.2": "linear2", "attention_norm": "norm1", "mlp_norm": "norm2"}
    return fused | {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value for name, value in w.items()}


as_vit = renamed({
    "attention.query": "attention.q_proj", "attention.key": "attention.k_proj", "attention.value": "attention.v_proj", "attention.out": "attention.o_proj",
    "attention_norm": "layernorm_before", "mlp_norm": "layernorm_after", r"mlp\.0": "mlp.fc1", r"mlp\.2": "mlp.fc2",
})  # fmt: skip
as_roformer = renamed({r"attention\.out": "out", r"attention\.fire": "fire", r"mlp\.0": "up", r"mlp\.2": "down", "": ""})


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: w.grad for name, w in module.named_parameters()}


def same_gradients(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """To 1e-4 of the largest gradient of each tensor; those that are 0 but for rounding, of key biases, to 1e-5."""
    assert expected.keys() == found.keys()
    for name, wanted in expected.items():
        error = (found[name] - wanted).abs().max()
        assert error <= 1e-4 * max(0.1, wanted.abs().max()), f"gradient of {name}: off by {error}"


def check_parity(model: Encoder, others: nn.Module | Stack, theirs: Callable[[Tensor], Tensor], layout: Callable[[Block, Of], dict[str, Tensor]]) -> None:
    """Copy the weights, then compare outputs and gradients at the steps before the padding; `theirs` is a function of embedded steps."""
    pairs = list(zip(model.blocks, others.layers, strict=True))
    embed = copy.deepcopy(model.embed)
    for block, layer in pairs:
        layer.load_state_dict(layout(block, lambda w: w.detach().clone()))
    others.norm.load_state_dict(model.norm.state_dict())
    x, weights = torch.randn(3, 20, 3), torch.randn(3, 20, 16)
    real = torch.arange(20) < LENGTHS[:, None] if model.config.padding_mask else torch.ones(3, 20, dtype=torch.bool)
    mine, given = model(x, LENGTHS)[real], theirs(embed(x))[real]
    torch.testing.assert_close(mine, given, atol=1e-5, rtol=0)
    (mine * weights[real]).sum().backward(), (given * weights[real]).sum().backward()
    for block, layer in pairs:
        same_gradients(layout(block, lambda w: w.grad), gradients(layer))
    for own, copied in ((model.norm, others.norm), (model.embed, embed)):
        same_gradients(gradients(own), gradients(copied))


# The parts of the schemes, by others.


def added(model: Encoder) -> Tensor:
    """What is added to the input."""
    if model.config.uses("sinusoidal"):
        return SpeechT5ScaledPositionalEncoding(0.0, model.config.d_model)(torch.zeros(1, 20, model.config.d_model))
    return model.positions.detach() if model.config.uses("learned") else torch.zeros(20, model.config.d_model)


def alibi(n_heads: int, length: int) -> Tensor:
    return AlibiPositionalBias(n_heads)(length, length)


def hidden_ahead(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def hidden_padding(length: int) -> Tensor:
    """0 or minus infinity for each key, (3, length)."""
    return torch.stack([torch.tensor([0.0] * n + [-math.inf] * (length - n)) for n in LENGTHS.tolist()])


class PublishedFire(nn.Module):
    """The listing of Li et al. 2024, in other words: one query at a time."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, n_heads))
        self.squeeze = nn.Parameter(torch.tensor(0.1))
        self.threshold = nn.Parameter(torch.tensor(1.0))

    def forward(self, length: int) -> Tensor:
        def psi(steps: Tensor) -> Tensor:
            return torch.log(torch.abs(self.squeeze * steps) + 1)

        rows = []
        for i in range(length):
            normaliser = psi(torch.maximum(torch.tensor(float(i)), torch.abs(self.threshold * 512)))
            rows.append(self.mlp((psi(torch.arange(i, i - length, -1.0)) / (normaliser + 1e-6))[:, None]))
        return torch.stack(rows).permute(2, 0, 1)


def torch_stack(config: ModelConfig) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(config.d_model, config.n_heads, config.d_ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, config.n_layers, nn.LayerNorm(config.d_model), enable_nested_tensor=False)


class RoFormerBlock(nn.Module):
    """A pre-norm block around RoFormer's attention, which takes RoPE and a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.config = config.d_model, config
        sizes = RoFormerConfig(hidden_size=d, num_attention_heads=config.n_heads, attention_probs_dropout_prob=0.0, rotary_value=False)
        self.attention, self.out = RoFormerSelfAttention(sizes), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.d_ff), nn.Linear(config.d_ff, d)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        if config.uses("fire"):
            self.fire = PublishedFire(config.n_heads)

    def forward(self, x: Tensor) -> Tensor:
        length, bias, turns = x.shape[1], torch.zeros(1, 1, 1, 1), None
        if self.config.uses("alibi"):
            bias = bias + alibi(self.config.n_heads, length)
        if self.config.uses("fire"):
            bias = bias + self.fire(length)
        if self.config.causal:
            bias = bias + hidden_ahead(length)
        if self.config.padding_mask:
            bias = bias + hidden_padding(length)[:, None, None]
        if self.config.uses("rope"):
            table = RoFormerSinusoidalPositionalEmbedding(length, self.config.d_model // self.config.n_heads)
            turns = table.create_weight()[None, None]
        x = x + self.out(self.attention(self.attention_norm(x), bias, turns)[0])
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


# The tests.


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned", "alibi", "sinusoidal+alibi"])
def test_the_encoder_is_torchs(positions: Positions, masks: dict[str, bool]) -> None:
    model, n_heads = encoder(positions=positions, n_heads=4, **masks), 4
    stack, mask, padding = torch_stack(model.config), torch.zeros(n_heads, 20, 20), None
    if model.config.uses("alibi"):
        mask = mask + alibi(n_heads, 20)
    if model.config.causal:
        mask = mask + hidden_ahead(20)
    if model.config.padding_mask:
        padding = hidden_padding(20)
    check_parity(model, stack, lambda x: stack(x + added(model), mask.repeat(3, 1, 1), padding), as_torch)


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
def test_the_encoder_is_a_vision_transformers(positions: Positions) -> None:
    model = encoder(positions=positions)
    sizes = ViTConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, layer_norm_eps=1e-5, attn_implementation="eager")
    stack = Stack([ViTLayer(sizes) for _ in model.blocks], nn.LayerNorm(16))
    check_parity(model, stack, lambda x: stack(x + added(model)), as_vit)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("positions", SCHEMES)
def test_every_scheme_is_that_of_others(positions: Positions, masks: dict[str, bool]) -> None:
    model = encoder(positions=positions, **masks)
    stack = Stack([RoFormerBlock(model.config) for _ in model.blocks], nn.LayerNorm(16))
    check_parity(model, stack, lambda x: stack(x + added(model)), as_roformer)


def test_learned_positions_get_the_gradient_of_what_they_are_added_to() -> None:
    model = encoder(positions="learned")
    model(torch.randn(3, 20, 3)).square().sum().backward()
    torch.testing.assert_close(model.positions.grad.sum(0), model.embed.bias.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [8, 64])
def test_angles_and_rotations_are_those_of_x_transformers(width: int) -> None:
    x = torch.randn(2, 3, 20, width)
    frequencies, scale = RotaryEmbedding(width).forward_from_seq_len(20)
    torch.testing.assert_close(rotate(x, angles(20, width)), apply_rotary_pos_emb(x, frequencies, scale), atol=1e-5, rtol=0)


def test_sinusoids_are_those_of_others() -> None:
    torch.testing.assert_close(sinusoids(1024, 64)[None], SpeechT5ScaledPositionalEncoding(0.0, 64)(torch.zeros(1, 1024, 64)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("n_heads", range(1, 17))
def test_slopes_are_those_of_others(n_heads: int) -> None:
    by_step = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(n_heads), by_step)
    torch.testing.assert_close(alibi_slopes(n_heads), -alibi(n_heads, 2)[:, 0, 1])


@pytest.mark.parametrize("start", [1.0, 6.0, 512.0])
def test_fire_is_as_published(start: float) -> None:
    fire = Fire(4)
    nn.init.constant_(fire.threshold, start / 512)
    published = PublishedFire(4)
    published.load_state_dict(fire.state_dict())
    torch.testing.assert_close(fire(20), published(20), atol=1e-5, rtol=0)


# Asking about some steps only.


@pytest.mark.parametrize("change", [{}, {"pool": "cls"}, {"padding_mask": True}, {"pool": "cls", "padding_mask": True}, {"causal": True, "padding_mask": True}])
@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize("hidden", ["some", "none in a row", "none"])
def test_asking_about_some_steps_changes_nothing(positions: Positions, change: dict[str, object], hidden: str) -> None:
    model = shaken(Reconstructor(replace(TINY, positions=positions, **change), Shape(20, 2, 2)))
    x, at = torch.randn(3, 20, 3), (torch.rand(3, 20) < 0.4) & (torch.arange(20) < LENGTHS[:, None])
    at &= torch.tensor({"some": [True] * 3, "none in a row": [True, False, True], "none": [False] * 3}[hidden])[:, None]
    view, found = View(x, torch.randn(3, 20, 2), at, LENGTHS), {}
    for path, answers in [("some", lambda: model(x, LENGTHS, at)), ("all", lambda: model(x, LENGTHS)[at])]:
        model.zero_grad(set_to_none=False)
        answer = answers()
        loss = reconstruction_loss(answer, view, "l2")
        loss.backward()
        found[path] = (
            answer.detach(),
            loss.detach(),
            {name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in model.named_parameters()},
        )
    for some, every, tolerance in zip(found["some"], found["all"], (1e-6, 1e-6, 1e-5), strict=True):
        torch.testing.assert_close(some, every, atol=tolerance, rtol=tolerance)


# Half the precision.

GENERATOR = torch.Generator().manual_seed(0)
WAVES = Split(torch.randn(8, 20, 1, generator=GENERATOR), torch.arange(8) % 2)
WORDS = Split(torch.randint(4, 12, (8, 20), generator=GENERATOR), torch.arange(8) % 2, torch.arange(13, 21))
TASKS = {"numbers": Task("waves", WAVES, WAVES, 2, Values()), "words": Task("words", WORDS, WORDS, 2, Tokens(tuple("_ ?.abcdefgh")))}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("objective", [Reconstruction(), NextStep(), Classification()])
@pytest.mark.parametrize("positions", SCHEMES)
def test_bfloat16_trains_alike(positions: Positions, objective: Objective, task: str) -> None:
    config, losses = replace(TINY, positions=positions, padding_mask=True, causal=isinstance(objective, NextStep)), {}
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(1)
        model = objective.build(config, TASKS[task].shape)
        training = Training(model, objective, TASKS[task], Budget(3, batch_size=8), Optimiser(1e-2, warmup_steps=0), 0, precision)
        training.permutation = torch.arange(8)
        for _ in range(3):
            training.position = 0
            losses[precision] = training.update()
        assert losses[precision].dtype == torch.float32 and all(w.dtype == torch.float32 for w in model.parameters())
    assert losses["float32"] != losses["bfloat16"], "the precision makes a difference"
    torch.testing.assert_close(losses["bfloat16"], losses["float32"], atol=0, rtol=0.02)
