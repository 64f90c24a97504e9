"""The engine's methods: generate, stream, abort, n, checkpoint defaults, row keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import (
    ChatPrompt,
    EmbedsPrompt,
    EngineConfig,
    FinishReason,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.checkpoints.checkpoint import Checkpoint
from engine.interface.outputs import OutputDelta
from engine.requests.request import Request
from engine.text.stop_checker import StopStrings
from omni.commands.explanation import describe_config, describe_memory
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.seeded.language_models import build_causal_lm
from prefix_cache import SingleTypeKVCacheManager
from stages.stage_output import OutputAccumulator
from tests.support.idle_engine import finish
from tests.support.speech import made_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = TokensPrompt(tuple(range(50, 70)))


@pytest.fixture(scope="module")
def engine(qwen2_checkpoint: str) -> LLMEngine:
    return LLMEngine(EngineConfig(model=qwen2_checkpoint, block_size=4, max_num_seqs=4))


def test_leaving_a_stream_early_frees_the_request(engine: LLMEngine) -> None:
    for _ in engine.stream(PROMPT, GREEDY):
        break
    assert not engine.has_unfinished_requests
    kv = engine.stats().kv
    assert kv is not None and kv.held == 0
    engine.check_integrity()


def test_prompt_forms_agree(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None
    text = "You are a helpful assistant"
    token_ids = tuple(engine.tokenizer(text)["input_ids"])
    rows = engine._runner._model.embed(torch.tensor(token_ids))
    answers = {
        output.outputs[0].text
        for output in engine.generate(
            [text, TextPrompt(text), TokensPrompt(token_ids), EmbedsPrompt(rows)], GREEDY
        )
    }
    assert len(answers) == 1


def test_chat_messages_go_through_the_checkpoints_template(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None
    messages = ({"role": "user", "content": "why is the sky blue"},)
    rendered = engine.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    chat = engine.generate(ChatPrompt(messages), GREEDY)[0]
    plain = engine.generate(TextPrompt(rendered, add_special_tokens=False), GREEDY)[0]
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


def test_n_completions_are_those_of_n_requests_with_their_seeds(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=5, n=3)
    together = engine.generate(PROMPT, params)[0]
    singles = engine.generate(
        [PROMPT] * 3, [params.model_copy(update={"n": 1, "seed": 5 + i}) for i in range(3)]
    )
    assert [c.token_ids for c in together.outputs] == [s.outputs[0].token_ids for s in singles]
    assert [c.index for c in together.outputs] == [0, 1, 2]
    assert len({c.token_ids for c in together.outputs}) == 3
    assert all(c.tensors["hidden_states"].shape == (25, 64) for c in together.outputs)


def test_aborting_one_of_n_takes_all_of_them(engine: LLMEngine) -> None:
    engine.add_request("many", PROMPT, SamplingParams(max_tokens=50, n=4, ignore_eos=True))
    engine.step()
    engine.abort("many")
    engine.abort("many")
    assert not engine.has_unfinished_requests
    engine.check_integrity()


def test_eos_stops_and_ignore_eos_does_not(qwen2_checkpoint: str, engine: LLMEngine) -> None:
    free_run = engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    stopper = free_run[3]
    stops_at = free_run.index(stopper) + 1
    stopped = engine.generate(PROMPT, GREEDY.model_copy(update={"stop_token_ids": (stopper,)}))
    assert stopped[0].outputs[0].token_ids == free_run[:stops_at]
    assert stopped[0].outputs[0].finish_reason is FinishReason.STOP
    assert stopped[0].outputs[0].tensors["hidden_states"].shape[0] == 20 + stops_at - 1


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_the_shortest_sequences_run(qwen2_checkpoint: str, max_model_len: int) -> None:
    engine = LLMEngine(EngineConfig(model=qwen2_checkpoint, max_model_len=max_model_len))
    params = SamplingParams(temperature=0.0, max_tokens=max_model_len - 1)
    output = engine.generate(TokensPrompt((5,)), params)[0].outputs[0]
    assert len(output.token_ids) == max_model_len - 1
    assert output.tensors["hidden_states"].shape[0] == 1


def test_metrics_and_stats_count(qwen2_checkpoint: str) -> None:
    engine = LLMEngine(EngineConfig(model=qwen2_checkpoint, block_size=4))
    first, second = (engine.generate(PROMPT, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (40, 16, 16)
    metrics = second.metrics
    assert metrics.queue_s is not None and metrics.first_token_s is not None
    assert metrics.total_s is not None
    assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.total_s


def test_caching_can_be_switched_only_while_idle(engine: LLMEngine) -> None:
    engine.add_request("live", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="1 requests are live"):
        engine.enable_prefix_caching = False
    engine.abort("live")
    engine.enable_prefix_caching = False
    assert engine.generate(PROMPT, GREEDY)[0].num_cached_tokens == 0
    engine.enable_prefix_caching = True


def test_generate_with_one_bad_prompt_runs_nothing_and_leaves_nothing(engine: LLMEngine) -> None:
    steps = engine.stats().num_steps
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate([PROMPT, TokensPrompt(())], GREEDY)
    with pytest.raises(ValueError, match="2 prompts but 1 sampling"):
        engine.generate([PROMPT, PROMPT], [GREEDY])
    assert engine.stats().num_steps == steps and not engine.has_unfinished_requests


@pytest.mark.parametrize("drive", ["generate", "stream"])
def test_generate_and_stream_refuse_to_run_next_to_other_requests(
    engine: LLMEngine, drive: str
) -> None:
    engine.add_request("live", "a b", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=f"{drive} drives the engine alone, but 1 requests"):
        next(iter(getattr(engine, drive)(PROMPT, GREEDY)))
    assert [(output.request_id, output.finished) for output in engine.step()] == [("live", True)]
    assert not engine.has_unfinished_requests


def test_a_salt_is_any_string(engine: LLMEngine) -> None:
    """The hash is computed inside a step, where an error would fail other requests as well."""
    for salt in ("\ud800", "\udfff", "?"):
        engine.add_request(salt, PROMPT, GREEDY, cache_salt=salt)
    assert [output.num_cached_tokens for output in finish(engine).values()] == [0, 0, 0]


def test_preemptions_of_all_completions_are_counted(qwen2_checkpoint: str) -> None:
    engine = LLMEngine(
        EngineConfig(model=qwen2_checkpoint, block_size=1, num_blocks=40, max_num_seqs=4)
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3, seed=1)
    (output,) = engine.generate(TokensPrompt(tuple(range(50, 60))), params)
    assert output.metrics.num_preemptions == engine.stats().num_preemptions > 0


def test_start_up_errors_say_what_would_work(
    qwen2_checkpoint: str, tmp_path: str, seeded: Callable[[str], str]
) -> None:
    def start(**settings: object) -> LLMEngine:
        return LLMEngine(EngineConfig.model_validate({"model": qwen2_checkpoint, **settings}))

    with pytest.raises(ValueError, match="no-such-folder"):
        start(model=f"{tmp_path}/no-such-folder")
    with pytest.raises(ValueError, match="longer than the 1024 positions"):
        start(max_model_len=2000)
    with pytest.raises(ValueError, match="'gpu9' is not known"):
        start(device="gpu9")
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        start(max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="not one token would fit: raise memory_fraction"):
        start(memory_fraction=1e-9)
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        start(model=seeded("bert"))


def test_a_pool_that_is_too_small_is_refused_before_weights_are_read(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(Checkpoint, "load_into", lambda *args, **options: read.append(args))
    with pytest.raises(ValueError, match="max_model_len 512 needs 32 blocks"):
        LLMEngine(EngineConfig(model=qwen2_checkpoint, max_model_len=512, num_blocks=8))
    assert not read


def test_a_headless_checkpoint_embeds_but_does_not_generate(seeded: Callable[[str], str]) -> None:
    engine = LLMEngine(EngineConfig(model=seeded("qwen2-headless"), block_size=4))
    output = engine.generate(PROMPT, SamplingParams(max_tokens=0))[0]
    assert output.finished and output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.outputs[0].tensors["hidden_states"].shape == (20, 64)
    with pytest.raises(ValueError, match="no language-model head"):
        engine.generate(PROMPT, GREEDY)


def test_a_checkpoint_without_tokenizer_takes_ids_and_says_so_of_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = build_causal_lm(tmp_path_factory.mktemp("bare"), "llama", with_tokenizer=False)
    engine = LLMEngine(EngineConfig(model=str(folder)))
    output = engine.generate(PROMPT, GREEDY)[0].outputs[0]
    assert len(output.token_ids) == 8 and output.text == ""
    with pytest.raises(ValueError, match="has no tokenizer"):
        engine.generate("text", GREEDY)


IDS = (31, 32, 33, 34, 35)
NUM_STATED = 24
STATED = {"temperature": 0.6, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2}


@pytest.fixture
def stating(seeded: Callable[[str], str], tmp_path: Path) -> Callable[..., str]:
    """Copy a checkpoint, with additional values in its generation config."""

    def copy(name: str = "qwen2", **stated: Any) -> str:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(seeded(name), folder)
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | stated))
        return str(folder)

    return copy


def build(folder: str, **settings: Any) -> LLMEngine:
    chosen = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "dtype": "float32"}
    return LLMEngine(EngineConfig(model=folder, **chosen | settings))


def tokens(engine: LLMEngine, **params: Any) -> list[int]:
    (output,) = engine.generate(TokensPrompt(IDS), SamplingParams(**params))
    assert output.error is None
    engine.check_integrity()
    return list(output.outputs[0].token_ids)


def of_transformers(folder: str) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_STATED, pad_token_id=0
        )
    return [int(each) for each in found[0, len(IDS) :]]


def test_tokens_are_those_of_transformers(stating: Callable[..., str]) -> None:
    plain = of_transformers(stating(do_sample=False))
    words = [plain[3:5], [IDS[-1], plain[0]], [plain[10]], plain[15:18]]
    for stated in (
        {"repetition_penalty": 1.7},
        {"suppress_tokens": plain[2:6]},
        {"begin_suppress_tokens": plain[:1]},
        {"bad_words_ids": words},
        {"bad_words_ids": words, "suppress_tokens": plain[:1], "repetition_penalty": 1.3},
        {"eos_token_id": [2, plain[4], plain[7]]},
    ):
        folder = stating(do_sample=False, **stated)
        expected = of_transformers(folder)
        assert expected != plain, f"{stated} changes nothing"
        engine = build(folder)
        assert tokens(engine, max_tokens=NUM_STATED) == expected
        assert tokens(engine, max_tokens=NUM_STATED) == expected, "where the prompt is cached"
        ignoring = build(folder, generation_config="ignore")
        assert tokens(ignoring, max_tokens=NUM_STATED, temperature=0.0) == plain


def test_values_of_a_request_override_those_of_the_checkpoint(
    stating: Callable[..., str],
) -> None:
    folder = stating(**STATED, max_new_tokens=11, min_new_tokens=3)
    stated, plain = build(folder), build(folder, generation_config="ignore")
    own = STATED | {"max_tokens": 11, "min_tokens": 3}
    for given in ({"seed": 5}, {"seed": 5, "temperature": 1.5}, {"seed": 6, "max_tokens": 20}):
        assert tokens(stated, **given) == tokens(plain, **own | given)
    assert stated.sampling_defaults == own
    assert not plain.sampling_defaults
    assert len(tokens(stated, seed=5, ignore_eos=True)) == 11


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_values_of_a_stage_override_those_of_the_checkpoint(
    stating: Callable[..., str], kind: str
) -> None:
    stage = {
        "kind": "autoregressive",
        "model": stating(**STATED),
        "engine": {"num_blocks": 64, "dtype": "float32", "device": "cpu"},
        "sampling": {"max_tokens": 5, "temperature": 0.9},
        "final_output": "text",
    }
    data = {"name": "stating", "stages": {"writer": stage}}
    config = PipelineConfig.model_validate(data)
    expected = STATED | {"max_tokens": 5, "temperature": 0.9}
    if kind == "processes":  # a worker builds its stage from serialized settings
        text = config.resolved("writer").model_dump_json(by_alias=True)
        config = PipelineConfig.model_validate(data | {"stages": {"writer": json.loads(text)}})
    pipeline = Pipeline.from_config(config)
    try:
        own = pipeline.stages["writer"].sampling
        assert own is not None and own.model_dump() == expected
        (merged,) = pipeline.merge_sampling({"writer": {"top_p": 0.5}}).values()
        assert merged.model_dump() == expected | {"top_p": 0.5}
    finally:
        pipeline.close()


def test_explain_reports_the_source_of_each_parameter(stating: Callable[..., str]) -> None:
    stage = {
        "kind": "autoregressive",
        "model": stating(**STATED),
        "sampling": {"max_tokens": 5, "top_p": 0.9},
        "final_output": "text",
    }
    config = PipelineConfig.model_validate({"name": "reported", "stages": {"writer": stage}})
    reported = describe_memory(config)
    for line in (
        "max_tokens: 5 (pipeline)",
        "top_p: 0.9 (pipeline)",
        "temperature: 0.6 (generation_config.json)",
        "top_k: 9 (generation_config.json)",
        "min_p: 0.0 (default)",
        "n: 1 (default)",
    ):
        assert f"      {line}" in reported.splitlines()
    settings = describe_config(config)
    assert "temperature 1.0" in settings and "\n      temperature: " not in settings


def test_explain_reports_the_end_and_suppressed_tokens_of_the_checkpoint(
    stating: Callable[..., str],
) -> None:
    stated = {
        "eos_token_id": [2, 5],
        "suppress_tokens": [345],
        "begin_suppress_tokens": [7],
        "bad_words_ids": [[8], [9, 10]],
    }
    stage = {"kind": "autoregressive", "model": stating(**stated), "final_output": "text"}
    data = {"name": "reported", "stages": {"writer": stage}}
    reported = describe_memory(PipelineConfig.model_validate(data)).splitlines()
    for line in (
        "suppress_token_ids: () (default) and [345, 8] (generation_config.json)",
        "eos_token_ids: [2, 5] (generation_config.json)",
        "begin_suppress_token_ids: [7] (generation_config.json)",
        "bad_words_ids: [[8], [9, 10]] (generation_config.json)",
    ):
        assert f"      {line}" in reported
    ignoring = {"writer": stage | {"engine": {"generation_config": "ignore"}}}
    reported = describe_memory(
        PipelineConfig.model_validate(data | {"stages": ignoring})
    ).splitlines()
    assert "      suppress_token_ids: () (default)" in reported
    assert not any("generation_config.json" in line for line in reported)


def test_without_max_tokens_a_text_fills_the_context(stating: Callable[..., str]) -> None:
    engine = build(stating())
    (output,) = engine.generate(TokensPrompt(IDS), SamplingParams(ignore_eos=True, seed=1))
    completion = output.outputs[0]
    assert len(IDS) + len(completion.token_ids) == engine.config.max_model_len
    assert completion.finish_reason is FinishReason.LENGTH
    engine.check_integrity()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": "most"}, "top_p"),
        ({"max_new_tokens": -3}, "max_tokens"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must be a list of lists of token ids"),
        ({"bad_words_ids": [["word"]]}, "bad_words_ids must be"),
    ],
)
def test_invalid_values_are_refused(
    stating: Callable[..., str], stated: dict[str, Any], message: str
) -> None:
    folder = stating(**stated)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        build(folder)


def test_unsupported_values_are_ignored_with_a_warning(
    stating: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(stating(num_beams=4, no_repeat_ngram_size=3, do_sample=False, typical_p=1.0))
    assert "sets num_beams, no_repeat_ngram_size: not supported, and ignored" in caplog.text
    assert len(tokens(engine, max_tokens=4)) == 4


NUM_LONG = 300
LONG_PROMPT = TokensPrompt(tuple(range(50, 170)))
LONG = SamplingParams(
    temperature=0.0, max_tokens=NUM_LONG, ignore_eos=True, logprobs=1, stop=("never said",)
)


class CountingList(list[Any]):
    """Counts the items that are copied out of it."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        CountingList.num_copied += len(found) if isinstance(index, slice) else 0
        return found

    def __iter__(self) -> Any:
        CountingList.num_copied += len(self)
        return super().__iter__()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountingList]:
    """Count copies of tokens and log-probabilities of requests added from now on."""
    init = Request.__init__

    def counting(self: Request, *args: Any, **fields: Any) -> None:
        init(self, *args, **fields)
        self.token_ids = CountingList(self.token_ids)
        self.logprobs = CountingList(self.logprobs)

    monkeypatch.setattr(Request, "__init__", counting)
    CountingList.num_copied = 0
    return CountingList


def run(engine: LLMEngine, params: SamplingParams) -> list[OutputDelta]:
    engine.add_request("r", LONG_PROMPT, params)
    deltas: list[OutputDelta] = []
    while engine.has_unfinished_requests:
        deltas += engine.step_deltas()
    return deltas


def test_steps_copy_no_more_of_a_long_request_than_of_a_short_one(
    engine: LLMEngine, counted: type[CountingList]
) -> None:
    engine.reset_prefix_cache()
    deltas = run(engine, LONG)
    num_all = len(LONG_PROMPT.prompt_token_ids) + NUM_LONG
    # The prompt for the tables and for its output, and every token once for its block's hash; some
    # also for the hashes of partial blocks that earlier tests have left.
    assert counted.num_copied <= 5 * num_all
    assert [len(delta.token_ids) for delta in deltas] == [1] * NUM_LONG
    assert [len(delta.logprobs or ()) for delta in deltas] == [1] * NUM_LONG


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_cumulative_outputs(engine: LLMEngine, n: int) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, n=n, max_tokens=20, ignore_eos=True, logprobs=2, stop=("e",)
    )
    # A hit is rounded differently, and log-probabilities are compared exactly.
    engine.reset_prefix_cache()
    deltas = run(engine, params)
    engine.reset_prefix_cache()
    engine.add_request("r", LONG_PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    accumulator = OutputAccumulator("r", "s")
    for delta, output in zip(deltas, outputs, strict=True):
        accumulator.add(delta)
        so_far = accumulator.output()
        assert so_far.delta == output.outputs[0].delta
        for ours, theirs in zip(so_far.completions, output.outputs, strict=True):
            assert ours.text == theirs.text and ours.token_ids == theirs.token_ids
            # Before a completion begins, no delta shows whether it will have any.
            assert (ours.logprobs or ()) == (theirs.logprobs or ())
            assert ours.finish_reason == theirs.finish_reason
    assert so_far.finished and so_far.prompt_token_ids == outputs[-1].prompt_token_ids
    assert so_far.tensors.keys() == outputs[-1].outputs[0].tensors.keys()


def test_stop_strings_are_searched_only_in_the_new_text(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    find = StopStrings.find

    def noting(self: StopStrings, text: str, num_passed: int) -> int | None:
        lengths.append(len(text))
        return find(self, text, num_passed)

    monkeypatch.setattr(StopStrings, "find", noting)
    text = "".join(delta.text or "" for delta in run(engine, LONG))
    assert len(text) > NUM_LONG and len(lengths) >= NUM_LONG
    assert sum(lengths) < len(text) + len(lengths) * len("never said")


def test_block_tables_are_read_from_the_new_blocks_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read: list[int] = []
    block_ids = SingleTypeKVCacheManager.block_ids

    def noting(self: SingleTypeKVCacheManager, *args: Any) -> list[int]:
        num_read.append(len(block_ids(self, *args)))
        return block_ids(self, *args)

    monkeypatch.setattr(SingleTypeKVCacheManager, "block_ids", noting)
    engine.add_request("r", LONG_PROMPT, LONG)
    num_rows = 0
    while engine.has_unfinished_requests:
        engine.step()
        if engine.has_unfinished_requests:
            rows = engine.partial_outputs("r", num_rows).get("hidden_states", ())
            num_rows += len(rows)
    num_blocks = (len(LONG_PROMPT.prompt_token_ids) + NUM_LONG) // 4
    assert num_rows >= 4 * num_blocks - 4
    # For the tables, for the rows of every step, and for all rows at the end.
    assert sum(num_read) <= 3 * num_blocks + 2 * NUM_LONG


@pytest.mark.parametrize(
    ("name", "part", "drawn"), [("csm", "backbone", "codes"), ("pocket_tts", None, "latents")]
)
def test_rows_that_are_drawn_are_known_with_their_token(
    name: str, part: str | None, drawn: str, seeded: Callable[[str], str]
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded(name), part=part, block_size=4, max_num_batched_tokens=4, max_num_seqs=4
        )
    )
    engine.add_request("r", "Say this.", SamplingParams(max_tokens=6, ignore_eos=True, seed=0))
    chunks: list[Tensor] = []
    while True:
        (output,) = engine.step() or (None,)
        if output is not None and output.finished:
            break
        num_rows = sum(map(len, chunks))
        if rows := engine.partial_outputs("r", num_rows, [drawn]):
            chunks.append(rows[drawn])
        if output is not None:
            num_tokens = output.num_prompt_tokens + len(output.outputs[0].token_ids)
            assert num_tokens == sum(map(len, chunks))
            assert engine.partial_outputs("r", num_tokens, [drawn]) == {}
            whole = engine.partial_outputs("r", 0, [drawn, "hidden_states"])
            assert {len(rows) for rows in whole.values()} == {num_tokens - 1}
    expected = output.outputs[0].tensors
    # It ended at max_tokens, with a token that is drawn like the others.
    assert len(expected[drawn]) == num_tokens + 1 == len(expected["hidden_states"]) + 1
    assert expected[drawn][-2:].any(dim=1).all()
    torch.testing.assert_close(torch.cat(chunks), expected[drawn][:-1], atol=0, rtol=0)


KEYED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TALK = tuple(range(20, 30))


def keys_of(engine: LLMEngine, ids: tuple[int, ...], salt: str | None = None) -> Tensor:
    """Return the keys of a whole output; partial outputs must add up to them."""
    engine.add_request("asks", TokensPrompt(ids), KEYED, cache_salt=salt)
    chunks: list[Tensor] = []
    while True:
        for output in engine.step():
            if output.finished:
                keys = output.outputs[0].tensors["row_keys"]
                assert torch.equal(torch.cat(chunks), keys[: sum(map(len, chunks))])
                assert keys.shape == (output.num_prompt_tokens + 5, 6)
                return keys
        num_rows = sum(map(len, chunks))
        rows = engine.partial_outputs("asks", num_rows, ["hidden_states", "row_keys"])
        if rows:
            assert len(rows["row_keys"]) == len(rows["hidden_states"])
            chunks.append(rows["row_keys"])


def test_blocks_of_a_prompt_have_the_same_keys_until_all_is_forgotten(
    seeded: Callable[[str], str],
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2"),
            block_size=4,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=4,
        ),
        output_names=["hidden_states", "row_keys"],
    )
    first = keys_of(engine, TALK)
    assert first[:8].any(dim=1).all() and not first[8:].any()
    assert torch.equal(first[0], first[3]) and not torch.equal(first[3], first[4])
    longer = keys_of(engine, (*TALK, 40, 41, 42, 43))
    assert torch.equal(longer[:8], first[:8]) and longer[8:12].any(dim=1).all()
    engine._kv.reset_prefix_cache()  # like evicting all: the rows are computed again
    assert torch.equal(keys_of(engine, TALK), first)
    assert not torch.equal(keys_of(engine, (9, *TALK[1:]))[:4], first[:4])
    assert not torch.equal(keys_of(engine, TALK, "another")[:4], first[:4])
    engine.reset_prefix_cache()  # as for new weights
    assert not torch.equal(keys_of(engine, TALK)[:4], first[:4])


def test_rows_with_the_same_keys_are_hit_although_they_are_rounded_otherwise(
    seeded: Callable[[str], str],
) -> None:
    engine = LLMEngine(
        EngineConfig(model=seeded("qwen2_5_omni"), part="talker", block_size=4, max_model_len=40)
    )
    keys = torch.arange(1, 4).repeat_interleave(4).reshape(-1, 1).repeat(1, 6)
    keys = torch.cat([keys, torch.zeros(2, 6, dtype=torch.int64)])
    prompt = made_up(3, 14, 4)
    rounded = replace(prompt, prompt_rows=prompt.prompt_rows * (1 + 1e-6))
    hits = []
    for asked in (
        replace(prompt, prompt_keys=keys),
        replace(rounded, prompt_keys=keys),
        replace(rounded, prompt_keys=keys + (keys > 2).long()),  # the third block is another
        rounded,
    ):
        (output,) = engine.generate([asked], [KEYED])
        hits.append(output.num_cached_tokens)
    assert hits == [0, 12, 8, 0]
