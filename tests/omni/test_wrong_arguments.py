"""A public name answers an argument of the wrong type with one sentence on what it should be."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

import engine as engine_package
import omni as omni_package
import stages as stages_package
from omni import EngineConfig, LLMEngine, PipelineConfig, SamplingParams
from omni.testing import assert_cached_equals_uncached
from tests.support.fake_stage import FakeStage
from tests.support.import_graph import public_names
from tests.support.tables import rows

CONFIG = EngineConfig(model="not loaded")


def writer(**wrong: Any) -> object:
    return omni_package.AutoregressiveStage("writer", CONFIG, **wrong)


PACKAGES: tuple[Any, ...] = (stages_package, engine_package, omni_package)
NAMES: dict[str, Any] = {
    name: getattr(package, name) for package in PACKAGES for name in public_names(package)
}
NAMES |= {each.__name__: each for each in (writer, FakeStage, assert_cached_equals_uncached)}
NAMES |= {"load_config": PipelineConfig.load, "CONFIG": CONFIG}


def result_of(code: ast.expr) -> Any:
    """Evaluate code of calls, names and literals by ``NAMES``."""
    match code:
        case ast.Call(ast.Name(name), given, named):
            keywords = {str(each.arg): result_of(each.value) for each in named}
            return NAMES[name](*map(result_of, given), **keywords)
        case ast.Name(name):
            return NAMES[name]
        case ast.List(items):
            return [result_of(each) for each in items]
    return ast.literal_eval(code)


# The calls, and their errors. A type checker would find each of these mistakes.
MISTAKES = rows(r"""
Omni(3) | config must be the name of a shipped pipeline, .* got 3 .int.
Omni('two_step', overrides=3) | overrides must be a mapping of dotted places to values, got 3
Omni('two_step', overrides={3: 4}) | each place in overrides must be a str, got 3
assert_cached_equals_uncached(3, 'x') | config must be the name of a
load_config(3) | config must be a path, or the name
StageInputs('writer', 'text_as_prompt') | sources must be a tuple of stages' names, got 'writer' \
\(str\); write StageInputs\(\('writer',\), ...\)
StageInputs((3,), 'x') | each of sources must be a str, got 3
StageInputs(('a',), 3) | transform must be a registered name, 'package.module:function' or a \
function, got 3
Pipeline(3) | stages must be a list of stages, got 3
Pipeline(FakeStage('a')) | stages must be a list of stages
Pipeline([3]) | each of stages must be a Stage, got 3
Pipeline([FakeStage('a')], speaker=3) | speaker must be a str or None, got 3
AutoregressiveStage(3, CONFIG) | name must be a str, got 3
AutoregressiveStage('', CONFIG) | name must not be empty
AutoregressiveStage('writer', 'path') | engine must be an EngineConfig or an LLMEngine, got \
'path' \(str\); write EngineConfig\(model='path'\)
writer(sampling={'max_tokens': 3}) | sampling must be SamplingParams or None, got .*; write \
SamplingParams\(max_tokens=3\)
writer(outputs='hidden_states') | outputs must be a list of names or None, got 'hidden_states' \
.*write \['hidden_states'\]
writer(final_output='text') | final_output must be a list of names, got 'text' \(str\); write \
\['text'\]
writer(inputs='writer') | inputs must be StageInputs or None, got 'writer' .*; write StageInputs
EncoderStage('e', 'path') | engine must be an EngineConfig, got 'path' \(str\); write \
EngineConfig\(model='path'\)
GeneratorStage('g', CONFIG) | config must be a GeneratorConfig, got EngineConfig.*; write \
GeneratorConfig
LLMEngine('path') | config must be an EngineConfig, got 'path' \(str\); write \
EngineConfig\(model='path'\)
LLMEngine(CONFIG, output_names='hidden_states') | output_names must be a list of names or None, \
got 'hidden_states'
EncoderEngine('path') | config must be an EngineConfig
GeneratorEngine('path') | config must be a GeneratorConfig
EngineConfig() | EngineConfig: model: missing; it must be given
EngineConfig('path') | EngineConfig takes its fields by name, such as model=..., got 'path'
EngineConfig(model='x', blok_size=3) | EngineConfig: blok_size: unknown key; did you mean \
'block_size'
GeneratorConfig(model='x', generation={'num_step': 3}) | GeneratorConfig: generation.num_step: \
unknown key; did you mean 'num_steps'
GenerationParams(num_steps=0) | GenerationParams: num_steps: should be greater than or equal to \
2, got 0
SamplingParams(max_tokens=-1) | SamplingParams: max_tokens: should be greater than or equal to 0, \
got -1
SamplingParams(min_tokens=8, max_tokens=3) | SamplingParams: min_tokens \(8\) is larger than \
max_tokens \(3\)
PipelineConfig(name='x', stages={'a': {'kind': 'encoder', 'model': 'x', 'modle': 'y'}}) | \
PipelineConfig: stages.a.modle: unknown key; did you mean 'model'
PipelineConfig(name='x', stages={'a': {'kind': 'autoregresive'}}) | PipelineConfig: \
stages.a.kind: unknown kind 'autoregresive'; did you mean
AutoregressiveStageConfig(kind='autoregressive', model='x', enigne={}) | \
AutoregressiveStageConfig: enigne: unknown key; did you mean 'engine'
requires(3) | each of what a transform requires must be a str, got 3
chunkable(3) | a chunkable transform must be a function, got 3
register_transform(3) | a transform's name must be a str, got 3
""")


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_wrong_argument_gets_a_one_sentence_error(call: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        result_of(ast.parse(call, mode="eval").body)
    assert "pydantic" not in f"{type(caught.value)} {caught.value}"


@pytest.fixture(scope="module")
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(EngineConfig(model=seeded("qwen2"), num_blocks=32, max_model_len=64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "prompts must be a prompt .*, or a list of these, got int"),
        (({"prompt": "x"},), "prompts must be a prompt .*, or a list of these, got dict"),
        (([3],), "a prompt is a str, TextPrompt, .*, got int"),
        (("x", 3), "sampling must be SamplingParams, or a list of one for each prompt, got 3"),
        (("x", {"n": 3}), r"sampling must be SamplingParams .* write SamplingParams\(n=3\)"),
        (("x", [{"n": 3}]), r"sampling must be SamplingParams .* write SamplingParams\(n=3\)"),
    ],
)
def test_an_engine_refuses_what_is_no_prompt_and_no_sampling(
    engine: LLMEngine, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(*arguments)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"request_id": 3}, "request_id must be a str, got 3"),
        ({"sampling": {"n": 3}}, r"sampling must be .* write SamplingParams\(n=3\)"),
        ({"priority": "high"}, "priority must be an int, lower for earlier, got 'high'"),
        ({"cache_salt": 3}, "cache_salt must be a str or None, got 3"),
    ],
)
def test_a_request_that_cannot_be_ordered_affects_no_other(
    engine: LLMEngine, wrong: dict[str, Any], message: str
) -> None:
    """A priority that is no number used to be detected only when compared with another."""
    with pytest.raises(ValueError, match=message):
        engine.add_request(**{"request_id": "r", "prompt": "x"} | wrong)
    assert engine.generate("x", SamplingParams(max_tokens=2))[0].error is None
