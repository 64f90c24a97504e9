"""What every test may count on: no network, one thread, and small checkpoints built once."""

from __future__ import annotations

import os

# Before transformers is imported: these are read when it is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from omni.seeded.checkpoints import resolve_model

# Tiny tensors: a second thread costs more than it brings, and examples that pass quickly alone
# miss any deadline on a busy machine.
torch.set_num_threads(1)
# On CI every run draws the same examples: a rare near tie is for a developer to find, not for
# somebody else's change to fail by.
settings.register_profile(
    "omni",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("omni")


@pytest.fixture(scope="session")
def checkpoint_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which this run keeps seeded checkpoints; ``$OMNI_CACHE_DIR`` points to it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    os.environ["OMNI_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def seeded(checkpoint_cache: Path) -> Callable[[str], str]:
    """``seeded("qwen2")`` is the folder of that seeded checkpoint, built on first use."""
    return lambda name: resolve_model(f"seeded:{name}", cache_dir=checkpoint_cache)


@pytest.fixture(scope="session")
def qwen2_checkpoint(seeded: Callable[[str], str]) -> str:
    """A tiny tied Qwen2 with tokenizer and chat template."""
    return seeded("qwen2")


@pytest.fixture(scope="session")
def bert_checkpoint(seeded: Callable[[str], str]) -> str:
    """A tiny BERT with a pooler and a WordPiece tokenizer."""
    return seeded("bert")
