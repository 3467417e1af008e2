"""How long `spt reproduce` takes when there is nothing to do, and how often `import torch` would fit into that: `python tests/bench_noop.py`, after `make site`."""

import subprocess
import sys
import time
from pathlib import Path


def seconds(*command: str) -> float:
    """The fastest of three."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - start)
        if command[-1] == "reproduce" and "notebooks are up to date" not in done.stdout.splitlines()[0]:
            sys.exit(f"there was something to do:\n{done.stdout}")
    return min(took)


nothing = seconds(str(Path(sys.executable).parent / "spt"), "reproduce")
torch = seconds(sys.executable, "-c", "import torch")
print(f"nothing to do: {nothing:.2f} s, {nothing / torch:.1f} times `import torch` ({torch:.2f} s)")
