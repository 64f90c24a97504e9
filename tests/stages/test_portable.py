"""Objects that a worker process can import by name, and errors for those it cannot."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest

from engine import Prompt, TextPrompt
from stages import (
    AutoregressiveStageConfig,
    Stage,
    StageConfig,
    StageInputs,
    TransformContext,
    register_transform,
    text_as_prompt,
)
from stages.portable import check_portable, import_name, load_by_name, portable_transform
from stages.transforms import registry
from stages.transforms.registry import locate_transform, resolve_transform
from tests.support.declared_transform import declared
from tests.support.fake_stage import FakeStage
from tests.support.import_graph import ROOT


def plain(anything: TransformContext) -> Prompt:
    return TextPrompt(anything.request_id)


def shadowed(context: TransformContext) -> Prompt:
    return TextPrompt(context.request_id)


FIRST_SHADOWED = shadowed


def shadowed(context: TransformContext) -> Prompt:  # type: ignore[no-redef]
    return TextPrompt("another")


class Holder:
    @staticmethod
    def inside_of_a_class(context: TransformContext) -> Prompt:
        return TextPrompt(context.request_id)

    def __call__(self, context: TransformContext) -> Prompt:
        return TextPrompt(context.request_id)


class HumConfig(StageConfig):
    kind: Literal["hum"] = "hum"

    def build_stage(self, name: str) -> Stage:
        return FakeStage(name)


@pytest.mark.parametrize("thing", [plain, declared, Holder.inside_of_a_class, HumConfig, FakeStage])
def test_an_import_name_loads_the_same_object(thing: object) -> None:
    assert load_by_name(import_name(thing)) is thing


def test_another_process_loads_a_portable_name() -> None:
    name = portable_transform(declared)
    code = (
        "import sys; from stages.portable import load_by_name\n"
        f"assert load_by_name({name!r}).__qualname__ == 'declared'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_registered_names_are_unchanged() -> None:
    assert portable_transform("text_as_prompt") == "text_as_prompt"
    assert load_by_name("text_as_prompt") is text_as_prompt
    assert load_by_name(portable_transform(text_as_prompt)) is text_as_prompt
    assert portable_transform("package.module:function") == "package.module:function"


def test_a_users_registered_transform_is_found_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker does not know names registered only in this process."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_transform("mine")(plain)
    assert portable_transform("mine") == f"{__name__}:plain"
    register_transform("hidden")(lambda context: TextPrompt(context.request_id))
    with pytest.raises(ValueError, match="a lambda has no name"):
        portable_transform("hidden")


def test_a_function_in_a_file_next_to_the_pipeline_is_found_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "beside.py"
    file.write_text("def mine(context):\n    return 'x'\n")
    function = resolve_transform(locate_transform("beside:mine", tmp_path))
    name = portable_transform(function)
    assert name == f"{file.resolve()}:mine"
    assert load_by_name(name) is function


def nested() -> object:
    def inner(context: TransformContext) -> Prompt:
        return TextPrompt(context.request_id)

    return inner


def of_main(name: str) -> object:
    def function(context: TransformContext) -> Prompt:
        return TextPrompt(context.request_id)

    function.__module__, function.__qualname__ = "__main__", name
    return function


def of_no_path() -> object:
    function = of_main("mine")
    module = ModuleType("made_up_module")
    function.__module__, module.mine = module.__name__, function  # type: ignore[attr-defined]
    sys.modules["made_up_module"] = module
    return function


UNFINDABLE = {
    "a lambda": (lambda: lambda context: context, "a lambda has no name that a worker could"),
    "a function of a function": (nested, "it is defined inside of 'nested', where no worker"),
    "of the main script": (lambda: of_main("mine"), "'mine' is defined in the main script, whi"),
    "an instance": (Holder, "a Holder has no name that a worker could import; write a function"),
    "a partial": (lambda: partial(plain), "a partial has no name that a worker could import"),
    "of no file": (of_no_path, "its module 'made_up_module' is not on the import path"),
    "hidden by another": (lambda: FIRST_SHADOWED, "'tests.stages.test_portable:shadowed' is not"),
}


@pytest.mark.parametrize("case", UNFINDABLE)
def test_a_transform_that_cannot_be_imported_is_refused_with_its_stage(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = UNFINDABLE[case]
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    transform = make()
    stages = {"a": FakeStage("a"), "b": FakeStage("b", ("a",), transform=transform)}
    with pytest.raises(ValueError, match="stage 'b': transform '") as caught:
        check_portable(stages)
    assert message in str(caught.value)
    config = AutoregressiveStageConfig(
        kind="autoregressive",
        model="seeded:qwen2",
        inputs=StageInputs(("a",), transform),  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match="stage 'c': transform '"):
        check_portable({"c": config})


def test_a_class_that_cannot_be_imported_is_refused() -> None:
    class Local(FakeStage):
        pass

    class LocalConfig(HumConfig):
        pass

    with pytest.raises(ValueError, match="stage 'a': its class: it is defined inside of 'test_a"):
        check_portable({"a": Local("a")})
    with pytest.raises(ValueError, match="stage 'a': kind 'hum': it is defined inside of 'test_"):
        check_portable({"a": LocalConfig()})
    check_portable({"a": FakeStage("a"), "b": HumConfig()})


def test_a_transform_named_by_the_main_script_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 'b': transform '__main__:mine': 'mine' is defined"):
        check_portable({"b": FakeStage("b", ("a",), transform="__main__:mine")})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:mine", "cannot be imported in a worker: ModuleNotFoundError: No module"),
        ("tests.stages.test_portable:mine", "'tests.stages.test_portable' has no 'mine'"),
    ],
)
def test_a_failed_import_names_its_cause(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_by_name(name)
