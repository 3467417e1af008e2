"""The rendered smoke site passes the gate, and the gate catches each fault when it is planted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import yaml
from gate import MAX_BYTES, check_site

from spt_nbdev.resolve import number_labels
from spt_nbdev.stage import listed_pages


@pytest.fixture(scope="session")
def labels(root: Path) -> dict[str, set[str]]:
    """The labels of each page that the navigation lists."""
    pages = listed_pages(yaml.safe_load((root / "_quarto.yml").read_text()))
    return {f"{Path(p).stem}.html": set(number_labels(nbformat.read(root / "nbs" / p, as_version=4))) for p in pages}


def test_site_passes_the_gate(site: Path, labels: dict[str, set[str]]) -> None:
    assert check_site(site, labels) == []


def test_every_notebook_is_in_the_navigation(root: Path, labels: dict[str, set[str]]) -> None:
    assert {p.stem for p in (root / "nbs").glob("*.ipynb")} == {Path(p).stem for p in labels}


def in_text(html: str) -> Callable[[str], str]:
    return lambda page: page.replace("</main>", f"{html}</main>")


def in_head(html: str) -> Callable[[str], str]:
    return lambda page: page.replace("</head>", f"{html}</head>")


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(page: str) -> str:
        assert old in page, f"nothing to spoil: {old!r} is not on the page"
        return page.replace(old, new, 1)

    return change


FAULTS = [
    (in_text("<p>see @fig-curves</p>"), "raw syntax '@fig-curves'"),
    (in_text("<p>see ?@fig-curves</p>"), "raw syntax"),
    (in_text("<p>as in [@amos2024]</p>"), "raw syntax '[@a'"),
    (in_text("<p>a formula {#eq-x}</p>"), "raw syntax '{#eq-x}'"),
    (in_text("<p>#| export</p>"), "raw syntax '#|'"),
    (
        in_text("<pre><code>#| export\nx = 1</code></pre>"),
        "a directive in a code cell: '#| export'",
    ),
    (in_text("<p>::: {.callout}</p>"), "raw syntax ':::'"),
    (
        in_head('<script src="https://cdn.example.org/x.js"></script>'),
        "<script> from another host",
    ),
    (
        in_head('<link rel="stylesheet" href="//cdn.example.org/x.css">'),
        "<link> from another host",
    ),
    (
        in_head("<style>@import url(https://fonts.example.org/x);</style>"),
        "a style from another host",
    ),
    (
        in_head("<script type='module'>import x from 'https://cdn.example.org/x.js'</script>"),
        "a script imports from another host",
    ),
    (
        in_text("<pre>saved in /home/someone/spt/runs</pre>"),
        "path of a machine: /home/someone",
    ),
    (
        in_text('<div class="cell-output cell-output-stderr">careful</div>'),
        "an output on the error stream",
    ),
    (
        in_text('<div class="cell-output">FutureWarning: gone soon</div>'),
        "an output with 'FutureWarning: '",
    ),
    (
        in_text('<div class="cell-output">Traceback (most recent call last)</div>'),
        "an output with 'Traceback",
    ),
    (
        in_text('<a href="nowhere.html">x</a>'),
        "link to a file that isn't there: nowhere.html",
    ),
    (
        in_text('<a href="index.html#nowhere">x</a>'),
        "link to a fragment that isn't there: index.html#nowhere",
    ),
    (in_text('<p id="fig-curves">x</p>'), "the id 'fig-curves' is used 2 times"),
    (swap('id="fig-curves"', 'id="curves"'), "a figure without a label"),
    (swap("Figure 1: ", ""), "figure fig-curves without a caption"),
    (swap(' alt="Two panels', ' alt="" data-x="'), "a picture without alt text"),
    (swap('id="tbl-results"', 'id="results"'), "a table without a label"),
    (swap("Table 1: What", "What"), "table tbl-printed without a caption"),
    (in_text("<figcaption>as in @amos2024</figcaption>"), "raw syntax '@amos2024'"),
    (in_text("<p>(<strong>amos2024?</strong>)</p>"), "raw syntax 'amos2024?'"),
    (in_text("<p>{{< include x >}}</p>"), "raw syntax '{{<'"),
    (in_text("<p>$$x$$</p>"), "raw syntax '$$'"),
    (in_text("<p>[x](02_model.ipynb)</p>"), "raw syntax"),
    (in_text("<p>| a | b |</p>"), "raw syntax '| a | b |'"),
    (in_text("<pre><code>x = 1\n#| export</code></pre>"), "a directive in a code cell"),
    (in_text('<div class="cell-output">&lt;IPython.core.display.Markdown object&gt;</div>'), "an output with '<IPython.'"),
    (in_text('<div class="cell-output">0.5 ± nan</div>'), "an output with 'nan'"),
    (in_text('<a href="file:///home/x">x</a>'), "path of a machine: file:///home/x"),
    (in_text("<p>http://localhost:8888</p>"), "path of a machine: http://localhost:8888"),
    (in_text('<div class="cell-output">in /opt/conda/lib</div>'), "path of a machine: /opt/conda"),
    (in_head('<script src="site_libs/gone.js"></script>'), "link to a file that isn't there: site_libs/gone.js"),
    (in_text('<div id="fig-empty"></div>'), "fig-empty is empty"),
    (in_text("<figcaption>Figure 1: again</figcaption>"), "Figure 1 stands twice"),
    (swap('id="tbl-search"', 'id="search"'), "tbl-search is not on the page"),
    (swap("<h1", "<h2"), "no title"),
    (in_text("<p>" + "x" * MAX_BYTES + "</p>"), f"over {MAX_BYTES}"),
]


@pytest.mark.parametrize(("spoil", "expected"), FAULTS, ids=[f"{i} {e}" for i, (_, e) in enumerate(FAULTS)])
def test_planted_fault_is_caught(
    site: Path,
    labels: dict[str, set[str]],
    tmp_path: Path,
    spoil: Callable[[str], str],
    expected: str,
) -> None:
    page = tmp_path / "site" / "18_ucr.html"
    others = [p.name for p in site.glob("*.html") if p.name not in (page.name, "index.html")]  # to check them all each time would take minutes
    copy = shutil.copytree(site, page.parent, ignore=shutil.ignore_patterns("mathjax", "bootstrap-icons", *others))
    whole = {page.name: labels[page.name]}
    assert not any(expected in fault for fault in check_site(copy, whole))
    page.write_text(spoil(page.read_text()))
    faults = check_site(copy, whole)
    assert any(fault.startswith("18_ucr.html: ") and expected in fault for fault in faults), faults


def test_missing_page_is_caught(site: Path, labels: dict[str, set[str]], tmp_path: Path) -> None:
    copy = shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("mathjax"))
    (copy / "18_ucr.html").unlink()
    assert "18_ucr.html: the page is missing" in check_site(copy, labels)


def test_remote_font_in_a_theme_is_caught(site: Path, labels: dict[str, set[str]], tmp_path: Path) -> None:
    copy = shutil.copytree(site, tmp_path / "site")
    (copy / "styles.css").write_text("@import url('https://fonts.example.org/css');")
    assert check_site(copy, labels) == ["styles.css: loads something from another host"]
