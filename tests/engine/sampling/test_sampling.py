"""Sampling follows transformers and a request's seed; structured output keeps its format."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import (
    CompletionOutput,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TextPrompt,
    TokensPrompt,
)
from engine.sampling.sampler import (
    Sampler,
    SamplerOutput,
    SamplingState,
    apply_biases,
    apply_masks,
    apply_penalties,
    shape_distribution,
)
from tests.support.encoder_decoder_requests import IMAGE, noise_image
from tests.support.examples import examples

VOCAB = 64
EOS = 3


def state(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seed: int = 0,
    vocab_size: int = VOCAB,
) -> SamplingState:
    made = SamplingState(params, prompt, seed, {EOS}, vocab_size)
    for token_id in output:
        made.append(token_id)
    return made


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: Tensor, *states: SamplingState) -> SamplerOutput:
    return Sampler().sample(logits, states)


def test_greedy_takes_the_largest_logit_and_the_first_of_equal_ones():
    logits = random_logits(3)
    logits[1, [5, 9]] = 50.0
    greedy = SamplingParams(temperature=0.0)
    output = sample(logits, *(state(greedy) for _ in range(3)))
    assert output.token_ids == [int(logits[0].argmax()), 5, int(logits[2].argmax())]
    assert output.logprobs == [None] * 3
    assert output.errors == [None] * 3


def test_logits_and_states_are_unchanged():
    logits = random_logits(2)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, suppress_token_ids=(1,), top_k=3, logprobs=2)
    states = [state(params, prompt=(4, 5)), state(SamplingParams(temperature=0.0))]
    first = sample(logits, *states)
    assert torch.equal(logits, before)
    assert sample(logits, *states) == first


def test_low_precision_logits_are_sampled_like_their_float32_values():
    logits = random_logits(2).to(torch.bfloat16)
    states = [state(SamplingParams(seed=1, logprobs=3)), state(SamplingParams(temperature=0.0))]
    assert sample(logits, *states) == sample(logits.float(), *states)


rows_of_batch = st.lists(
    st.builds(
        lambda params, seed, output: (params, seed, tuple(output)),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.0, 3.0]),
            top_k=st.sampled_from([0, 0, 1, 5, 1000]),
            top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95]),
            min_p=st.sampled_from([0.0, 0.0, 0.1]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
            presence_penalty=st.sampled_from([0.0, -0.5]),
            min_tokens=st.sampled_from([0, 3]),
            suppress_token_ids=st.sampled_from([(), (1, 2)]),
            logit_bias=st.sampled_from([{}, {1: 100.0, 9: -3.0}, {9: 1.5}]),
            logprobs=st.sampled_from([None, 0, 3]),
        ),
        st.integers(0, 2**63 - 1),
        st.lists(st.integers(0, VOCAB - 1), max_size=5),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=examples(100))
@given(rows=rows_of_batch, logits_seed=st.integers(0, 1000), data=st.data())
def test_draws_of_a_request_do_not_depend_on_its_batch(rows, logits_seed: int, data):
    logits = random_logits(len(rows), logits_seed)
    states = [state(p, seed=seed, output=output, prompt=(7,)) for p, seed, output in rows]
    together = sample(logits, *states)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], *(states[row] for row in order))
    for index, row in enumerate(order):
        alone = sample(logits[row : row + 1], states[row])
        assert together.token_ids[row] == shuffled.token_ids[index] == alone.token_ids[0]
        expected = alone.logprobs[0]
        for found in (together.logprobs[row], shuffled.logprobs[index]):
            if expected is None:
                assert found is None
            else:
                assert found is not None
                assert found.token_id == expected.token_id
                assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)


def test_draws_at_a_large_vocabulary_do_not_depend_on_the_batch():
    vocab_size, rows = 5003, 33
    logits = random_logits(rows, vocab_size=vocab_size)
    states = [
        state(SamplingParams(top_p=1.0 if row % 2 else 0.9), seed=row, vocab_size=vocab_size)
        for row in range(rows)
    ]
    together = sample(logits, *states).token_ids
    assert together == [sample(logits[r : r + 1], states[r]).token_ids[0] for r in range(rows)]


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.6, top_k=7), SamplingParams(top_p=0.8)],
    ids=["plain", "top_k", "top_p"],
)
def test_draws_follow_the_softmax(params: SamplingParams, varied: str):
    """Chi-square of many draws, over seeds and over the positions of one request."""
    draws, vocab_size = 8000, 12
    logits = random_logits(1, vocab_size=vocab_size) / 3
    drawer = state(params, vocab_size=vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for start in range(0, draws, 1000):
        if varied == "seed":
            states = [state(params, seed=start + i, vocab_size=vocab_size) for i in range(1000)]
            ids = sample(logits.expand(1000, -1), *states).token_ids
        else:
            ids = []
            for _ in range(200):
                ids += sample(logits, drawer).token_ids
                drawer.append(0)
        chosen = torch.tensor([i for i in ids if i is not None])
        counts += torch.bincount(chosen, minlength=vocab_size)
    scaled = logits[0].double() / params.temperature
    if params.top_k:
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1.0:
        probabilities, order = scaled.softmax(-1).sort(descending=True)
        scaled[order[probabilities.cumsum(-1) - probabilities >= params.top_p]] = -torch.inf
    expected = scaled.softmax(-1) * counts.sum()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # The mean is the degrees of freedom; fewer than one in 10,000 would exceed this bound.
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_ignored_eos_may_be_sampled_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(logits, state(params)).token_ids == [EOS]


def test_the_models_own_processor_gets_biased_logits():
    seen: list[float] = []

    class Rule:
        def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
            seen.append(float(logits[5]))

    params = SamplingParams(temperature=0.0, logit_bias={5: 2.5}, repetition_penalty=2.0)
    ruled = SamplingState(params, [5], 0, {EOS}, VOCAB, logits_processor=Rule())
    sample(torch.zeros(1, VOCAB), ruled)
    assert seen == [2.5]


@pytest.mark.parametrize("wanted", [0, 1, 4, 1000])
def test_logprobs_are_of_the_raw_distribution(wanted: int):
    logits = random_logits(2)
    params = SamplingParams(
        temperature=0.3, top_k=2, repetition_penalty=3.0, suppress_token_ids=(0,), logprobs=wanted,
        logit_bias={7: 2.0, 8: -100.0},
    )  # fmt: skip
    output = sample(logits, state(params, prompt=(5,)), state(SamplingParams(temperature=0.0)))
    expected = logits.log_softmax(-1)[0]
    found = output.logprobs[0]
    assert output.logprobs[1] is None
    assert found is not None
    assert found.token_id == output.token_ids[0]
    assert found.logprob == pytest.approx(float(expected[found.token_id]))
    assert [i for i, _ in found.top] == expected.argsort(descending=True)[:wanted].tolist()
    assert [value for _, value in found.top] == pytest.approx(
        expected.sort(descending=True).values[:wanted].tolist()
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("broken", "message"),
    [(math.nan, "row 1.*NaN"), (math.inf, "row 1.*infinity"), (-math.inf, "row 1.*probability 0")],
)
def test_a_broken_row_fails_alone(temperature: float, broken: float, message: str):
    logits = random_logits(3)
    params = SamplingParams(temperature=temperature, logprobs=1)
    states = [state(params, seed=row) for row in range(3)]
    whole = sample(logits, *states)
    if broken == -math.inf:
        logits[1] = broken
    else:
        logits[1, 40] = broken
    output = sample(logits, *states)
    assert output.token_ids == [whole.token_ids[0], None, whole.token_ids[2]]
    assert output.logprobs == [whole.logprobs[0], None, whole.logprobs[2]]
    assert output.errors[0] is output.errors[2] is None
    assert re.search(message, output.errors[1] or "")


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures_sample_a_token(temperature: float):
    logits = random_logits(4) * 1e30
    output = sample(logits, *[state(SamplingParams(temperature=temperature))] * 4)
    assert output.errors == [None] * 4
    if temperature < 1.0:
        assert output.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("field", ["suppress_token_ids", "stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(field: str):
    ids = (0, VOCAB)
    with pytest.raises(ValueError, match=rf"{field} holds {VOCAB}.*0 to {VOCAB - 1}"):
        state(SamplingParams(**{field: dict.fromkeys(ids, 1) if field == "logit_bias" else ids}))


def test_suppressing_all_tokens_is_refused():
    with pytest.raises(ValueError, match="no token is left"):
        state(SamplingParams(suppress_token_ids=tuple(range(VOCAB))))
    others = tuple(i for i in range(VOCAB) if i != EOS)
    state(SamplingParams(suppress_token_ids=others))
    with pytest.raises(ValueError, match="no token is left"):
        state(SamplingParams(suppress_token_ids=others, min_tokens=1))
    with pytest.raises(ValueError, match="no token is left to choose"):
        masked(SamplingParams(suppress_token_ids=tuple(range(9))), [9], 1)


def test_ids_known_only_to_the_tokenizer_are_accepted():
    SamplingState(SamplingParams(min_tokens=1), [], 0, {VOCAB + 1}, VOCAB)
    request = state(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=(1, VOCAB + 9))
    assert sample(random_logits(1), request).errors == [None]


def test_one_state_per_row_is_required():
    with pytest.raises(ValueError, match=r"\(2, 64\) for 1 requests"):
        sample(random_logits(2), state(SamplingParams()))


def masked(params: SamplingParams, begin: list[int], positions: int) -> list[set[int]]:
    state = SamplingState(params, (), 0, [2], 10, begin_suppress_token_ids=begin)
    found = []
    for _ in range(positions):
        found.append(set() if state.masked_ids is None else set(state.masked_ids.tolist()))
        state.append(5)
    return found


def test_begin_suppressed_ids_are_also_masked_at_the_first_position() -> None:
    assert masked(SamplingParams(), [2, 7], 3) == [{2, 7}, set(), set()]
    assert masked(SamplingParams(), [7, 10, 99], 2) == [{7}, set()], "only ids with a logit"
    params = SamplingParams(suppress_token_ids=(1,), stop_token_ids=(3,), min_tokens=2)
    assert masked(params, [7], 4) == [{1, 2, 3, 7}, {1, 2, 3}, {1}, {1}]


SHOWN = ExplicitEncoderDecoderPrompt(ImagePrompt(noise_image(50, 50, 1)), f"{IMAGE} what is this?")
PLAIN = TokensPrompt(tuple(range(20, 60)))
PENALTIES = [{"repetition_penalty": 1.8}, {"presence_penalty": 0.9}, {"frequency_penalty": 0.9}]


@pytest.fixture
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    config = EngineConfig(model=seeded("mllama"), block_size=4, num_blocks=200, max_num_seqs=4)
    engine = LLMEngine(config)
    assert engine.tokenizer is not None
    placeholder = engine.tokenizer.convert_tokens_to_ids(IMAGE)
    assert placeholder == engine._runner._model.vocab_size, "one past the last logit"
    return engine


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_a_penalised_prompt_with_an_image_does_not_change_the_next_row(
    engine: LLMEngine, penalty: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalizing the placeholder's id would change the first logit of the next row."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    penalised = params.model_copy(update=penalty)
    prompts: list[Prompt] = [SHOWN, PLAIN, SHOWN]
    sampling = [penalised, params, penalised]
    alone = [
        engine.generate(prompt, each)[0].outputs[0].token_ids
        for prompt, each in zip(prompts, sampling, strict=True)
    ]
    engine.reset_prefix_cache()
    seen: list[int] = []
    sample = engine._runner._sampler.sample

    def note(logits, states):  # type: ignore[no-untyped-def]
        seen.extend(i for s in states if s.counts is not None for i in s.counts.token_ids)
        return sample(logits, states)

    monkeypatch.setattr(engine._runner._sampler, "sample", note)
    outputs = engine.generate(prompts, sampling)
    assert [output.error for output in outputs] == [None] * 3
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert seen and max(seen) < engine._runner._model.vocab_size


@pytest.mark.parametrize("name", ["suppress_token_ids", "stop_token_ids"])
def test_an_id_without_a_logit_cannot_be_suppressed_or_a_stop_token(
    engine: LLMEngine, name: str
) -> None:
    last = engine._runner._model.vocab_size - 1
    for beyond in (last + 1, last + 8):
        with pytest.raises(ValueError, match=f"{name} holds {beyond}, .* ids 0 to {last}"):
            engine.generate(PLAIN, SamplingParams(**{name: (beyond,)}))


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    chosen: list[LogitsProcessor] = []
    if params.logit_bias:
        biases = {(token_id,): value for token_id, value in params.logit_bias.items()}
        chosen.append(SequenceBiasLogitsProcessor(biases))
    if params.suppress_token_ids:
        chosen.append(SuppressTokensLogitsProcessor(list(params.suppress_token_ids)))
    if params.min_tokens:
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, EOS))
    chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chosen.append(TopPLogitsWarper(params.top_p))
    return LogitsProcessorList(chosen)


def distribution(logits: Tensor, states: list[SamplingState]) -> Tensor:
    adjusted = logits.clone()
    apply_biases(adjusted, states)
    apply_masks(adjusted, states)
    apply_penalties(adjusted, states)
    return shape_distribution(adjusted, [state.params for state in states]).softmax(-1)


params_of_row = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 2, 10, 10_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    repetition_penalty=st.floats(0.5, 2.0),
    min_tokens=st.sampled_from([0, 2]),
    suppress_token_ids=st.sets(st.integers(4, 20), max_size=5).map(tuple),
    logit_bias=st.dictionaries(
        st.integers(0, 40), st.one_of(st.floats(-100, 100), st.floats(-5, 5)), max_size=5
    ),
)
history = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=6), st.lists(st.integers(0, 40), max_size=6)
)


@settings(max_examples=examples(100))
@given(
    rows=st.lists(st.tuples(params_of_row, history), min_size=1, max_size=5),
    vocab_size=st.sampled_from([41, 300, 2500]),
    seed=st.integers(0, 10_000),
)
def test_kept_tokens_and_probabilities_are_those_of_transformers(rows, vocab_size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 4
    states = [state(p, prompt, output, vocab_size=vocab_size) for p, (prompt, output) in rows]
    found = distribution(logits, states)
    for row, (params, (prompt, output)) in enumerate(rows):
        ids = torch.tensor([prompt + output])
        scores = processors(params, len(prompt))(ids, logits[row : row + 1].double())
        expected = scores.softmax(-1)[0]
        assert torch.equal(found[row] > 0, expected > 0)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), history), min_size=1, max_size=4
    )
)
def test_frequency_and_presence_count_the_output_only(rows):
    vocab_size = 41
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(1))
    adjusted = logits.clone()
    states = []
    for frequency, presence, (prompt, output) in rows:
        params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
        states.append(state(params, prompt, output, vocab_size=vocab_size))
    apply_penalties(adjusted, states)
    expected = logits.clone()
    for row, (frequency, presence, (_, output)) in enumerate(rows):
        for token_id, times in Counter(output).items():
            expected[row, token_id] -= frequency * times + presence
    torch.testing.assert_close(adjusted, expected, rtol=0, atol=1e-5)


def test_counts_grow_with_long_outputs():
    vocab_size = 5000
    output = [i % 700 for i in range(1500)]
    params = SamplingParams(frequency_penalty=0.5)
    adjusted = torch.zeros(1, vocab_size)
    apply_penalties(adjusted, [state(params, [4000], output, vocab_size=vocab_size)])
    counts = torch.bincount(torch.tensor(output), minlength=vocab_size)
    torch.testing.assert_close(adjusted[0], -0.5 * counts.float())


@pytest.mark.parametrize("vocab_size", [1500, 5000])
def test_top_p_of_a_flat_distribution_keeps_more_than_a_thousand_tokens(vocab_size: int):
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * 0.01
    flat, plain = SamplingParams(top_p=0.9), SamplingParams()
    found = shape_distribution(logits, [flat, plain])
    expected = TopPLogitsWarper(0.9)(torch.empty(2, 0), logits.double())
    assert torch.equal(found[0].isfinite(), expected[0].isfinite())
    assert 0.85 * vocab_size < int(found[0].isfinite().sum()) < 0.95 * vocab_size
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_equal_logits_are_kept_or_removed_together(params: SamplingParams):
    logits = torch.tensor([[3.0, 1.0, 3.0, 0.0, 3.0]])
    kept = shape_distribution(logits, [params]).isfinite()[0]
    assert kept.tolist() == [True, False, True, False, True]


_SHORT = {"type": "string", "maxLength": 6}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose JSON is short, so that a random model cannot generate without end."""
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
def forming(qwen2_checkpoint: str) -> LLMEngine:
    # Small steps and a pool too small for all requests: prompts are chunked, requests preempted.
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
    """Return the only completion, which must not have failed."""
    assert output.error is None
    (only,) = output.outputs
    return only


@settings(max_examples=examples(50))
@given(data=st.data())
def test_every_text_is_json_of_its_schema_in_any_batch(
    forming: LLMEngine, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(schemas(), min_size=1, max_size=5))
    prompt = TextPrompt("What is the capital of the country?")
    sampling = [params(seed, json_schema=schema) for seed, schema in enumerate(wanted)]
    free = SamplingParams(max_tokens=8, temperature=0.0)
    outputs = forming.generate([prompt] * (len(wanted) + 1), [*sampling, free])
    for schema, output in zip(wanted, map(completion, outputs), strict=False):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text or ""), schema)
    for index, alone in ((0, sampling[0]), (-1, free)):
        (output_alone,) = forming.generate(prompt, alone)
        assert completion(output_alone).token_ids == completion(outputs[index]).token_ids


Forms = tuple[str, str]
"""A regular expression and the right side of an equivalent Lark rule."""


def forms() -> st.SearchStrategy[Forms]:
    """Forms that match short texts only."""
    letters = st.sampled_from("aé-1 ").map(lambda each: (re.escape(each), json.dumps(each)))
    classes = st.sampled_from(["[a-f]", r"\d", "[^x-z0]", r"[é\-.]"]).map(lambda c: (c, f"/{c}/"))

    def nested(inner: st.SearchStrategy[Forms]) -> st.SearchStrategy[Forms]:
        several = st.lists(inner, min_size=2, max_size=3).map(
            lambda each: tuple(zip(*each, strict=True))
        )
        counts = st.sampled_from(["?", "{0,2}", "{2}", "{1,3}"])
        return (
            several.map(lambda each: ("".join(each[0]), f"({' '.join(each[1])})"))
            | several.map(lambda each: (f"(?:{'|'.join(each[0])})", f"({' | '.join(each[1])})"))
            | st.tuples(inner, counts).map(
                lambda each: (f"(?:{each[0][0]}){each[1]}", f"({each[0][1]}){each[1]}")
            )
        )

    return st.recursive(letters | classes, nested, max_leaves=6)


@settings(max_examples=examples(50))
@given(form=forms())
def test_every_text_matches_its_regular_expression_or_grammar(
    forming: LLMEngine, form: Forms
) -> None:
    pattern, rule = form
    for wanted in (params(7, regex=pattern), params(7, grammar=f"start: {rule}")):
        both = wanted.model_copy(update={"n": 2})
        (output,) = forming.generate([TextPrompt("Once upon a time")], both)
        for each in output.outputs:
            assert each.finish_reason == "stop"
            assert re.fullmatch(pattern, each.text or "", re.DOTALL)


@settings(max_examples=examples(50))
@given(choice=st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True))
def test_every_text_is_one_of_the_choices(forming: LLMEngine, choice: list[str]) -> None:
    (output,) = forming.generate([TextPrompt("Choose:")], params(1, choice=tuple(choice)))
    assert completion(output).text in choice


def test_completions_of_a_prompt_differ(forming: LLMEngine) -> None:
    wanted = params(7, regex="[a-f]{3,8}").model_copy(update={"n": 3})
    (output,) = forming.generate([TextPrompt("Once upon a time")], wanted)
    assert len({each.text for each in output.outputs}) > 1


def test_a_grammar_is_followed(forming: LLMEngine) -> None:
    grammar = 'start: "(" start ")" | /[0-9]{1,3}/'
    (output,) = forming.generate([TextPrompt("Brackets:")], params(3, grammar=grammar))
    text = completion(output).text or ""
    assert re.fullmatch(r"\(*[0-9]{1,3}\)*", text) and text.count("(") == text.count(")")


@pytest.mark.parametrize(
    "grammar",
    ['?start: "ab"', '!start: "ab"', 'start[capture]: "ab"', 'root ::= x\nx ::= "a" "b"'],
)
def test_a_grammar_is_lark_or_gbnf(forming: LLMEngine, grammar: str) -> None:
    (output,) = forming.generate([TextPrompt("Letters:")], params(3, grammar=grammar))
    assert completion(output).text == "ab"


def test_an_unknown_format_is_ignored(forming: LLMEngine) -> None:
    """JSON Schema requires it; pydantic writes such formats for its own types."""
    place = {"type": "string", "format": "path", "maxLength": 8, "description": "where"}
    fields = {"format": place, "day": {"type": "string", "format": "date"}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    for given_as in (schema, json.dumps(schema)):
        (output,) = forming.generate([TextPrompt("JSON:")], params(3, json_schema=given_as))
        answer = json.loads(completion(output).text or "")
        assert len(answer["format"]) <= 8 and re.fullmatch(r"\d{4}-\d\d-\d\d", answer["day"])


def test_any_object_is_json(forming: LLMEngine) -> None:
    (output,) = forming.generate([TextPrompt("JSON:")], params(3, json_object=True))
    text = completion(output).text or ""
    assert text.startswith("{")
    if completion(output).finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def optional_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{each}": {} for each in range(number)}}


def test_the_maximum_of_optional_properties_is_taken(forming: LLMEngine) -> None:
    wanted = params(0, json_schema=optional_properties(480)).model_copy(update={"max_tokens": 40})
    (output,) = forming.generate([TextPrompt("An object:")], wanted)
    assert (completion(output).text or "").startswith("{")


def test_a_form_is_compiled_once_for_all_its_requests(forming: LLMEngine) -> None:
    wanted = params(0, regex="[a-z]{2,4}!")
    compiled = forming._inputs._grammars._compile_form
    before = compiled.cache_info().misses
    for _ in range(3):
        (output,) = forming.generate([TextPrompt("Letters:")], wanted)
        assert re.fullmatch("[a-z]{2,4}!", completion(output).text or "")
    assert compiled.cache_info().misses == before + 1


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "give one of json_schema, json_object, regex, choice and grammar, got none"),
        ({"regex": "a", "choice": ("b",)}, "got regex and choice"),
        ({"regex": "a("}, "regex: cannot be read: .*unclosed group"),
        # The translator of GBNF needs a minute for the maximum number of line breaks.
        ({"grammar": 'root ::= "a"' + "\n" * 60_000}, "GBNF of more than 4096 characters"),
        ({"grammar": 'root ::= start\nstart ::= "a"'}, "no GBNF that can be read"),
        ({"grammar": "\n" * 60_000 + "start"}, "grammar: cannot be read"),
        ({"json_schema": {"type": "foo"}}, "json_schema: cannot be read: Invalid type: foo"),
        ({"json_schema": '{"a'}, "json_schema: cannot be read"),
        ({"json_schema": {"if": {}}}, 'Unimplemented keys: \\["if"\\]'),
        ({"json_schema": {"$ref": "http://localhost/a"}}, "json_schema: cannot be read"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json_schema": {"items": optional_properties(481)}}, "an object has 481 optional"),
        ({"choice": ()}, "choice: must not be empty"),
        ({"regex": "a" * 70_000}, "regex: has 70000 characters; forms of at most 65536"),
    ],
)
def test_an_invalid_form_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(**form)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_other_end_conditions_are_refused_with_a_form(other: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(other))}: does not go with structured_output"
    ):
        SamplingParams(structured_output=StructuredOutput(regex="a"), **other)


def test_structured_output_of_a_headless_model_is_refused(seeded: Callable[[str], str]) -> None:
    headless = LLMEngine(EngineConfig(model=seeded("qwen2-headless"), num_blocks=32))
    with pytest.raises(ValueError, match="no language-model head"):
        headless.check_sampling(params(0, regex="a"))


def test_a_form_round_trips_through_json() -> None:
    sampling = SamplingParams(structured_output=StructuredOutput(json_schema={"type": "null"}))
    assert SamplingParams.model_validate_json(sampling.model_dump_json(), strict=True) == sampling
