"""The shipped checkpoint: what lies in its folder, and whether a stranger understands it."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import stage_configs
from engine.models.qwen2_5_omni.speakers import load_speakers
from omni import ChatPrompt, Omni, OmniRequest

FOLDER = Path(stage_configs.__file__).parent / "spoken_sums"
MOST_BYTES = 24_000_000


def test_the_folder_is_small_and_tells_what_it_is():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]

    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    card = (FOLDER / "README.md").read_text()
    for word in ("flite", "espeak-ng", "cannot", "licence"):
        assert word in card.lower(), f"the model card does not speak of {word}"


def test_every_weight_is_finite_and_of_16_bits():
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {name.split(".")[0] for name in names} == {"thinker", "talker", "token2wav"}
        for name in names:
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


def test_two_voices_come_along():
    speakers = load_speakers(FOLDER)

    assert speakers.names == ("Ada", "Ben")
    assert speakers.default.name == "Ada"


# Both voices, teens and tens: what a recognizer confuses most.
ASKED = {
    "Ada": {"twelve plus thirty": "forty two", "twenty minus five": "fifteen"},
    "Ben": {"ten times five": "fifty", "ninety plus twenty five": "one hundred fifteen"},
}


@pytest.fixture(scope="module")
def answers():
    asked = [(voice, words) for voice, sums in ASKED.items() for words in sums]
    requests = [
        OmniRequest(ChatPrompt(({"role": "user", "content": words},)), speaker=voice)
        for voice, words in asked
    ]
    with Omni("spoken_sums") as omni:
        outputs = omni.generate(requests)
    return dict(zip(asked, outputs, strict=True))


def test_answers_are_heard_as_what_they_say(answers):
    pytest.importorskip("pocketsphinx", reason="the recognizer is of the extra 'training'")
    from training.spoken_sums.recognizer import Recognizer

    recognizer = Recognizer()
    for (voice, words), output in answers.items():
        sound = output.stages["code2wav"].audio
        heard = recognizer.hear(torch.as_tensor(sound.samples))
        assert heard == ASKED[voice][words], f"{voice} on {words!r}"
