"""Runs that take a second, for tests that kill, resume and count them; importable by worker processes."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from spt_nbdev.data import Shape, Split, Task
from spt_nbdev.model import ModelConfig
from spt_nbdev.spt import Classification, Reconstruction
from spt_nbdev.train import Budget, Init, Optimiser, RunSpec


@dataclass(frozen=True)
class Waves:
    """Noisy waves of two frequencies."""

    n: int = 24
    length: int = 12
    file: str | None = None  # its content is the seed of the noise

    def load(self) -> Task:
        generator = torch.Generator().manual_seed(int(Path(self.file).read_text()) if self.file else 0)
        y = torch.arange(2 * self.n) % 2
        t = torch.linspace(0, 6, self.length)
        x = torch.sin(t * (1 + y[:, None])) + 0.3 * torch.randn(2 * self.n, self.length, generator=generator)
        x = x[..., None]
        return Task("waves", Split(x[: self.n], y[: self.n]), Split(x[self.n :], y[self.n :]), 2)

    def fingerprint(self) -> str:
        return sha256(Path(self.file).read_bytes()).hexdigest() if self.file else "made up"

    def shape(self) -> Shape:
        return Shape(self.length, 1, 2, self.n, self.n)

    def label(self) -> str:
        return "waves"


MODEL = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16)


def pretraining(epochs: int = 4, seed: int = 0, **changes: object) -> RunSpec:
    spec = RunSpec(Waves(), MODEL, Reconstruction(), Budget(epochs, batch_size=5, eval_every=2), Optimiser(lr=1e-2, warmup_steps=3), seed=seed)
    return replace(spec, **changes)


def scratch(epochs: int = 3, seed: int = 0, **changes: object) -> RunSpec:
    return replace(pretraining(epochs, seed), objective=Classification(), **changes)


def finetuning(epochs: int = 3, seed: int = 0, **changes: object) -> RunSpec:
    return scratch(epochs, seed, init=Init(pretraining(seed=seed)), **changes)


@dataclass(frozen=True)
class Copying:
    """Each series is constant, so its value can be read off any visible step; `change` is what sets a task apart from the plain one."""

    n: int = 64
    change: str = ""

    def load(self) -> Task:
        x = torch.randn(self.n, 1, 1, generator=torch.Generator().manual_seed(0)).expand(self.n, 24, 1).contiguous()
        y = (x[:, 0, 0] > 0).long()
        if self.change == "labels":
            return Task("copying", Split(x, 1 - y), Split(x, 1 - y), 2)
        if self.change == "test split":
            return Task("copying", Split(x, y), Split(x[:5] + 3, 1 - y[:5]), 2)
        return Task("copying", Split(x * 1e18 if self.change == "huge" else x, y), Split(x, y), 2)

    def fingerprint(self) -> str:
        return self.change

    def shape(self) -> Shape:
        return Shape(24, 1, 2, self.n, 5 if self.change == "test split" else self.n)

    def label(self) -> str:
        return "copying"
