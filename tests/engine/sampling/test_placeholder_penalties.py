"""Ids of placeholders that no logit belongs to: penalties leave them, and neighbours, alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import (
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    LLMEngine,
    Prompt,
    TokensPrompt,
)
from engine import SamplingParams as Params
from tests.support.encoder_decoder_requests import IMAGE, noise_image

SHOWN = ExplicitEncoderDecoderPrompt(ImagePrompt(noise_image(50, 50, 1)), f"{IMAGE} what is this?")
PLAIN = TokensPrompt(tuple(range(20, 60)))
PENALTIES = [{"repetition_penalty": 1.8}, {"presence_penalty": 0.9}, {"frequency_penalty": 0.9}]


@pytest.fixture
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    config = EngineConfig(model=seeded("mllama"), block_size=4, num_blocks=200, max_num_seqs=4)
    engine = LLMEngine(config)
    assert engine.tokenizer is not None
    placeholder = engine.tokenizer.convert_tokens_to_ids(IMAGE)
    assert placeholder == engine._runner._model.vocab_size, "one more than the last logit's"
    return engine


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_a_penalised_prompt_with_an_image_changes_no_neighbour(
    engine: LLMEngine, penalty: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the placeholder's own id the next row's first logit would be changed."""
    params = Params(temperature=0.0, max_tokens=5, ignore_eos=True)
    penalised = params.model_copy(update=penalty)
    asked: list[tuple[Prompt, Params]] = [(SHOWN, penalised), (PLAIN, params), (SHOWN, penalised)]
    alone = [engine.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in asked]
    engine.reset_prefix_cache()
    seen: list[int] = []
    sample = engine._runner._sampler.sample

    def note(logits, states):  # type: ignore[no-untyped-def]
        seen.extend(i for s in states if s.counts is not None for i in s.counts.token_ids)
        return sample(logits, states)

    monkeypatch.setattr(engine._runner._sampler, "sample", note)
    outputs = engine.generate([prompt for prompt, _ in asked], [each for _, each in asked])
    assert [output.error for output in outputs] == [None] * 3
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert seen and max(seen) < engine._runner._model.vocab_size


@pytest.mark.parametrize("name", ["suppress_token_ids", "stop_token_ids"])
def test_an_id_without_a_logit_can_be_neither_suppressed_nor_waited_for(
    engine: LLMEngine, name: str
) -> None:
    last = engine._runner._model.vocab_size - 1
    for beyond in (last + 1, last + 8):
        with pytest.raises(ValueError, match=f"{name} holds {beyond}, .* ids 0 to {last}"):
            engine.generate(PLAIN, Params(**{name: (beyond,)}))
