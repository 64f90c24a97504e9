"""Texts keep to the form that is asked for, whatever they are batched with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import (
    CompletionOutput,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TextPrompt,
)

_SHORT = {"type": "string", "maxLength": 6}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose JSON is short, so that no random model can go on for ever."""
    leaves = st.sampled_from(
        [
            _SHORT,
            {"type": "integer", "minimum": -50, "maximum": 50},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", 'a "quoted" one', 3, None]},
            {"const": {"a": [1]}},
            {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 8},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
        ]
    )

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from(["name", "größe", "x y", "z"])
        of_objects = st.dictionaries(names, inner, max_size=3).flatmap(
            lambda properties: st.sets(st.sampled_from([*properties, None]), max_size=3).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(each for each in required if each is not None),
                    "additionalProperties": False,
                }
            )
        )
        of_arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
        return (
            of_objects
            | of_arrays
            | st.lists(inner, min_size=1, max_size=2).map(lambda kinds: {"anyOf": kinds})
        )

    return st.recursive(leaves, nested, max_leaves=4)


@pytest.fixture(scope="module")
def engine(qwen2_checkpoint: str) -> LLMEngine:
    # Small steps and a pool that does not hold all of them: prompts are cut, requests preempted.
    return LLMEngine(
        EngineConfig(
            model=qwen2_checkpoint,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            num_blocks=72,
            max_model_len=256,
            seed=0,
        )
    )


def params(seed: int, **form: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=200, temperature=1.0, seed=seed, structured_output=StructuredOutput(**form)
    )


def completion(output: RequestOutput) -> CompletionOutput:
    """The only one, which must not have failed."""
    assert output.error is None
    (only,) = output.outputs
    return only


@given(data=st.data())
def test_every_text_is_json_of_its_schema_in_any_batch(
    engine: LLMEngine, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(schemas(), min_size=1, max_size=5))
    prompt = TextPrompt("What is the capital of the country?")
    sampling = [params(seed, json_schema=schema) for seed, schema in enumerate(wanted)]
    free = SamplingParams(max_tokens=8, temperature=0.0)
    outputs = engine.generate([prompt] * (len(wanted) + 1), [*sampling, free])
    for schema, output in zip(wanted, map(completion, outputs), strict=False):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text or ""), schema)
    for index, alone in ((0, sampling[0]), (-1, free)):
        (output_alone,) = engine.generate(prompt, alone)
        assert completion(output_alone).token_ids == completion(outputs[index]).token_ids


@given(pattern=st.sampled_from(["[a-f]{3,8}", "(yes|no)!{0,3}", "é+ü{1,4}x", r"\d{4}-\d\d", "a?"]))
def test_every_text_matches_its_regular_expression(engine: LLMEngine, pattern: str) -> None:
    wanted = params(7, regex=pattern).model_copy(update={"n": 3})
    (output,) = engine.generate([TextPrompt("Once upon a time")], wanted)
    for each in output.outputs:
        if each.finish_reason == "stop":  # + has no end
            assert re.fullmatch(pattern, each.text or "")


def test_completions_of_a_prompt_differ(engine: LLMEngine) -> None:
    wanted = params(7, regex="[a-f]{3,8}").model_copy(update={"n": 3})
    (output,) = engine.generate([TextPrompt("Once upon a time")], wanted)
    assert len({each.text for each in output.outputs}) > 1


@given(choice=st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True))
def test_every_text_is_one_of_the_choices(engine: LLMEngine, choice: list[str]) -> None:
    (output,) = engine.generate([TextPrompt("Choose:")], params(1, choice=tuple(choice)))
    assert completion(output).text in choice


def test_a_grammar_is_followed(engine: LLMEngine) -> None:
    grammar = 'start: "(" start ")" | /[0-9]{1,3}/'
    (output,) = engine.generate([TextPrompt("Brackets:")], params(3, grammar=grammar))
    text = completion(output).text or ""
    assert re.fullmatch(r"\(*[0-9]{1,3}\)*", text) and text.count("(") == text.count(")")


def test_any_object_is_json(engine: LLMEngine) -> None:
    (output,) = engine.generate([TextPrompt("JSON:")], params(3, json_object=True))
    text = completion(output).text or ""
    assert text.startswith("{")
    if completion(output).finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "give one of json_schema, json_object, regex, choice and grammar, got none"),
        ({"regex": "a", "choice": ("b",)}, "got regex and choice"),
        ({"regex": "a("}, "regex: cannot be read: .*unclosed group"),
        ({"json_schema": {"type": "foo"}}, "json_schema: cannot be read: Invalid type: foo"),
        ({"json_schema": '{"a'}, "json_schema: cannot be read"),
        ({"json_schema": {"if": {}}}, 'Unimplemented keys: \\["if"\\]'),
        ({"json_schema": {"$ref": "http://localhost/a"}}, "json_schema: cannot be read"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"choice": ()}, "choice: must not be empty"),
        ({"regex": "a" * 70_000}, "regex: has 70000 characters; forms of at most 65536"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(**form)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_form_alone_says_where_the_text_ends(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(other))} does not go with structured_output"):
        SamplingParams(structured_output=StructuredOutput(regex="a"), **other)


def test_a_model_without_text_is_refused(seeded: Callable[[str], str]) -> None:
    headless = LLMEngine(EngineConfig(model=seeded("qwen2-headless"), num_blocks=32))
    with pytest.raises(ValueError, match="no language-model head"):
        headless.check_sampling(params(0, regex="a"))


def test_a_form_survives_json() -> None:
    sampling = SamplingParams(structured_output=StructuredOutput(json_schema={"type": "null"}))
    assert SamplingParams.model_validate_json(sampling.model_dump_json(), strict=True) == sampling
