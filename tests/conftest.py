"""What the tests share: the checkout and the rendered smoke site."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def site(root: Path) -> Path:
    site = root / "build/site/smoke/_site"
    if not (site / "index.html").exists():
        pytest.fail("there is no rendered site; `make site` builds it, and `make test` does so before the tests")
    return site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that two processes end at the same time."""
    items.sort(key=lambda item: item.path.stem not in ("test_stale", "test_runs"))
