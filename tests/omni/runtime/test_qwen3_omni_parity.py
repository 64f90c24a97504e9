"""Qwen3-Omni's pipeline, streamed between all stages, against transformers' ``generate``.

All is greedy: sampling would use another source of randomness. Sound of equal length within 1e-4
means equal codes of all codebooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Prompt
from omni import Omni, OmniRequest, SamplingParams
from omni.pipelines.pipeline_config import PipelineConfig
from omni.seeded.checkpoints import resolve_model
from tests.support.pictures import picture
from tests.support.thinker_reference import Talk, ThinkerReference, clip, tone

TALKS = {
    "text": Talk(["The harbour wakes."]),
    "audio": Talk([tone(1.0), "Who?"]),
    "image, in the first of two turns": Talk([picture(0), "What is it?"], ("A harbour.", "Sure?")),
    "video": Talk([clip(1, seconds=2.0), "What?"]),
}
NUM_WORDS, NUM_CODES = 12, 24


class Reference(ThinkerReference):
    """The whole model."""

    def speech(self, talk: Talk, speaker: str) -> tuple[list[int], Tensor, Tensor]:
        """Return the reply's tokens, the sound, and the talker's hidden states."""
        inputs = self.inputs(talk)
        rows: list[Tensor] = []
        hook = self.whole.talker.model.register_forward_hook(
            lambda _, __, output: rows.append(output.last_hidden_state[0])
        )
        self.model.model.rope_deltas = None
        ids, samples = self.whole.generate(
            **inputs,
            speaker=speaker,
            thinker_max_new_tokens=NUM_WORDS,
            thinker_do_sample=False,
            thinker_eos_token_id=self.tokenizer.eos_token_id,
            thinker_suppress_tokens=list(self.suppressed),
            talker_do_sample=False,
            talker_temperature=None,
            talker_top_k=None,
            talker_max_new_tokens=NUM_CODES,
        )
        hook.remove()
        words = ids[0, inputs["input_ids"].shape[1] :].tolist()
        return words, samples.flatten(), torch.cat(rows)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(resolve_model("seeded:qwen3_omni"))


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    tensors = {"outputs": ["codes", "hidden_states"], "final_output": ["tensors"]}
    overrides = {f"stages.talker.{key}": value for key, value in tensors.items()}
    with Omni(PipelineConfig.load("qwen3_omni_seeded", overrides=overrides)) as made:
        yield made


def request(prompt: Prompt, reference: Reference, speaker: str, **talker: Any) -> OmniRequest:
    usual: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.05}
    return OmniRequest(
        prompt,
        sampling={
            "thinker": SamplingParams(
                temperature=0.0, max_tokens=NUM_WORDS, suppress_token_ids=reference.suppressed
            ),
            "talker": SamplingParams(max_tokens=NUM_CODES, **usual | talker),
        },
        speaker=speaker,
    )


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
@pytest.mark.parametrize("name", TALKS)
def test_words_rows_and_sound_equal_transformers_cold_and_warm(
    name: str, omni: Omni, reference: Reference
) -> None:
    talk, speaker = TALKS[name], ("Ethan", "Chelsie")[len(name) % 2]
    words, samples, rows = reference.speech(talk, speaker)
    for _ in range(2):
        (output,) = omni.generate([request(talk.prompt, reference, speaker)])
        assert output.error is None
        assert list(output.stages["thinker"].token_ids) == words
        ours = output.stages["talker"].tensors["hidden_states"]
        torch.testing.assert_close(ours, rows, atol=1e-4, rtol=0)
        audio = output.stages["code2wav"].audio
        assert audio is not None and audio.sampling_rate == 24_000
        torch.testing.assert_close(audio.samples, samples, atol=1e-4, rtol=0)
    assert samples.abs().max() > 0.01


def test_sound_comes_in_pieces_that_are_the_whole(omni: Omni, reference: Reference) -> None:
    asked = request(TALKS["text"].prompt, reference, "Ethan")
    pieces = []
    for output in omni.stream([asked]):
        stage = output.stages.get("code2wav")
        if stage is not None and stage.audio_delta is not None:
            pieces.append(stage.audio_delta.samples)
    (whole,) = omni.generate([asked])
    audio = whole.stages["code2wav"].audio
    assert audio is not None
    torch.testing.assert_close(torch.cat(pieces), audio.samples, atol=1e-6, rtol=0)
    lengths = [len(piece) for piece in pieces if len(piece)]
    # One code first, less the samples it lacks; then twice as many, up to eight.
    assert lengths[:4] == [240 - 75, 480, 960, 1920]


def test_a_seed_decides_all_codebooks(omni: Omni, reference: Reference) -> None:
    def sound(seed: int) -> Tensor:
        asked = request(TALKS["text"].prompt, reference, "Ethan", temperature=0.9, seed=seed)
        (output,) = omni.generate([asked])
        audio = output.stages["code2wav"].audio
        assert audio is not None
        return audio.samples

    first = sound(1)
    torch.testing.assert_close(sound(1), first, atol=1e-6, rtol=0)
    other = sound(2)
    assert len(other) != len(first) or (other - first).abs().max() > 1e-3


def test_a_voice_that_is_none_is_refused_by_name(omni: Omni) -> None:
    (output,) = omni.generate([OmniRequest("hi", speaker="Ethna")])
    assert "did you mean 'Ethan'" in str(output.error)


def test_a_second_turn_hits_in_thinker_and_talker(omni: Omni, reference: Reference) -> None:
    first = Talk([picture(3), "A question that takes a few words to ask."])
    second = Talk([picture(3), "A question that takes a few words to ask."], ("No.", "And now?"))
    omni.generate([request(first.prompt, reference, "Ethan")])
    before = {name: stats.cached_tokens for name, stats in _engines(omni).items()}
    omni.generate([request(second.prompt, reference, "Ethan")])
    after = {name: stats.cached_tokens for name, stats in _engines(omni).items()}
    assert all(after[name] - before[name] >= 16 for name in ("thinker", "talker"))


def _engines(omni: Omni) -> dict[str, Any]:
    stages: dict[str, Any] = dict(omni.pipeline.stages)
    return {name: stages[name].engine.stats() for name in ("thinker", "talker")}
