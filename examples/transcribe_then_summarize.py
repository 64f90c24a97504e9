"""Speech in, a summary out: two encoder-decoders, and the encoder runs once per sound.

    WAV file --> transcriber (Whisper) --text--> summarizer (BART) --> text

Run it with ``python examples/transcribe_then_summarize.py [speech.wav ...]``. The default file is
two tones, which a random speech model turns into word salad. Note that the second round finds the
sound's keys and values by content, and returns the same text.
"""

from __future__ import annotations

import math
import struct
import sys
import tempfile
import wave
from pathlib import Path

from omni import AudioPrompt, Omni, OmniOutput

SAMPLING_RATE = 16_000


def write_tones(path: Path, pitches: tuple[float, ...], seconds: float = 0.6) -> Path:
    """Write consecutive tones to a 16-bit mono WAV file."""
    samples = [
        int(12_000 * math.sin(2 * math.pi * pitch * index / SAMPLING_RATE))
        for pitch in pitches
        for index in range(int(seconds * SAMPLING_RATE))
    ]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return path


def show(outputs: list[OmniOutput]) -> None:
    for output in outputs:
        if output.error is not None:
            print(f"  failed: {output.error}")
            continue
        for stage in output.stages.values():
            print(f"  {stage.stage}: {stage.text!r}")


def run(files: list[Path]) -> None:
    prompts = [AudioPrompt(file, language="en") for file in files]
    with Omni("transcribe_then_summarize") as omni:
        rounds = []
        for turn in ("first", "second"):
            before = omni.stats()
            print(f"{turn} round")
            outputs = omni.generate(prompts)
            show(outputs)
            took = {name: s.since(before[name]).busy_s for name, s in omni.stats().items()}
            print("  seconds: " + ", ".join(f"{name} {s:.3f}" for name, s in took.items()))
            rounds.append([[s.text for s in output.stages.values()] for output in outputs])
    print("both rounds said the same" if rounds[0] == rounds[1] else "the rounds differ!")


def main() -> None:
    files = [Path(argument) for argument in sys.argv[1:]]
    if files:
        run(files)
        return
    with tempfile.TemporaryDirectory() as folder:
        run([write_tones(Path(folder) / "tones.wav", (440.0, 660.0))])


if __name__ == "__main__":
    main()
