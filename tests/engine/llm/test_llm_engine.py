"""The engine's own doors: generate, stream, abort, n, limits, start-up errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from engine import (
    ChatPrompt,
    EmbedsPrompt,
    EngineConfig,
    FinishReason,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from omni.seeded.language_models import build_causal_lm

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = TokensPrompt(tuple(range(50, 70)))


@pytest.fixture(scope="module")
def engine(qwen2_checkpoint: str) -> LLMEngine:
    return LLMEngine(EngineConfig(model=qwen2_checkpoint, block_size=4, max_num_seqs=4))


def test_stream_grows_to_what_generate_returns(engine: LLMEngine) -> None:
    whole = engine.generate("The harbour wakes", GREEDY)[0].outputs[0]
    outputs = list(engine.stream("The harbour wakes", GREEDY))
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    assert "".join(output.outputs[0].delta for output in outputs) == whole.text
    assert outputs[-1].outputs[0].token_ids == whole.token_ids
    for earlier, later in pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)


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


def test_max_tokens_zero_runs_the_prompt_only(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=0)
    output = engine.generate(PROMPT, params)[0]
    assert output.finished and output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.outputs[0].tensors["hidden_states"].shape == (20, 64)


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
def test_generate_and_stream_take_nobody_elses_outputs(engine: LLMEngine, drive: str) -> None:
    engine.add_request("live", "a b", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=f"{drive} drives the engine alone, but 1 requests"):
        next(iter(getattr(engine, drive)(PROMPT, GREEDY)))
    assert [(output.request_id, output.finished) for output in engine.step()] == [("live", True)]
    assert not engine.has_unfinished_requests


def test_a_salt_is_any_string(engine: LLMEngine) -> None:
    """The hash is taken inside a step, where an error would hit the neighbours as well."""
    for salt in ("\ud800", "\udfff", "?"):
        engine.add_request(salt, PROMPT, GREEDY, cache_salt=salt)
    done = []
    while engine.has_unfinished_requests:
        done += [output for output in engine.step() if output.finished]
    assert [output.num_cached_tokens for output in done] == [0, 0, 0]
    engine.check_integrity()


def test_preemptions_of_all_completions_are_counted(qwen2_checkpoint: str) -> None:
    engine = LLMEngine(
        EngineConfig(model=qwen2_checkpoint, block_size=1, num_blocks=40, max_num_seqs=4)
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3, seed=1)
    (output,) = engine.generate(TokensPrompt(tuple(range(50, 60))), params)
    assert output.metrics.num_preemptions == engine.stats().num_preemptions > 0


def test_output_names_restrict_what_is_mirrored(qwen2_checkpoint: str) -> None:
    config = EngineConfig(model=qwen2_checkpoint)
    bare = LLMEngine(config, output_names=())
    assert bare.generate(PROMPT, GREEDY)[0].outputs[0].tensors == {}
    assert bare.memory_plan.stage_output_bytes == {}
    with pytest.raises(ValueError, match="'hiden_states'; it emits hidden_states"):
        LLMEngine(config, output_names=["hiden_states"])


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


def test_a_headless_checkpoint_embeds_but_does_not_generate(
    seeded: Callable[[str], str],
) -> None:
    engine = LLMEngine(EngineConfig(model=seeded("qwen2-headless"), block_size=4))
    output = engine.generate(PROMPT, SamplingParams(max_tokens=0))[0]
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
