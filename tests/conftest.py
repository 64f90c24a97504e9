"""Setup of every test: no network, one thread, and small checkpoints built once."""

from __future__ import annotations

import os

# Set before torch and transformers read them on import. Tensors are tiny: a second thread costs
# more than it gains, and other workers need the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test does request threads, waiting ones do not hold a core.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# Read when Triton is imported: kernels run as Python where there is no NVIDIA GPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import LONG, USUAL
from tests.support.order import first_things_first

if TYPE_CHECKING:
    from tests.support.ray_cluster import SessionCluster

# Examples that are fast alone miss any deadline on a busy machine. On CI every run draws the same
# examples: a rare near tie is for a developer to find, not a reason for another's change to fail.
_EXAMPLES = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.register_profile("omni", _EXAMPLES, max_examples=USUAL)
# pytest --hypothesis-profile=long
settings.register_profile("long", _EXAMPLES, max_examples=LONG, derandomize=False)
settings.load_profile("omni")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    about: dict[str, int] = getattr(config, "workerinput", {})  # set by pytest-xdist in its workers
    items[:] = first_things_first(items, about.get("workercount", 1))


@pytest.fixture(scope="module")
def nothing_older_collected() -> None:
    """For a module whose tests collect garbage: exempt older objects from collection.

    They are never traversed again, for instance those of imports.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, one for all its workers."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def checkpoint_cache(run_folder: Path) -> Path:
    """The folder for this run's seeded checkpoints and kernels; one for all its workers.

    ``$OMNI_CACHE_DIR`` points to it. It belongs to the run unless ``$OMNI_TEST_CACHE`` names
    one, which later runs reuse: entries are named by their inputs, and checked when found.
    """
    folder = Path(os.environ.get("OMNI_TEST_CACHE", run_folder / "omni-cache")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMNI_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def seeded(checkpoint_cache: Path) -> Callable[[str], str]:
    """``seeded("qwen2")`` is the folder of that seeded checkpoint, built on first use.

    One worker builds, the others wait; the kernels, which every engine needs, go first.
    """
    from engine.native import NativeBuildError, load_kernels
    from omni.seeded.checkpoints import resolve_model

    with suppress(NativeBuildError):
        load_kernels()
    return cache(lambda name: resolve_model(f"seeded:{name}", cache_dir=checkpoint_cache))


@pytest.fixture(scope="session")
def ray_cluster(run_folder: Path) -> Iterator[SessionCluster]:
    """The Ray cluster of this run, started by the first of its workers that requests it."""
    from tests.support.ray_cluster import SessionCluster

    cluster = SessionCluster(run_folder)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def qwen2_checkpoint(seeded: Callable[[str], str]) -> str:
    """A tiny tied Qwen2 with tokenizer and chat template."""
    return seeded("qwen2")


@pytest.fixture(scope="session")
def bert_checkpoint(seeded: Callable[[str], str]) -> str:
    """A tiny BERT with a pooler and a WordPiece tokenizer."""
    return seeded("bert")


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded with plain weights, without a layout for products on a CPU."""
    monkeypatch.setattr("engine.models.model_loader.can_pack", lambda *_: False)
