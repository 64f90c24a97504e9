"""Imports go one way: omni -> stages -> engine -> prefix_cache, and down the floors inside each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.import_graph import (
    LAYERS,
    ROOT,
    arrows,
    arrows_back,
    circles,
    imported_packages,
    modules,
)
from tests.support.rooms import FLOORS, closed_doors, floor_of, room_of, unknown_rooms

# Modules that the lowest room must not import: it is ids, hashes, sizes and tensors only.
MODEL_LIBRARIES = {"transformers", "tokenizers", "xformers", "huggingface_hub"}
ROOMS = floor_of()
SOURCES = {
    str(file.relative_to(ROOT)): file.read_text("utf-8")
    for package in (*LAYERS, "stage_configs")
    for file in modules(package)
}
# Entries at the top of a package, its __init__.py included.
MOST_ENTRIES = {"engine": 20, "omni": 14}


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


def test_no_room_imports_one_that_is_not_below_it():
    found = closed_doors(SOURCES, ROOMS)
    assert not found, "\n" + "\n".join(found)


def test_no_files_import_each_other_in_a_circle():
    found = [" -> ".join(way) for way in circles(arrows(SOURCES))]
    assert not found, "\n" + "\n".join(found)


def test_every_folder_is_a_room_and_every_room_is_there():
    found = unknown_rooms(SOURCES, ROOMS)
    assert not found, "\n" + "\n".join(found)
    assert set(ROOMS) == {room_of(file, ROOMS) for file in SOURCES}


@pytest.mark.parametrize("folder", sorted({Path(file).parent for file in SOURCES}), ids=str)
def test_a_room_says_what_lives_there_and_what_it_may_import(folder: Path):
    reported = ast.get_docstring(ast.parse(SOURCES[str(folder / "__init__.py")])) or ""
    assert len(re.findall(r"[.;](?:\s|$)", reported)) >= 2, f"say both: {reported!r}"
    assert re.search(r"\bimports?\b", reported, re.I), f"what may it import? {reported!r}"


@pytest.mark.parametrize("package", MOST_ENTRIES)
def test_few_things_stand_at_the_top_of_a_package(package: str):
    entries = sorted(entry.name for entry in (ROOT / package).iterdir())
    counted = [name for name in entries if name != "__pycache__" and not name.startswith(".")]
    assert len(counted) <= MOST_ENTRIES[package], ", ".join(counted)


def test_the_architecture_page_shows_this_table():
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    shown = re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)
    assert any(_joined(FLOORS) == _joined(block) for block in shown), "quote FLOORS there as it is"


def _joined(floors: str) -> str:
    """End the first line of a two-line floor with a comma, as on the page."""
    return re.sub(r",\s+", ", ", floors)


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


@pytest.mark.parametrize(
    "planted",
    [
        "import engine.llm.llm_engine",
        "import engine.llm.llm_engine as above",
        "from engine.llm import llm_engine",
        "from engine.llm.llm_engine import LLMEngine",
        "from ..llm.llm_engine import LLMEngine",
        "def f():\n    from engine.llm.llm_engine import LLMEngine",
        "if TYPE_CHECKING:\n    from engine.llm.llm_engine import LLMEngine",
        "importlib.import_module('engine.llm.llm_engine')",
        "import_module('engine.llm.llm_engine')",
        "__import__('engine.llm.llm_engine')",
    ],
)
def test_a_planted_arrow_up_is_found_and_both_files_are_named(planted: str):
    sources = {"engine/text/planted.py": planted, "engine/llm/llm_engine.py": ""}
    assert closed_doors(sources, ROOMS) == [
        f"engine/text/planted.py:{planted.count(chr(10)) + 1} imports engine/llm/llm_engine.py: "
        "engine.llm is above it, not below engine.text"
    ]


@pytest.mark.parametrize(
    ("file", "imported", "where"),
    [
        ("engine/text/tokenizer.py", "engine/media/sound_file.py", "beside"),
        ("engine/models/llava/llava.py", "engine/models/mllama/mllama.py", "beside"),
        ("engine/models/base.py", "engine/models/registry.py", "above"),
        ("engine/models/base.py", "engine/models/decoders/families.py", "above"),
        ("engine/text/tokenizer.py", "engine/__init__.py", "above"),
        ("prefix_cache/blocks/block.py", "prefix_cache/__init__.py", "above"),
        ("stages/stage.py", "stages/transforms/registry.py", "above"),
        ("omni/requests/request.py", "omni/runtime/omni.py", "above"),
    ],
)
def test_an_import_of_a_room_on_the_same_or_a_higher_floor_is_found(
    file: str, imported: str, where: str
):
    module = imported.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    (found,) = closed_doors({file: f"from {module} import x", imported: ""}, ROOMS)
    assert found.startswith(f"{file}:1 imports {imported}: ") and f" is {where} it" in found


def test_doors_downstairs_and_inside_a_room_are_open():
    sources = {
        "engine/llm/llm_engine.py": "from engine.llm import output_processor\nimport engine.text.x",
        "engine/llm/output_processor.py": "from engine.models.registry import load_model",
        "engine/text/x.py": "import torch, enginery\nfrom prefix_cache import BlockPool",
        "engine/models/registry.py": "from engine.models.whisper.whisper import Whisper",
        "engine/models/whisper/whisper.py": "from engine.models.base import CausalModel",
        "engine/models/base.py": "from engine.inputs import x",
        "prefix_cache/__init__.py": "",
    }
    assert closed_doors(sources, ROOMS) == [] and unknown_rooms(sources, ROOMS) == []


def test_a_planted_circle_is_found_and_its_files_are_named():
    sources = {
        "engine/llm/a.py": "from engine.llm.b import B",
        "engine/llm/b.py": "if TYPE_CHECKING:\n    from engine.llm.c import C\nimport engine.llm.d",
        "engine/llm/c.py": "def f():\n    import engine.llm.a",
        "engine/llm/d.py": "from engine.llm import e",
        "engine/llm/e.py": "",
    }
    way = ["engine/llm/a.py", "engine/llm/b.py", "engine/llm/c.py", "engine/llm/a.py"]
    assert circles(arrows(sources)) == [way]
    sources["engine/llm/e.py"] = "import_module('engine.llm.d')"
    assert circles(arrows(sources)) == [
        way,
        ["engine/llm/d.py", "engine/llm/e.py", "engine/llm/d.py"],
    ]


def test_a_planted_folder_without_a_place_in_the_table_is_found():
    files = ["engine/llm/a.py", "engine/llm/new/b.py", "engine/attic/c.py", "engine/attic/d.py"]
    assert unknown_rooms(files, ROOMS) == [
        "engine/attic/ is not in the table of rooms (engine/attic/c.py)",
        "engine/llm/new/ is not in the table of rooms (engine/llm/new/b.py)",
    ]


def test_a_room_on_two_floors_is_an_error():
    with pytest.raises(ValueError, match="a stands on floors 0, 2"):
        floor_of("a\nb\nc, a\n")
