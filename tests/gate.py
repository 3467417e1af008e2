"""The site gate: what must hold for every page of the rendered site, whichever renderer made it."""

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

RAW_SYNTAX = re.compile(
    r"(?<![\w@./])@(?:(?:fig|tbl|eq|sec|lst)-\w+|[A-Za-z]+\d{4}\b)"  # a reference
    r"|\?@|\[-?@\w|\b[a-z]+\d{4}\?"  # one that Quarto could not resolve
    r"|\{#[\w-]+[^}]*\}|#\||:::|\{\{<|\$\$|\]\([\w./#-]+\)|^\s*\|.*\|\s*$|^\s*#{1,6} \w",
    re.M,
)
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|tmp|Users|work|workspace|var|private|opt|mnt)/[\w.-]+|file:///\S+|\b[A-Z]:\\+Users|https?://(?:localhost|127\.)[\w:.]*"
)
TROUBLE = re.compile(
    r"Traceback \(most recent call last\)|An Exception was encountered|\b\w*(?:Warning|Error|Exception|Exit): |\bWARNING:"
    r"|<Figure size |<IPython\.| object at 0x|\bnan\b"
)
REMOTE_CSS = re.compile(r"""(?:@import|url\()\s*(?:url\()?["']?(?:https?:)?//""")
MAX_BYTES = 2_000_000


def check_site(site: Path, labels: dict[str, set[str]]) -> list[str]:
    """All faults of a site, one line each; `labels` has the labels of each page that the navigation lists."""
    faults = [f"{page}: the page is missing" for page in labels if not (site / page).exists()]
    soups = {p.relative_to(site).as_posix(): BeautifulSoup(p.read_bytes(), "html.parser") for p in sorted(site.rglob("*.html"))}
    ids = {name: {tag["id"] for tag in soup.find_all(id=True)} for name, soup in soups.items()}
    for css in site.rglob("*.css"):
        if REMOTE_CSS.search(css.read_text()):
            faults.append(f"{css.relative_to(site)}: loads something from another host")
    for name, soup in soups.items():
        missing = [f"{label} is not on the page" for label in sorted(labels.get(name, set()) - ids[name])]
        checks = [
            missing,
            raw_syntax(soup),
            repeated_ids(soup),
            remote_parts(soup),
            machine_paths(soup),
            troubled_outputs(soup),
            broken_links(site, name, soup, ids),
            unlabelled(soup),
        ]
        faults += [f"{name}: {fault}" for check in checks for fault in check]
        if (size := (site / name).stat().st_size) > MAX_BYTES:
            faults.append(f"{name}: {size} bytes, over {MAX_BYTES}")
    return faults


def raw_syntax(soup: BeautifulSoup) -> Iterator[str]:
    """Markdown or directives that the renderer left as they were."""
    if not soup.find("h1") or not soup.find("title"):
        yield "no title"
    for text in (soup.body or soup).find_all(string=RAW_SYNTAX):
        if not text.find_parent(["code", "pre", "script", "style"]) and not text.find_parent(class_="math"):
            yield f"raw syntax {RAW_SYNTAX.search(text)[0]!r}"
    for code in soup.select("pre code"):
        if found := re.search(r"^#\|.*", code.get_text(), re.M):
            yield f"a directive in a code cell: {found[0]!r}"


def repeated_ids(soup: BeautifulSoup) -> Iterator[str]:
    """Ids that stand for two things, so that a link to them leads to the wrong one."""
    counts = Counter(tag["id"] for tag in soup.find_all(id=True))
    yield from (f"the id {i!r} is used {n} times" for i, n in counts.items() if n > 1)


def remote_parts(soup: BeautifulSoup) -> Iterator[str]:
    """Scripts, styles, fonts, pictures and frames from another host."""
    for tag in soup.find_all(["script", "link", "img", "iframe", "source", "video", "audio"]):
        url = tag.get("src") or tag.get("href") or ""
        if re.match(r"(?:https?:)?//", url) and "canonical" not in tag.get("rel", []):
            yield f"<{tag.name}> from another host: {url}"
    for tag in soup.find_all("style"):
        if REMOTE_CSS.search(tag.get_text()):
            yield "a style from another host"
    for tag in soup.find_all("script", src=False):
        if re.search(r"""(?:import|from)\s*\(?["'](?:https?:)?//""", tag.get_text()):
            yield "a script imports from another host"


def machine_paths(soup: BeautifulSoup) -> Iterator[str]:
    """Paths of the machine that built the site."""
    for found in set(MACHINE_PATH.findall(str(soup))):
        yield f"path of a machine: {found}"


def troubled_outputs(soup: BeautifulSoup) -> Iterator[str]:
    """Warnings, errors and tracebacks in what a cell put out."""
    for output in soup.select(".cell-output"):
        if {"cell-output-stderr", "cell-output-error"} & set(output["class"]):
            yield f"an output on the error stream: {output.get_text().strip()[:80]!r}"
        elif m := TROUBLE.search(output.get_text()):
            yield f"an output with {m[0]!r}"


def broken_links(site: Path, name: str, soup: BeautifulSoup, ids: dict[str, set[str]]) -> Iterator[str]:
    """Links and pictures within the site that lead nowhere."""
    urls = [tag.get("href") or tag.get("src") or "" for tag in soup.select("a[href], img, script[src], link[href]")]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme or parts.netloc:
            continue
        target = name if not parts.path else posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
        if (site / target).is_dir():
            target = posixpath.normpath(f"{target}/index.html")
        if not (site / target).exists():
            yield f"link to a file that isn't there: {url}"
        elif parts.fragment and target in ids and unquote(parts.fragment) not in ids[target]:
            yield f"link to a fragment that isn't there: {url}"


def unlabelled(soup: BeautifulSoup) -> Iterator[str]:
    """Figures without label, caption or alt text; tables without label or caption."""

    def holder(tag: Tag, kind: str) -> Tag | None:
        return tag.find_parent(id=re.compile(f"^{kind}-"))

    def caption(tag: Tag | None, word: str) -> bool:
        return bool(tag) and any(re.match(rf"\s*{word}\s\d+\s?: \S", c.get_text()) for c in tag.find_all(["figcaption", "caption"]))

    main = soup.find("main") or soup
    numbers = Counter(m[0] for c in main.find_all(["figcaption", "caption"]) if (m := re.match(r"\s*(?:Figure|Table)\s\d+", c.get_text())))
    yield from (f"{number.strip()} stands twice" for number, n in numbers.items() if n > 1)
    for box in main.find_all(id=re.compile("^(?:fig|tbl)-")):
        if not box.find(["img", "svg"] if box["id"].startswith("fig") else "table") and box.name != "table":
            yield f"{box['id']} is empty"
    for img in main.find_all("img"):
        if not (img.get("alt") or "").strip():
            yield "a picture without alt text"
        if not (box := holder(img, "fig")):
            yield "a figure without a label"
        elif not caption(box, "Figure"):
            yield f"figure {box['id']} without a caption"
    for table in main.find_all("table"):
        if not (box := table if str(table.get("id", "")).startswith("tbl-") else holder(table, "tbl")):
            yield f"a table without a label: {table.get_text(' ', strip=True)[:60]!r}"
        elif not caption(box, "Table"):
            yield f"table {box['id']} without a caption"
