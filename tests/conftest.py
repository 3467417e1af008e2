"""What the tests share: the checkout and the rendered site, that of smoke unless `--profile` names another."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", default="smoke", help="whose site is looked at")


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def site(root: Path, pytestconfig: pytest.Config) -> Path:
    profile = pytestconfig.getoption("profile")
    site = root / f"build/site/{profile}/_site"
    if not (site / "index.html").exists():
        pytest.fail(f"there is no rendered site; `make site PROFILE={profile}` builds it, and `make test` does so for smoke before the tests")
    return site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that two processes end at the same time."""
    items.sort(key=lambda item: item.path.stem not in ("test_stale", "test_runs"))
