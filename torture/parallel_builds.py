"""Builds kernels and seeded models in many processes at once, with a cold cache and busy cores.

Some are killed at random moments and replaced by others; between rounds, built files are damaged.
Processes that are not killed must end with intact kernels and models, and nothing else may be
left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torture.outcome_table import Tally

_MODELS = ("qwen2", "bert", "whisper")
_BUILDER = """
import sys
import torch
from safetensors.torch import load_file
from engine.native import load_kernels
from omni.seeded.checkpoints import resolve_model

ones = torch.ones(2, 8)
assert torch.equal(load_kernels().gated_silu(torch.ones(2, 16)), torch.nn.functional.silu(ones))
for name in sys.argv[1:]:
    weights = load_file(resolve_model(f"seeded:{name}") + "/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
"""
_BUSY = "while True: pass"
# Far longer than a round takes: a process that is not done by then hangs.
_TIMEOUT_S = 900.0


def main() -> int:
    """Run rounds; return 1 if anything was wrong in one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--kills", type=int, default=6, help="in each round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    killed, damaged = Tally("builder killed"), Tally("entry of a cache damaged")
    with tempfile.TemporaryDirectory() as cache, _busy_cores():
        for number in range(options.rounds):
            if number % 2:
                for file in _damage(Path(cache), chance):
                    damaged.add("went on", file)
            else:
                _empty(Path(cache))
            for detail in _round(options.processes, options.kills, Path(cache), chance):
                killed.add("hangs" if "hangs" in detail else "wrong", detail)
            killed.counts["went on"] += options.kills
    return Tally.report([killed, damaged])


def _round(processes: int, kills: int, cache: Path, chance: random.Random) -> list[str]:
    """Start builders and kill some; return the problems."""
    running = [_start(cache, chance) for _ in range(processes)]
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 6.0))
        victim = running.pop(chance.randrange(len(running)))
        victim.kill()
        victim.communicate()
        running.append(_start(cache, chance))
    wrong = []
    for each in running:
        try:
            _, errors = each.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            each.kill()
            wrong.append("a builder hangs")
            continue
        if each.returncode:
            wrong.append(f"a builder ended with {each.returncode}: {errors[-500:]}")
    return wrong + _leftovers(cache)


def _start(cache: Path, chance: random.Random) -> subprocess.Popen[str]:
    models = chance.sample(_MODELS, len(_MODELS))
    environment = os.environ | {"OMNI_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _BUILDER, *models]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _leftovers(cache: Path) -> list[str]:
    """Find entries without locks, and missing or additional entries.

    The folder of a killed builder is left for the next one that builds the same entry; once the
    entry exists, nobody removes the folder.
    """
    entries = [path for path in cache.glob("*/*") if not path.name.startswith(".")]
    locks = {path.name for path in cache.glob("*/.*.lock")}
    missing = [path.name for path in entries if f".{path.name}.lock" not in locks]
    count = len(entries) == len(_MODELS) + 1
    wrong = [f"{name} was built without a lock" for name in missing]
    return wrong if count else [*wrong, f"entries: {sorted(path.name for path in entries)}"]


def _damage(cache: Path, chance: random.Random) -> Iterator[str]:
    """Flip a byte of a file, truncate or remove it, in every entry; yield the files."""
    for entry in sorted(path for path in cache.glob("*/*") if not path.name.startswith(".")):
        file = chance.choice(sorted(path for path in entry.rglob("*") if path.is_file()))
        match chance.choice(("flip", "cut", "remove")):
            case "flip":
                content = bytearray(file.read_bytes())
                content[chance.randrange(len(content))] ^= 1
                file.write_bytes(content)
            case "cut":
                os.truncate(file, chance.randrange(file.stat().st_size))
            case _:
                file.unlink()
        yield str(file)


def _empty(cache: Path) -> None:
    subprocess.run(["rm", "-rf", *map(str, cache.iterdir())], check=True)


@contextmanager
def _busy_cores() -> Iterator[None]:
    loads = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


if __name__ == "__main__":
    sys.exit(main())
