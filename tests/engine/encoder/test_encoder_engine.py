"""Encoder outputs equal those of transformers for each input alone, cached or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from engine import (
    EmbedsPrompt,
    EncoderEngine,
    EncoderOutput,
    EngineConfig,
    TextPrompt,
    TokensPrompt,
)
from engine.encoder.encoder_engine import EncoderRequest, next_batch
from engine.encoder.sentence_layout import pool
from omni.seeded.language_models import build_causal_lm, build_text_encoder
from prefix_cache import whole_input_hash
from tests.support.examples import examples
from tests.support.idle_engine import finish

HIDDEN = 64
VOCAB = 768

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    "electra": {"embedding_size": 32},
    "mpnet": {},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def build(architecture: str) -> str:
        folder, options = tmp_path_factory.mktemp(architecture), ARCHITECTURES[architecture]
        return str(build_text_encoder(folder, architecture, max_position_embeddings=64, **options))

    return build


@pytest.fixture(scope="module")
def bert(checkpoint: Callable[[str], str]) -> str:
    return checkpoint("bert")


@pytest.fixture(scope="module")
def bert_engine(bert: str) -> EncoderEngine:
    return engine_of(bert)


def engine_of(model: str, **settings: Any) -> EncoderEngine:
    options = {name: settings.pop(name) for name in ("output_names", "pooling") if name in settings}
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64} | settings
    return EncoderEngine(EngineConfig(model=model, device="cpu", **limits), **options)


def token_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(5, VOCAB, (length,), generator=generator).tolist())


def run(engine: EncoderEngine, prompts: Sequence[Any], **options: Any) -> list[EncoderOutput]:
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, **options)
    done = finish(engine)
    return [done[f"r{index}"] for index in range(len(prompts))]


@cache
def oracle(model: str) -> Any:
    return AutoModel.from_pretrained(model, dtype=torch.float32).eval()


@torch.no_grad()
def alone(model: str, **inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """The oracle: transformers on one input, without padding."""
    output = oracle(model)(**inputs)
    pooled = output.get("pooler_output")
    return output.last_hidden_state[0], None if pooled is None else pooled[0]


@cache
def rows_alone(model: str, ids: tuple[int, ...]) -> Tensor:
    return alone(model, input_ids=torch.tensor([ids]))[0]


def assert_same(actual: EncoderOutput, expected: EncoderOutput) -> None:
    assert actual.error is None and expected.error is None
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(actual.tensors[name], tensor, atol=1e-5, rtol=0)


# Outputs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_equal_transformers_run_alone_for_mixed_lengths(
    architecture: str, checkpoint: Callable[[str], str]
):
    model = checkpoint(architecture)
    engine = engine_of(model)
    prompts = [token_ids(length) for length in (1, 2, 3, 7, 8, 9, 30, 17, 4)]
    outputs = run(engine, [TokensPrompt(ids) for ids in prompts])
    for ids, output in zip(prompts, outputs, strict=True):
        rows, pooler_output = alone(model, input_ids=torch.tensor([ids]))
        torch.testing.assert_close(output.tensors["hidden_states"], rows, atol=1e-5, rtol=0)
        pooled = rows.mean(0) if pooler_output is None else pooler_output
        torch.testing.assert_close(output.tensors["pooled"], pooled, atol=1e-5, rtol=0)
        assert (output.num_prompt_tokens, output.num_cached_tokens) == (len(ids), 0)
        assert output.prompt_token_ids == ids
        assert output.finished and output.metrics.total_s is not None


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_embeddings_run_with_token_ids(architecture: str, checkpoint: Callable[[str], str]):
    model = checkpoint(architecture)
    embeds = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (5, 9)]
    prompts = [EmbedsPrompt(embeds[0]), TokensPrompt(token_ids(6)), EmbedsPrompt(embeds[1])]
    outputs = run(engine_of(model), prompts)
    for output, rows_in in zip((outputs[0], outputs[2]), embeds, strict=True):
        rows, _ = alone(model, inputs_embeds=rows_in[None])
        torch.testing.assert_close(output.tensors["hidden_states"], rows, atol=1e-5, rtol=0)
        assert output.prompt_token_ids == ()
    rows, _ = alone(model, input_ids=torch.tensor([token_ids(6)]))
    torch.testing.assert_close(outputs[1].tensors["hidden_states"], rows, atol=1e-5, rtol=0)


def test_text_is_tokenized_by_the_checkpoints_tokenizer(bert: str, bert_engine: EncoderEngine):
    text = "the quick brown fox"
    with_special, without = run(
        bert_engine, [text, TextPrompt(text, add_special_tokens=False)], cache_salt="text"
    )
    assert bert_engine.tokenizer is not None
    assert list(with_special.prompt_token_ids) == bert_engine.tokenizer(text)["input_ids"]
    assert with_special.prompt_token_ids[1:-1] == without.prompt_token_ids
    rows, _ = alone(bert, input_ids=torch.tensor([with_special.prompt_token_ids]))
    torch.testing.assert_close(with_special.tensors["hidden_states"], rows, atol=1e-5, rtol=0)


def test_a_checkpoint_without_pooler_weights_is_pooled_by_mean(bert: str, tmp_path: Path):
    folder = copy_of(bert, tmp_path, keep=lambda name: not name.startswith("pooler."))
    engine = engine_of(folder)
    assert engine.pooling == "mean"
    with pytest.raises(ValueError, match="needs a checkpoint with pooler weights"):
        engine_of(folder, pooling="pooler")


# The cache


def test_a_hit_equals_the_earlier_miss_and_the_uncached_run(bert: str):
    prompts = [TokensPrompt(token_ids(n)) for n in (1, 4, 5, 12)]
    engine = engine_of(bert)
    cold, warm = run(engine, prompts), run(engine, prompts)
    uncached = run(engine_of(bert, enable_prefix_caching=False), prompts)
    for miss, hit, plain in zip(cold, warm, uncached, strict=True):
        assert (miss.num_cached_tokens, plain.num_cached_tokens) == (0, 0)
        assert hit.num_cached_tokens == hit.num_prompt_tokens
        assert_same(hit, miss)
        assert_same(hit, plain)
    assert engine.stats().cached_tokens == 22
    assert engine.stats().prompt_tokens == 44


def test_hits_depend_on_salt_embeddings_and_reset(bert: str):
    engine = engine_of(bert)
    ids = token_ids(5)
    run(engine, [TokensPrompt(ids)], cache_salt="a")
    assert run(engine, [TokensPrompt(ids)], cache_salt="b")[0].num_cached_tokens == 0
    assert run(engine, [TokensPrompt(ids)], cache_salt="a")[0].num_cached_tokens == 5
    embeds = torch.zeros(5, HIDDEN)
    assert run(engine, [EmbedsPrompt(embeds)])[0].num_cached_tokens == 0
    assert run(engine, [TokensPrompt((0,) * 5)])[0].num_cached_tokens == 0
    assert run(engine, [EmbedsPrompt(embeds.clone())])[0].num_cached_tokens == 5
    assert run(engine, [EmbedsPrompt(embeds + 1)])[0].num_cached_tokens == 0
    engine.reset_prefix_cache()
    assert run(engine, [TokensPrompt(ids)], cache_salt="a")[0].num_cached_tokens == 0


def test_equal_inputs_in_flight_are_computed_once(bert: str):
    engine = engine_of(bert)
    forwarded = spy_on_forward(engine)
    outputs = run(engine, [TokensPrompt(token_ids(6))] * 3 + [TokensPrompt(token_ids(7))])
    assert sorted(forwarded) == [6, 7]
    assert [output.num_cached_tokens for output in outputs] == [0, 6, 6, 0]
    assert_same(outputs[1], outputs[0])
    engine.enable_prefix_caching = False
    assert all(not o.num_cached_tokens for o in run(engine, [TokensPrompt(token_ids(6))] * 2))
    assert sorted(forwarded) == [6, 6, 6, 7]


@settings(max_examples=examples(25))
@given(
    stream=st.lists(
        st.tuples(
            st.integers(1, 16),  # length; equal lengths and seeds make equal inputs
            st.integers(0, 1),
            st.integers(0, 2),  # priority
            st.sampled_from(["run", "abort", "step"]),
        ),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(5, 12),
)
def test_any_stream_gives_the_outputs_of_each_input_alone(
    bert: str, stream: list[Any], num_blocks: int
):
    engine = cached_engine(bert, num_blocks=num_blocks)
    engine.reset_prefix_cache()
    expected: dict[str, tuple[int, ...]] = {}
    outputs: list[EncoderOutput] = []
    for index, (length, seed, priority, action) in enumerate(stream):
        request_id = f"s{index}"
        expected[request_id] = token_ids(length, seed)
        engine.add_request(request_id, TokensPrompt(expected[request_id]), priority=priority)
        if action == "abort":
            engine.abort(request_id)
            del expected[request_id]
        elif action == "step":
            outputs += engine.step()
            engine.check_integrity()
    while engine.has_unfinished_requests:
        outputs += engine.step()
        engine.check_integrity()
    assert sorted(output.request_id for output in outputs) == sorted(expected)
    for output in outputs:
        rows = rows_alone(bert, expected[output.request_id])
        torch.testing.assert_close(output.tensors["hidden_states"], rows, atol=1e-5, rtol=0)


# Errors


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TokensPrompt(()), "empty"),
        (TokensPrompt((5, VOCAB)), f"prompt token 1 is {VOCAB}"),
        (TokensPrompt((-1,)), "prompt token 0 is -1"),
        (TokensPrompt(token_ids(65)), "65 tokens, but max_model_len is 64"),
        (TokensPrompt(token_ids(33)), "33 tokens, but max_num_batched_tokens is 32"),
        (TokensPrompt(token_ids(25)), "can never fit: 25 tokens, the whole cache holds 24"),
        (EmbedsPrompt(torch.zeros(3, HIDDEN + 1)), r"\(num_tokens, 64\).*got \(3, 65\)"),
        (EmbedsPrompt(torch.zeros(3, HIDDEN, dtype=torch.int64)), "floating point"),
        (EmbedsPrompt(torch.full((3, HIDDEN), torch.nan)), "NaN"),
        (5, "a prompt is a str"),
    ],
)
def test_an_input_that_cannot_run_is_refused_and_changes_nothing(
    bert: str, prompt: Any, message: str
):
    engine = cached_engine(bert, num_blocks=7, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt)
    assert not engine.has_unfinished_requests
    assert run(engine, [TokensPrompt(token_ids(24))])[0].error is None


def test_positions_of_roberta_begin_after_its_padding_id(checkpoint: Callable[[str], str]):
    engine = engine_of(checkpoint("roberta"), max_num_batched_tokens=128)
    assert engine.max_model_len == 63  # 64 positions, padding id 0
    assert run(engine, [TokensPrompt(token_ids(63))])[0].error is None
    with pytest.raises(ValueError, match="max_model_len is 63"):
        engine.add_request("long", TokensPrompt(token_ids(64)))


def test_a_failing_input_fails_alone(bert: str, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(bert)
    real = engine._model.forward

    def forward(batch: Sequence[Tensor]) -> dict[str, Tensor]:
        if any(len(entry) == 5 for entry in batch):
            raise RuntimeError("out of luck")
        return real(batch)

    monkeypatch.setattr(engine._model, "forward", forward)
    good, bad, twin, other = run(engine, [TokensPrompt(token_ids(n)) for n in (4, 5, 5, 6)])
    assert good.error is None and other.error is None
    for failed in (bad, twin):
        assert failed.error == "the encoder failed: RuntimeError: out of luck"
        assert failed.finished and not failed.tensors
    monkeypatch.undo()
    (retried,) = run(engine, [TokensPrompt(token_ids(5))])
    assert retried.error is None and retried.num_cached_tokens == 0


def test_an_input_that_cannot_be_pooled_fails_alone(bert: str, monkeypatch: pytest.MonkeyPatch):
    def fragile(pooling: Any, rows: Tensor, pooler: Any) -> Tensor:
        if len(rows) == 5:
            raise RuntimeError("out of luck")
        return pool(pooling, rows, pooler)

    monkeypatch.setattr("engine.encoder.encoder_engine.pool", fragile)
    good, bad = run(engine_of(bert), [TokensPrompt(token_ids(n)) for n in (4, 5)])
    assert good.error is None
    assert bad.error == "the encoder failed: RuntimeError: out of luck"


def test_unknown_outputs_and_poolings_are_refused_at_start(bert: str):
    with pytest.raises(ValueError, match="no output 'codec'; it gives hidden_states, pooled"):
        engine_of(bert, output_names=("codec",))
    with pytest.raises(ValueError, match="unknown pooling 'max'"):
        engine_of(bert, pooling="max")
    with pytest.raises(ValueError, match="max_model_len 65 is longer than the 64 positions"):
        engine_of(bert, max_model_len=65)


@pytest.mark.parametrize("with_head", [True, False])
def test_the_error_for_a_causal_decoder_names_the_llm_engine(tmp_path: Path, with_head: bool):
    build_causal_lm(tmp_path / "qwen2", "qwen2", with_head=with_head)
    with pytest.raises(ValueError, match=r"causal decoder.*LLMEngine"):
        engine_of(str(tmp_path / "qwen2"))


def test_missing_weights_are_named(bert: str, tmp_path: Path):
    folder = copy_of(bert, tmp_path, keep=lambda name: "layer.1.output.dense" not in name)
    with pytest.raises(ValueError, match=r"lacks 2 weights of BertModel: encoder.layer.1"):
        engine_of(folder)


def test_the_memory_plan_includes_the_cached_rows(bert: str):
    plan = engine_of(bert, num_blocks=9).memory_plan
    assert plan.num_blocks == 9
    assert plan.stage_output_bytes == {"hidden_states": 9 * 4 * HIDDEN * 4}
    assert plan.weights_bytes == sum(
        t.nbytes for t in load_file(f"{bert}/model.safetensors").values()
    )
    assert any("hidden_states" in line for line in plan.lines())


# Helpers


# Building an engine costs more than a stream of a test: there is one per geometry.
cached_engine = cache(engine_of)


def copy_of(model: str, folder: Path, keep: Callable[[str], bool]) -> str:
    """Copy of the checkpoint without the tensors that ``keep`` rejects."""
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(model) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if keep(name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def spy_on_forward(engine: EncoderEngine) -> list[int]:
    """A list that gets the lengths of all inputs the model runs on from now on."""
    lengths: list[int] = []
    real = engine._model.forward

    def forward(batch: Sequence[Tensor]) -> dict[str, Tensor]:
        lengths.extend(len(entry) for entry in batch)
        return real(batch)

    engine._model.forward = forward  # type: ignore[method-assign]
    return lengths


MAX_SEQS = 3
BUDGET = 24


def request(index: int, length: int, priority: int = 0, embeds: bool = False) -> EncoderRequest:
    return EncoderRequest(
        request_id=f"r{index}",
        content=torch.zeros(length, 2) if embeds else torch.zeros(length, dtype=torch.int64),
        input_hash=whole_input_hash([length, int(embeds)]),
        priority=priority,
        arrival_index=index,
    )


@given(
    st.lists(
        st.tuples(st.integers(1, BUDGET), st.integers(0, 2), st.booleans()), min_size=1, max_size=20
    )
)
def test_every_batch_keeps_the_limits_and_starts_with_the_first_request(specs):
    requests = [request(i, *spec) for i, spec in enumerate(specs)]
    order = sorted(requests, key=lambda r: (r.priority, r.arrival_index))
    while order:
        batch = next_batch(order, MAX_SEQS, BUDGET, share=False)
        assert batch[0] is order[0]
        cells = max(r.num_tokens for r in batch) * len(batch)
        assert cells <= BUDGET and len(batch) <= MAX_SEQS
        assert cells <= 2 * sum(r.num_tokens for r in batch)
        assert len({r.is_embeds for r in batch}) == 1
        for item in batch:
            order.remove(item)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([request(0, 6), request(1, 3), request(2, 7), request(3, 6)], ["r0", "r3", "r2"]),
        ([request(0, 6), request(3, 8, 1), request(1, 6, 2), request(2, 6, 2)], ["r0", "r3", "r1"]),
    ],
    ids=["nearest in length", "higher priority before nearer length"],
)
def test_others_join_the_first_request(order: list[EncoderRequest], expected: list[str]):
    batch = next_batch(order, MAX_SEQS, BUDGET, share=False)
    assert [item.request_id for item in batch] == expected
