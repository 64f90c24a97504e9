"""Imports go one way: omni -> stages -> engine -> prefix_cache."""

from __future__ import annotations

import pytest

from tests.support.import_graph import LAYERS, ROOT, arrows_back, imported_packages, modules

# What the lowest room must not know: it is ids, hashes, sizes and tensors only.
MODEL_LIBRARIES = {"transformers", "tokenizers", "xformers", "huggingface_hub"}


@pytest.mark.parametrize("package", LAYERS)
def test_no_module_imports_a_package_above_its_own(package: str):
    files = modules(package)
    assert files, f"{package} has no modules"
    found = [
        arrow
        for file in files
        for arrow in arrows_back(package, file.read_text("utf-8"), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


def test_prefix_cache_knows_no_model_library():
    found = [
        f"{file.name}:{line}: {name}"
        for file in modules("prefix_cache")
        for line, name in imported_packages(file.read_text("utf-8"))
        if name in MODEL_LIBRARIES
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "import omni",
        "import omni.commands.cli as cli",
        "from stages.stage import Stage",
        "def f():\n    from omni import Omni",
        "if TYPE_CHECKING:\n    import stages",
        "importlib.import_module('omni.commands.cli')",
        "import_module('stages')",
        "__import__('omni')",
    ],
)
def test_a_planted_arrow_is_found(planted: str):
    assert len(arrows_back("engine", planted, "planted.py")) == 1


def test_allowed_arrows_and_lookalikes_are_not_found():
    allowed = (
        "import engine\nfrom prefix_cache import BlockPool\nimport omnivore\nfrom . import omni"
    )
    assert arrows_back("engine", allowed, "allowed.py") == []
