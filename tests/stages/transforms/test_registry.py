"""Transforms are found by name or location and report clearly why they cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt
from stages import (
    StageOutput,
    TransformContext,
    chunkable,
    register_transform,
    registered_transforms,
    requires,
    resolve_transform,
)
from stages.transforms.registry import Requirements, requirements_of


def context(*sources: StageOutput) -> TransformContext:
    return TransformContext("r", "prompt", sources)


def output(
    stage: str = "a",
    text: str | None = None,
    token_ids: tuple[int, ...] = (),
    tensors: dict[str, Tensor] | None = None,
) -> StageOutput:
    return StageOutput(
        "r", stage, finished=True, text=text, token_ids=token_ids, tensors=tensors or {}
    )


def custom(context: TransformContext, bias: int = 0) -> Prompt:
    return TokensPrompt((bias,))


def takes_two(context: TransformContext, other: int) -> Prompt:
    return TokensPrompt((other,))


def test_hidden_states_are_concatenated_in_the_order_of_the_sources() -> None:
    first, second = torch.rand(2, 4), torch.rand(3, 4)
    transform = resolve_transform("hidden_states_as_prompt_embeds")
    made = transform(
        context(
            output("b", tensors={"hidden_states": first}),
            output("a", tensors={"hidden_states": second}),
        )
    )
    assert isinstance(made, EmbedsPrompt)
    assert torch.equal(made.prompt_embeds, torch.cat([first, second]))


def test_texts_and_token_ids_are_joined_in_the_order_of_the_sources() -> None:
    sources = output(text="one ", token_ids=(1, 2)), output(text="two", token_ids=(3,))
    assert resolve_transform("text_as_prompt")(context(*sources)) == TextPrompt("one two")
    assert resolve_transform("token_ids_as_prompt")(context(*sources)) == TokensPrompt((1, 2, 3))


@pytest.mark.parametrize(
    ("name", "sources", "message"),
    [
        (
            "hidden_states_as_prompt_embeds",
            [output("writer", tensors={"logits": torch.zeros(1, 2)})],
            r"'writer' handed on no 'hidden_states' \(it handed on \['logits'\]\); add",
        ),
        (
            "hidden_states_as_prompt_embeds",
            [
                output("a", tensors={"hidden_states": torch.zeros(1, 2)}),
                output("b", tensors={"hidden_states": torch.zeros(1, 3)}),
            ],
            "stage 'a' has 2, stage 'b' has 3",
        ),
        ("text_as_prompt", [output("enc")], "'enc' makes no text"),
        ("text_as_prompt", [output("writer", text="")], "text of stage 'writer' is empty"),
        ("token_ids_as_prompt", [output("a"), output("b")], "'a' and stage 'b' generated no token"),
    ],
)
def test_a_source_without_required_content_is_refused(
    name: str, sources: list[StageOutput], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_transform(name)(context(*sources))


def test_a_custom_function_is_found_by_module_and_name_or_passed_directly() -> None:
    assert resolve_transform(custom) is custom
    made = resolve_transform(f"{__name__}:custom")(context())
    assert made == TokensPrompt((0,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("text_as_promt", "unknown transform 'text_as_promt'; did you mean 'text_as_prompt'?"),
        ("no_such_package.module:function", "module 'no_such_package.module' cannot be imported"),
        (f"{__name__}:custm", "has no 'custm'; did you mean 'custom'?"),
        (f"{__name__}:takes_two", "must take exactly one argument, a TransformContext"),
        (takes_two, "must take exactly one argument"),
    ],
)
def test_an_unusable_transform_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_transform(spec)
    assert message in str(caught.value)


def test_a_module_that_fails_to_import_is_named_with_its_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_transforms.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'broken_transforms' cannot be imported: ZeroDivision"):
        resolve_transform("broken_transforms:function")


def test_requirements_are_those_that_a_transform_declares() -> None:
    def own(context: TransformContext) -> Prompt:
        return TokensPrompt((1,))

    assert requirements_of(own) == Requirements()
    needs = Requirements(("codes", "mel"), num_sources=1, chunkable=True)
    assert requirements_of(chunkable(requires("codes", "mel", num_sources=1)(own))) == needs
    assert requirements_of(requires("codes", "mel", num_sources=1)(chunkable(own))) == needs
    embeds = requirements_of(resolve_transform("hidden_states_as_prompt_embeds"))
    assert embeds == Requirements(("hidden_states",), same_width=True)


def test_requirements_are_checked_before_the_transform_is_called() -> None:
    @requires("codes", num_sources=1)
    def own(context: TransformContext) -> Prompt:
        called.append(context)
        return TokensPrompt((1,))

    called: list[TransformContext] = []
    one = output("a", tensors={"codes": torch.zeros(1, 2)})
    for sources, reported in (
        (
            [output("a")],
            r"'a' handed on no 'codes' \(.*; add 'codes' to its outputs",
        ),
        ([one, one], "takes one source, got 2: 'a', 'a'"),
        ([], "takes one source, got 0"),
    ):
        with pytest.raises(ValueError, match=reported):
            own(context(*sources))
    assert called == []
    assert own(context(one)) == TokensPrompt((1,))


def test_a_registered_name_resolves_and_cannot_be_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stages.transforms.registry._REGISTRY", {})
    register_transform("mine")(custom)
    register_transform("mine")(custom)
    assert registered_transforms() == ("mine",)
    assert resolve_transform("mine") is custom
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_transform("mine")(lambda context: "x")
    with pytest.raises(ValueError, match="must not be empty or have a ':'"):
        register_transform("a:b")
    with pytest.raises(ValueError, match="exactly one argument"):
        register_transform("other")(takes_two)  # type: ignore[type-var]
