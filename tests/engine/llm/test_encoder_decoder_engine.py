"""Encoder-decoder models through the whole engine, against transformers with the same weights."""

from __future__ import annotations

import wave
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import AudioPrompt, EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.models.encoder_module import EncoderDecoderModel
from engine.requests.encoder_input import EncoderInput
from omni.seeded.language_models import build_bart, build_mllama, build_t5, build_whisper
from tests.support.encoder_decoder_requests import Case, Oracle, cases, tone, write_wav
from tests.support.greedy_reference import GreedyAnswer, assert_greedy
from tests.support.idle_engine import finish
from tests.support.native_kernels import needs_kernels

FAMILIES = ("bart", "t5", "t5-gated", "whisper", "mllama")
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OUTPUTS = ("hidden_states", "encoder_hidden_states")


@dataclass(frozen=True)
class Expected:
    """Results of transformers for a case: the answer, and the encoder's input and output."""

    answer: GreedyAnswer
    entry: EncoderInput | None
    encoder_rows: Tensor


@dataclass(frozen=True)
class Family:
    name: str
    folder: str
    cases: Sequence[Case]
    expected: Callable[[Case], Expected]


def family_of(name: str, folder: str) -> Family:
    oracle, kind = Oracle(folder), name.split()[0]

    @cache  # a dozen tests compare with the same few cases
    def expected(case: Case) -> Expected:
        entry = oracle.read(case)
        rows = torch.empty(0) if entry is None else oracle.reference.encode(entry)
        return Expected(oracle.answer(case, NUM_TOKENS), entry, rows)

    return Family(kind, folder, cases(kind, folder), expected)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Family:
    return family_of(request.param, seeded(request.param))


def build(folder: str, *, outputs: Sequence[str] = OUTPUTS, **settings: Any) -> LLMEngine:
    chosen: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 256,
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
    }
    engine = LLMEngine(EngineConfig(model=folder, **chosen | settings), output_names=outputs)
    memory = engine._runner._memory
    memory.buffer[memory.config.large_page_bytes :] = 0xFF  # NaN until it is written
    return engine


def assert_parity(family: Family, case: Case, output: RequestOutput) -> None:
    expected = family.expected(case)
    answer, entry = expected.answer, expected.entry
    assert output.error is None
    assert output.outputs[0].tensors.keys() == set(OUTPUTS)
    assert output.prompt_token_ids == case.decoder
    assert output.encoder_prompt_token_ids == ((entry and entry.token_ids) or None)
    assert output.encoder_prompt == (case.encoder if isinstance(case.encoder, str) else None)
    (completion,) = output.outputs
    if not assert_greedy(answer, completion.token_ids):
        return
    tensors = completion.tensors
    torch.testing.assert_close(tensors["hidden_states"], answer.hidden_states, atol=1e-4, rtol=0)
    if entry is None:
        assert not len(tensors["encoder_hidden_states"])
    else:
        rows = tensors["encoder_hidden_states"]
        torch.testing.assert_close(rows, expected.encoder_rows, atol=1e-4, rtol=0)


class Encodes:
    """Inputs of an engine's encoder, one list per step in which it ran."""

    def __init__(self) -> None:
        self.steps: list[list[EncoderInput]] = []

    @property
    def total(self) -> int:
        return sum(map(len, self.steps))


@contextmanager
def counted_encodes(engine: LLMEngine) -> Iterator[Encodes]:
    model, encodes = engine._runner._model, Encodes()
    assert isinstance(model, EncoderDecoderModel)

    def encode(inputs: Sequence[EncoderInput]) -> Tensor:
        encodes.steps.append(list(inputs))
        return type(model).encode(model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "encode", encode, raising=False)
        yield encodes


def assert_all_equal_transformers(family: Family, engine: LLMEngine) -> None:
    outputs = engine.generate([case.prompt for case in family.cases], GREEDY)
    for case, output in zip(family.cases, outputs, strict=True):
        assert_parity(family, case, output)
    engine.check_integrity()


@pytest.mark.shows("parity", "hidden states", "images", "audio")
@pytest.mark.parametrize(
    ("block_size", "budget", "backend"),
    [(1, 64, "torch"), (4, 3, "torch"), pytest.param(16, 3, "native", marks=needs_kernels)],
)
def test_a_mixed_batch_equals_transformers(
    family: Family, block_size: int, budget: int, backend: Any
) -> None:
    """Chunked and whole decoder prompts, more requests than ``max_num_seqs``."""
    settings = {"max_num_batched_tokens": budget, "attention_backend": backend}
    assert_all_equal_transformers(family, build(family.folder, block_size=block_size, **settings))


VARIANTS: dict[str, Callable[[Path], Path]] = {
    "bart scaled, of uneven halves": partial(
        build_bart,
        scale_embedding=True,
        decoder_layers=3,
        decoder_attention_heads=2,
        decoder_ffn_dim=96,
        activation_function="relu",
    ),
    "t5 of uneven halves": partial(build_t5, num_decoder_layers=3, num_layers=1),
    "t5 with few buckets": partial(
        build_t5, relative_attention_num_buckets=8, relative_attention_max_distance=9
    ),
    "t5 gated by silu, with long distances": partial(
        build_t5, feed_forward_proj="gated-silu", relative_attention_max_distance=128
    ),
    "whisper of uneven halves": partial(build_whisper, decoder_layers=1, decoder_ffn_dim=64),
    # Dimensions of size 1 change strides, and kernels read those.
    "bart with one head": partial(build_bart, encoder_attention_heads=1, decoder_attention_heads=1),
    "t5 with one head": partial(build_t5, num_heads=1),
    "whisper with one head": partial(
        build_whisper, decoder_attention_heads=1, encoder_attention_heads=1
    ),
    "mllama with one key head": partial(build_mllama, num_key_value_heads=1),
    "mllama with one head": partial(
        build_mllama, num_key_value_heads=1, num_attention_heads=1, hidden_size=32
    ),
    "mllama with llama3 rope": partial(
        build_mllama,
        cross_attention_layers=[0, 2],
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = str(VARIANTS[name](tmp_path))
    assert_all_equal_transformers(family_of(name, folder), build(folder))


def _add_own_head(weights: dict[str, Tensor]) -> None:
    """Add the head that T5 1.1 stores, although transformers' config ties all T5s."""
    weights["lm_head.weight"] = weights["shared.weight"].flip(0).contiguous()


def _name_the_embedding_head(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights.pop("model.shared.weight")


def _drop_the_bias_of_logits(weights: dict[str, Tensor]) -> None:
    del weights["final_logits_bias"]


@pytest.mark.parametrize(
    ("name", "make", "change"),
    [
        ("t5", partial(build_t5, gated=True), _add_own_head),
        ("bart", build_bart, _name_the_embedding_head),
        ("bart", build_bart, _drop_the_bias_of_logits),
    ],
    ids=["own head", "head alone", "no bias on logits"],
)
def test_other_weight_layouts_equal_transformers(
    name: str,
    make: Callable[[Path], Path],
    change: Callable[[dict[str, Tensor]], None],
    tmp_path: Path,
) -> None:
    file = make(tmp_path) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    family = family_of(name, str(tmp_path))
    assert_all_equal_transformers(family, build(family.folder))


def test_a_second_round_encodes_nothing_and_equals_the_first(family: Family) -> None:
    engine = build(family.folder, max_num_seqs=4)
    prompts = [case.prompt for case in family.cases]
    with counted_encodes(engine) as encodes:
        engine.generate(prompts, GREEDY)
        num_inputs = sum(case.encoder is not None for case in family.cases)
        assert encodes.total == num_inputs
        outputs = engine.generate(prompts, GREEDY)
        assert encodes.total == num_inputs
    assert (engine.stats().encoder_runs, engine.stats().encoder_hits) == (num_inputs, num_inputs)
    for case, output in zip(family.cases, outputs, strict=True):
        assert_parity(family, case, output)


def test_requests_of_one_input_at_once_encode_it_once(family: Family) -> None:
    """A request whose input is being encoded waits a step and shares the blocks."""
    engine, case = build(family.folder), family.cases[0]
    with counted_encodes(engine) as encodes:
        several = GREEDY.model_copy(update={"n": 2})
        outputs = engine.generate([case.prompt] * 3, [GREEDY, several, GREEDY])
        assert encodes.total == 1
    for output in outputs:
        for completion in output.outputs:
            assert completion.token_ids == outputs[0].outputs[0].token_ids
            assert completion.tensors.keys() == set(OUTPUTS)


def test_without_caching_every_request_encodes(family: Family) -> None:
    engine, case = build(family.folder, enable_prefix_caching=False), family.cases[0]
    with counted_encodes(engine) as encodes:
        first, second = engine.generate([case.prompt] * 2, GREEDY)
        assert encodes.total == 2
    assert (engine.stats().encoder_runs, engine.stats().encoder_hits) == (2, 0)
    assert_parity(family, case, first)
    assert_parity(family, case, second)


def test_another_salt_encodes_again(family: Family) -> None:
    engine, case = build(family.folder), family.cases[0]
    with counted_encodes(engine) as encodes:
        for number, salt in enumerate([None, "a", "a", "b"]):
            engine.add_request(str(number), case.prompt, GREEDY, cache_salt=salt)
            finish(engine)
        assert encodes.total == 3


def test_a_hit_without_the_encoders_rows_runs_it_again(family: Family) -> None:
    """Promise 3: keys and values are cached, but the requested output is not."""
    engine, case = build(family.folder), family.cases[0]
    engine.generate(case.prompt, GREEDY)
    rows = engine._kv.encoder_outputs
    assert rows is not None
    rows._stores["encoder_hidden_states"].tags.zero_()
    with counted_encodes(engine) as encodes:
        (output,) = engine.generate(case.prompt, GREEDY)
        assert encodes.total == 1
    assert_parity(family, case, output)


def test_encoder_rows_are_kept_only_when_asked_for(family: Family) -> None:
    engine, case = build(family.folder, outputs=["hidden_states"]), family.cases[0]
    assert engine._kv.encoder_outputs is None
    (output,) = engine.generate(case.prompt, GREEDY)
    assert output.outputs[0].tensors.keys() == {"hidden_states"}


@pytest.mark.parametrize("limit", [1, 40, None])
def test_a_step_encodes_no_more_than_its_budget(family: Family, limit: int | None) -> None:
    """A single longer input runs alone."""
    engine = build(family.folder, max_num_encoder_tokens=limit, max_num_seqs=5)
    with counted_encodes(engine) as encodes:
        outputs = engine.generate([case.prompt for case in family.cases], GREEDY)
    for entries in encodes.steps:
        tokens = sum(entry.num_tokens for entry in entries)
        assert limit is None or tokens <= limit or len(entries) == 1
    assert encodes.total == sum(case.encoder is not None for case in family.cases)
    if limit == 1:
        assert len(encodes.steps) == encodes.total
    for case, output in zip(family.cases, outputs, strict=True):
        assert_parity(family, case, output)


def test_parallel_completions_share_the_input_and_differ(family: Family) -> None:
    engine, case = build(family.folder), family.cases[0]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True)
    with counted_encodes(engine) as encodes:
        (output,) = engine.generate(case.prompt, params)
        assert encodes.total == 1
    assert len({completion.token_ids for completion in output.outputs}) == 3
    alone = build(family.folder, enable_prefix_caching=False, max_num_seqs=1)
    (expected,) = alone.generate(case.prompt, params)
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]


TEXT = "The rain in spain falls mainly on the"


def test_a_transcribed_file_equals_transformers_generate(
    tmp_path: Path, seeded: Callable[[str], str]
) -> None:
    """Compares with transformers' own loop, which builds the prompt itself."""
    oracle, engine = Oracle(seeded("whisper")), build(seeded("whisper"))
    path = write_wav(tmp_path / "tone.wav", tone(1.2, 900.0))
    audio = AudioPrompt(path, language="de", task="translate")
    (output,) = engine.generate(audio, GREEDY)
    expected = oracle.reference.model.generate(
        heard(oracle, path)[None],
        language="de",
        task="translate",
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    assert list(output.outputs[0].token_ids) == expected[0].tolist()


def heard(oracle: Oracle, path: Path) -> Tensor:
    """Return a file's features, computed by transformers."""
    with wave.open(str(path)) as file:
        stored = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    entry = oracle.read(Case(stored.astype(np.float32), (), ""))
    assert entry is not None
    return entry.features["input_features"]


def test_a_decoder_only_model_has_no_encoder_rows(qwen2_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="no per-token output 'encoder_hidden_states'"):
        build(qwen2_checkpoint)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_encoders_rows_are_reserved_and_planned_at_the_start(
    family: Family, dtype: Literal["float32", "bfloat16"]
) -> None:
    engine = build(family.folder, dtype=dtype)
    reported = dict(engine.memory_plan.stage_output_bytes)
    assert reported.keys() == set(OUTPUTS)
    (output,) = engine.generate(family.cases[0].prompt, GREEDY)
    assert output.error is None
    assert engine._kv.outputs.nbytes_by_name == reported


def test_an_input_that_can_never_fit_is_refused_at_once(seeded: Callable[[str], str]) -> None:
    engine = build(seeded("bart"), num_blocks=12, max_model_len=24)
    with pytest.raises(ValueError, match="40 encoder tokens take 13 blocks, the pool has 11"):
        engine.add_request("big", TokensPrompt((7,) * 40), GREEDY)
    (output,) = engine.generate(TokensPrompt((7,) * 30), GREEDY)
    assert output.error is None


def test_a_failing_encoder_fails_only_its_step(
    seeded: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(seeded("bart"))
    with pytest.MonkeyPatch.context() as patch:

        def fail(inputs: Sequence[EncoderInput]) -> Tensor:
            raise RuntimeError("out of order")

        patch.setattr(engine._runner._model, "encode", fail, raising=False)
        engine.add_request("unlucky", TEXT, GREEDY)
        (output,) = engine.step()
        assert output.error is not None and "out of order" in output.error
        engine.check_integrity()
    (again,) = engine.generate(TEXT, GREEDY)
    assert again.error is None
    assert Counter(record.levelname for record in caplog.records)["ERROR"] == 1
