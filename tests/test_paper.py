"""The paper's printed numbers, and the rules that judge ours."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from spt_nbdev.paper import DISPLACEMENTS, TABLES, all_printed, displacements, printed
from spt_nbdev.verdict import judge, paired_gain, tolerance

NUMBER = r"[+-]?\d+\.\d+"
# Each table's numbers in the order of the paper's text, taken from it by `numbers_of` alone.
SOURCE = {int(table): numbers.split() for table, numbers in json.loads((Path(__file__).parent / "printed_numbers.json").read_text()).items()}
TYPED = TABLES | {10: DISPLACEMENTS["image"], 11: DISPLACEMENTS["pathfinder"]}


def numbers_of(text: str) -> dict[int, list[str]]:
    """The numbers in the tables of the paper's text, in order."""
    found: dict[int, list[str]] = {}
    table = 0
    for line in text.splitlines():
        if caption := re.match(r"Table (\d+): ", line):
            table = int(caption[1])
        elif line.startswith("#"):
            table = 0
        elif line.startswith("|") and table:
            found.setdefault(table, []).extend(re.findall(NUMBER, line))
    return found


@pytest.mark.parametrize("table", TYPED)
def test_every_printed_number_is_there(table: int) -> None:
    """In the paper's order; but Table 3 has its spreads in rows of their own."""
    typed = re.findall(NUMBER, TYPED[table])
    assert sorted(typed) == sorted(SOURCE[table])
    assert table == 3 or typed == SOURCE[table]


@pytest.mark.skipif("SPT_PAPER_TEXT" not in os.environ, reason="SPT_PAPER_TEXT names no text of the paper")
def test_the_list_of_numbers_is_the_texts() -> None:
    assert numbers_of(Path(os.environ["SPT_PAPER_TEXT"]).read_text()) == SOURCE


def test_numbers_are_found_by_their_place() -> None:
    """Cells at the ends and in the middle of each table, by hand."""
    cells = {
        (1, "text", "SPT", "val"): 0.89,
        (2, "retrieval", "attention and MLP frozen", "val"): 0.67,
        (3, "pathfinder", "attention + norm + embed", "val"): 0.781,
        (4, "image", "all but QK", "val"): 0.502,
        (5, "image", "SPT, sinusoidal", "val"): 0.722,
        (5, "pathfinder", "SPT, rope+alibi", "val"): 0.782,
        (7, "listops", "1 epoch", "val"): 0.48,
        (8, "image", "SPT on the other task, all layers", "train"): 0.97,
        (8, "pathfinder", "scratch, 1 layer", "val"): 0.669,
        (9, "pathfinder", "QK + norm", "val"): 0.7105,
    }
    assert {where: printed(*where).mean for where in cells} == cells
    assert {p.n_seeds for p in all_printed().values() if p.table in (3, 4, 6) and p.mean is not None} == {5}
    table = displacements("pathfinder").set_index(["block", "part"])
    assert table.loc[(-1, "embed"), "R to SPT"] == 17.96 and table.loc[(3, "MLP norm"), "FT"] == 14.29 and table.loc[(1, "K"), "SC"] == 49.10


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_planted_wrong_number_turns_the_verdict(n: int) -> None:
    """Whatever is printed, results around it are not off, and results further away than the rule allows are."""
    for p in all_printed().values():
        if p.mean is None:
            continue
        spread = np.linspace(-0.004, 0.004, n) if n > 1 else np.zeros(1)
        allowed = tolerance(p.mean + spread, p)
        assert judge(p.mean + spread, p, "paper") in ("reproduced", "within noise")
        for sign in (-1, 1):
            assert judge(p.mean + sign * (allowed + 1e-3) + spread, p, "paper") == "off"


def test_the_tolerance_is_wider_with_fewer_seeds_on_either_side() -> None:
    five, one = printed(4, "image", "SPT"), printed(9, "image", "SPT")
    ours = [0.600, 0.603, 0.606]
    assert tolerance(ours, five) < tolerance(ours, one)
    assert tolerance(ours * 2, five) < tolerance(ours, five) < tolerance(ours[:2], five)


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_a_reduced_run_is_never_reproduced(profile: str) -> None:
    numbers = [p for p in all_printed().values() if p.mean is not None]
    assert {judge([p.mean] * n, p, profile) for p in numbers for n in (1, 5)} == {"reduced"}


def test_a_gain_against_a_size_by_hand() -> None:
    """Two pairs: the interval is the mean plus or minus 12.706 standard errors."""
    gain = paired_gain([0.80, 0.82], [0.70, 0.70])
    half = 12.7062 * 0.01
    assert gain.low == pytest.approx(0.11 - half, abs=1e-5) and gain.high == pytest.approx(0.11 + half, abs=1e-5)
    sizes = {0.11 - half - 1e-4: "holds", 0.11: "undecided", 0.11 + half + 1e-4: "does not hold"}
    assert {size: gain.at_least(size) for size in sizes} == sizes
    assert gain.effect == "undecided"
