"""transformers' models are listed once, and as transformers lists them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.import_graph import ROOT

LISTED_ONCE = """\
import sys
from engine.files import auto_classes
import transformers
from transformers.utils import import_utils

models = sys.modules["transformers.models"]
define = import_utils.define_import_structure
read_before = define.cache_info().misses
listed = define(models.__file__)
assert define.cache_info().misses == read_before + 1, "the files had been read for it"
as_listed = import_utils._LazyModule("transformers.models", models.__file__, listed)
assert models._class_to_module == as_listed._class_to_module
assert len(models._class_to_module) > 1000
assert sorted(models.__all__) == sorted(as_listed.__all__)
assert models.qwen2.Qwen2Config is transformers.Qwen2Config
assert auto_classes.AutoConfig is transformers.AutoConfig
"""
# Of another version it may be a function that keeps nothing, or none.
UNKNOWN = """\
import transformers
from transformers.utils import import_utils
define = import_utils.define_import_structure
import_utils.define_import_structure = lambda *args, **kwargs: define(*args, **kwargs)
from engine.files import auto_classes
assert auto_classes.AutoTokenizer is transformers.AutoTokenizer
"""


CODES = {"listed once": LISTED_ONCE, "unknown": UNKNOWN}
# In processes of their own, since this one has imported transformers' models in some way or other;
# forked from one that has imported torch, of which there is only one way.
FORKS = """\
import os, sys, torch
for name, code in {codes!r}.items():
    if not (child := os.fork()):
        exec(compile(code, name, "exec"), dict())
        sys.stdout.flush()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(name)
"""


@pytest.fixture(scope="module")
def went_well() -> list[str]:
    """Which of the codes ran to their end."""
    code = FORKS.format(codes=CODES)
    return subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).splitlines()


def test_models_are_listed_once_and_as_transformers_lists_them(went_well: list[str]) -> None:
    assert "listed once" in went_well


def test_where_transformers_lists_them_in_another_way_it_does_so_itself(
    went_well: list[str],
) -> None:
    assert "unknown" in went_well
