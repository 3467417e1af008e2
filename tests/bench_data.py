"""How fast the generated tasks are drawn on one core: images and sequences a second. Run it with `python tests/bench_data.py`."""

import time
from collections.abc import Callable

from spt_nbdev import listops, pathfinder

N = 1000


def rate(draw: Callable[[], object]) -> float:
    """Draws a second, the median of three parts, after one that fills the tables."""
    draw()
    took = []
    for _ in range(3):
        start = time.process_time()
        draw()
        took.append(time.process_time() - start)
    return N / sorted(took)[1]


if __name__ == "__main__":
    for size in (32, 16):
        print(f"PathFinder {size}: {rate(lambda size=size: pathfinder.image_part(size, N, 0, 0)):,.0f} images/s on one core")
    for low, high in ((500, 2000), (10, 100)):
        print(f"ListOps {low}–{high}: {rate(lambda low=low, high=high: listops.expression_part(N, (low, high), 10, 0, 0)):,.0f} sequences/s on one core")
