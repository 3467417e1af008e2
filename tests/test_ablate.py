"""Ablations: what is copied, what is frozen, and what is measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bs4 import BeautifulSoup

from spt_nbdev import depth, duration, freezing, hybrid, onelayer, replication, schemes
from spt_nbdev.ablate import setting
from spt_nbdev.claims import all_claims
from spt_nbdev.displace import MEASURED, Displacement
from spt_nbdev.displacement import displacement
from spt_nbdev.freezing import FROZEN
from spt_nbdev.groups import in_groups
from spt_nbdev.keys import key_of
from spt_nbdev.onelayer import COPIED, drawn_apart, one_layer
from spt_nbdev.paper import all_printed, displacements
from spt_nbdev.records import Store
from spt_nbdev.runs import run_spec
from spt_nbdev.sweep import sweep, to_do
from spt_nbdev.train import RunSpec, Training

PAGES_ASKED = [
    (replication, replication.replication),
    (duration, duration.duration),
    (depth, depth.depth),
    (freezing, freezing.freezing),
    (hybrid, hybrid.hybrids),
    (onelayer, onelayer.one_layer),
    (schemes, schemes.schemes),
]


def started(spec: RunSpec, store: Store, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights with which a run goes into its first step."""
    spec = replace(spec, budget=replace(spec.budget, epochs=9))  # which no test finishes, and which doesn't change the start
    found = {}

    def look(self: Training, run: object) -> None:
        found.update({k: v.clone() for k, v in self.model.state_dict().items()})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "run", look)
        with pytest.raises(KeyboardInterrupt):
            run_spec(spec, store)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("condition", "apart"), [*((c, False) for c in COPIED if COPIED[c]), ("SPT", True), ("QK", True)])
def test_what_is_copied_is_the_pretrained_models_and_the_rest_is_not(condition: str, apart: bool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = drawn_apart("smoke") if apart else one_layer("smoke", "image")
    spec = runs[condition, 0]
    given, fresh = run_spec(spec.init.source, store).weights(), spec.untrained().state_dict()
    for name, weight in started(spec, store, monkeypatch).items():
        if not in_groups(name, COPIED[condition]):
            assert torch.equal(weight, fresh[name]), name
        else:
            source = given[name][:, : weight.shape[1]] if name == "encoder.embed.weight" else given[name]
            assert torch.equal(weight, source), name
            assert not torch.equal(weight, fresh[name]), name


@pytest.mark.parametrize("condition", FROZEN)
@pytest.mark.parametrize("task", ["image", "listops", "retrieval"])
def test_frozen_weights_do_not_change_by_a_bit_and_all_others_do(condition: str, task: str, store: Store) -> None:
    spec = freezing.freezing("smoke", task)[condition, 0]
    before, after = spec.untrained().state_dict(), run_spec(spec, store).weights()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if in_groups(name, FROZEN[condition])}


def test_conditions_are_the_papers() -> None:
    """Each condition of each table is run, and none that it doesn't have, but what is quoted in it."""
    in_paper = {table: {p.condition for p in all_printed().values() if p.table == table} for table in range(1, 10)}
    assert in_paper[4] | in_paper[9] == set(COPIED)
    run = {table: {c for c, _ in runs("paper", "image")} for table, runs in zip((1, 7, 8, 2, 3), (runs for _, runs in PAGES_ASKED[:5]), strict=True)}
    run[5] = {c for c, _ in schemes.schemes("paper", "image")}
    for table, conditions in run.items():
        assert conditions == in_paper[table] - {"SPT (Amos et al.)"}, table
    for task in ("image", "pathfinder"):
        runs = one_layer("paper", task)
        assert {c for c, seed in runs if seed == 4} == in_paper[4]
        assert {run.model for run in runs.values()} == {replace(setting(task, "paper").preset.model, n_layers=1)}


def test_displacements_by_hand(store: Store) -> None:
    """Against sums over named parameters, for each part and block of one model."""
    spec = displacement("smoke")["image", 0]
    source, scratch = spec.finetuning.init.source, spec.scratch
    for run in (source, scratch, spec.finetuning):
        run_spec(run, store)
    rows = run_spec(spec, store).curves.set_index(["block", "part"])
    states = {"R": source.untrained().state_dict(), "R of SC": scratch.untrained().state_dict()}
    states |= {name: store.find(key_of(run)).weights() for name, run in (("SPT", source), ("SC", scratch), ("FT", spec.finetuning))}

    def distance(one: str, other: str | None, block: int, part: str) -> float:
        names = ["encoder.embed.weight"] if part == "embed" else [n for n in states["SC"] if in_groups(n, [part]) and f"blocks.{block}." in n]
        assert names
        total = 0.0
        for name in names:
            a = states[one][name]
            b = states[other][name] if other else torch.zeros_like(a)
            if part == "embed":
                a, b = a[:, :1], b[:, :1]
            total += (a - b).double().square().sum().item()
        return total**0.5

    moves = {"R to SPT": ("R", "SPT"), "R to SC": ("R of SC", "SC"), "SPT to FT": ("SPT", "FT"), "SC to FT": ("SC", "FT"), "R to FT": ("R", "FT")}
    for (block, part), row in rows.iterrows():
        for name, pair in (moves | {name: (name, None) for name in states}).items():
            assert row[name] == pytest.approx(distance(*pair, block, part), rel=1e-4, abs=1e-6), (block, part, name)
    assert len(rows) == 1 + 3 * len(MEASURED)


def test_a_displacement_by_itself_brings_its_three_runs(tmp_path: Path) -> None:
    spec = displacement("smoke")["image", 0]
    needs = spec.finetuning.init.source, spec.finetuning, spec.scratch
    assert to_do([spec], Store(tmp_path)) == [*needs, spec]
    for run in needs[:2]:
        run_spec(run, Store(tmp_path))
    (record,) = sweep([spec], store=Store(tmp_path))  # this one needs the weights of the third
    assert len(record.curves) and to_do([spec], Store(tmp_path)) == []


def test_displacement_rows_are_the_papers() -> None:
    for task, n_layers in (("image", 3), ("pathfinder", 4)):
        printed = set(map(tuple, displacements(task)[["block", "part"]].to_numpy().tolist()))
        assert printed == {(-1, "embed"), *((b, p) for b in range(n_layers) for p in MEASURED)}


def test_an_unknown_task_or_a_wrong_run_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no ablation on 'cifar'"):
        setting("cifar", "smoke")
    with pytest.raises(ValueError, match="expected a run that starts at a whole pretrained encoder"):
        Displacement(one_layer("smoke", "image")["QK", 0])


def test_reduced_settings_keep_the_papers_model() -> None:
    for task in ("image", "pathfinder"):
        for profile in ("smoke", "laptop"):
            assert setting(task, profile).preset.model == setting(task, "paper").preset.model
            assert setting(task, profile).preset.pretrain.objective == setting(task, "paper").preset.pretrain.objective


PAGES = {
    1: "10_replication",
    2: "13_freezing",
    3: "14_hybrid",
    4: "15_one_layer",
    5: "16_positions",
    6: "18_ucr",
    7: "11_duration",
    8: "12_depth",
    9: "15_one_layer",
}


def test_each_printed_number_has_its_place(site: Path) -> None:
    """In a table of its page that holds the paper's numbers; those of Tables 10 and 11 too."""
    pages = {name: BeautifulSoup((site / f"{name}.html").read_text(), "html.parser") for name in {*PAGES.values(), "17_displacement"}}
    for p in all_printed().values():
        assert any(str(p) in table.text for table in pages[PAGES[p.table]].select("#tbl-printed, #tbl-printed-more")), p
    for task in ("image", "pathfinder"):
        table = pages["17_displacement"].select_one(f"#tbl-{task}").text
        for value in displacements(task).select_dtypes("number").drop(columns="block").to_numpy().ravel():
            assert value != value or f"{value:.2f}" in table or f"{value:.3f}" in table, (task, value)


@pytest.mark.parametrize(("page", "runs"), PAGES_ASKED)
def test_what_is_asked_is_what_the_paper_finds(page: ModuleType, runs: Callable[..., dict]) -> None:
    """On each task of a finding the paper's numbers show it, both conditions are run at the paper's scale, and the claims list it."""
    listed = {(claim.text, claim.on) for claim in all_claims()}
    for finding in page.FINDINGS:
        for task in finding.tasks:
            in_print = finding.in_print(task)
            assert in_print > finding.size if in_print is not None else finding.table == 3, (finding, task)
            assert {finding.better, finding.baseline} <= {c for c, _ in runs("paper", task)}, finding
            assert (finding.in_words, task) in listed


def test_pretraining_on_the_other_task_fits_and_is_what_is_copied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, other in (("image", "pathfinder"), ("pathfinder", "image")):
        spec = depth.depth("smoke", task)["SPT on the other task, 2 layers", 0]
        assert spec.init.source.task == setting(other, "smoke").preset.task
        given = run_spec(spec.init.source, store).weights()
        for name, weight in started(spec, store, monkeypatch).items():
            if name.startswith("encoder."):
                assert torch.equal(weight, given[name][:, : weight.shape[1]] if name == "encoder.embed.weight" else given[name]), name


@pytest.mark.parametrize("condition", [c for c in hybrid.PARTLY if hybrid.PARTLY[c]])
def test_hybrids_get_their_parts_in_every_layer(condition: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = hybrid.hybrids("smoke", "image")[condition, 0]
    fresh = spec.untrained().state_dict()
    began = started(spec, store, monkeypatch)
    same = {name for name, weight in began.items() if torch.equal(weight, fresh[name])}
    assert same == {name for name in fresh if not in_groups(name, hybrid.PARTLY[condition])}
    given = run_spec(spec.init.source, store).weights()
    for name in fresh.keys() - same:
        assert torch.equal(began[name], given[name][:, : began[name].shape[1]] if name == "encoder.embed.weight" else given[name]), name
    assert {name.split(".")[2] for name in fresh if name.startswith("encoder.blocks.") and name not in same} == {"0", "1", "2"}
