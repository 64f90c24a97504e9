"""Voice in, voice out: the answer is spoken while it is still being generated.

    WAV file --> thinker ~~rows~~> talker ~~codec tokens~~> code2wav --> sound, chunk by chunk
                    +--> text

Run it with ``python examples/speak.py [question.wav [answer.wav]]``. The default question is two
tones. The model is small and random, so it answers with noise. Note that chunks arrive before the
end, that the question hits the caches in the second round, and that both rounds sound the same.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from omni import ChatPrompt, Omni, OmniRequest, Waveform

SAMPLING_RATE = 16_000


def tones(pitches: tuple[float, ...] = (440.0, 660.0), seconds: float = 0.6) -> Tensor:
    """Return consecutive tones, mono, at the model's sampling rate."""
    time = torch.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    return torch.cat([0.4 * torch.sin(2 * math.pi * pitch * time) for pitch in pitches])


def ask(omni: Omni, question: Path | Tensor) -> Waveform:
    """Print progress whenever sound arrives; return the whole sound."""
    message = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Answer!"}]}
    request = OmniRequest(ChatPrompt((message,), {"audio": [question]}), speaker="Ethan")
    text, seconds = "", 0.0
    for output in omni.stream(request):
        if output.error is not None:
            raise SystemExit(f"failed: {output.error}")
        thinker, voice = (output.stages.get(name) for name in ("thinker", "code2wav"))
        if thinker is not None:
            text += thinker.delta
        if voice is not None and voice.audio_delta is not None:
            seconds += voice.audio_delta.duration_s
            print(f"  {seconds:.2f} s of sound, {len(text)} characters of text")
    if voice is None or voice.audio is None:
        raise SystemExit("no sound came")
    print(f"  said: {text!r}")
    return voice.audio


def main() -> None:
    files = [Path(argument) for argument in sys.argv[1:]]
    question = files[0] if files else tones()
    answers = []
    with Omni("omni_speech") as omni:
        for turn in ("first", "second"):
            print(f"{turn} round")
            before = omni.stats()
            answers.append(ask(omni, question))
            for name, stage in omni.stats().items():
                work = stage.since(before[name])
                print(f"  {name}: {work.cached_tokens} of {work.prompt_tokens} input tokens hit")
    same = torch.equal(answers[0].samples, answers[1].samples)
    print("both rounds sound the same" if same else "the rounds differ!")
    if len(files) > 1:
        answers[0].save(files[1])


if __name__ == "__main__":
    main()
