"""Word error rate of Whisper on real recordings, compared with faster-whisper on equal weights.

    python -m benchmarks.speech_recognition FOLDER --recordings WAVS [--noise 20 10 0] [--threads 2]
        [--rounds 3] --faster-whisper CT2_FOLDER --python ../faster-whisper/bin/python

FOLDER contains the weights as transformers' checkpoint, CT2_FOLDER as CTranslate2's. WAVS contains
files ``ID.wav``, mono, and ``transcription`` with lines ``<s> words </s> (ID)``, as in Debian's
package ``pocketsphinx-testdata``. Both transcribe each recording, one after the other, unchanged
and with white noise at the given decibels below it; and also the concatenation of all, with
pauses of 1.5 s. Temperature fallback and thresholds are those of faster-whisper, greedy at first
(its beam of 5 is set to 1, since transformers' rules have none), in float32 or what --engine and
--compute-type say. faster-whisper needs a separate environment, with soundfile; it runs in another
process. Both texts are normalized by transformers' English normalizer, and words are compared;
times are medians of --rounds, alternating, after one round to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from engine import AudioPrompt, EngineConfig, LLMEngine, SamplingParams, TranscriptionOptions

RATE, PAUSE_S = 16_000, 1.5
OPTIONS = TranscriptionOptions(
    temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    compression_ratio_threshold=2.4,
    logprob_threshold=-1.0,
    no_speech_threshold=0.6,
)
OTHER = r"""
import json, sys, time
import faster_whisper, soundfile
settings = json.loads(sys.stdin.readline())
model = faster_whisper.WhisperModel(settings["model"], device="cpu", compute_type=settings["type"],
                                    cpu_threads=settings["threads"])
for line in sys.stdin:
    samples, _ = soundfile.read(line.strip(), dtype="float32")
    started = time.perf_counter()
    segments, _ = model.transcribe(samples, language="en", beam_size=1, best_of=1,
                                   condition_on_previous_text=False)
    text = "".join(segment.text for segment in segments)
    print(json.dumps([text, time.perf_counter() - started]), flush=True)
"""


def errors(expected: Sequence[str], heard: Sequence[str]) -> int:
    """Compute the edit distance: minimum insertions, deletions and substitutions of words."""
    row = list(range(len(heard) + 1))
    for count, word in enumerate(expected, 1):
        last, row[0] = row[0], count
        for place, other in enumerate(heard, 1):
            least = min(row[place] + 1, row[place - 1] + 1, last + (word != other))
            last, row[place] = row[place], least
    return row[-1]


def recordings(folder: Path, noise: Sequence[float]) -> dict[str, tuple[NDArray[np.float32], str]]:
    """Load samples and words of each recording, clean and noisy, and of their concatenation."""
    found: dict[str, tuple[NDArray[np.float32], str]] = {}
    for line in (folder / "transcription").read_text().splitlines():
        match = re.fullmatch(r"<s>(.*)</s> *\((.*)\)", line.strip())
        if match is None:
            raise SystemExit(f"expected '<s> words </s> (ID)' in {folder}/transcription: {line!r}")
        samples, rate = soundfile.read(folder / f"{match[2]}.wav", dtype="float32")
        if rate != RATE or samples.ndim != 1:
            raise SystemExit(f"{match[2]}.wav must be mono at {RATE} Hz")
        found[match[2]] = samples, match[1]
        for below in noise:
            level = np.sqrt(np.mean(samples**2)) * 10 ** (-below / 20)
            hiss = np.random.default_rng(len(found)).normal(0, level, len(samples))
            found[f"{match[2]}, {below:g} dB"] = (samples + hiss).astype(np.float32), match[1]
    pause = np.zeros(round(PAUSE_S * RATE), dtype=np.float32)
    parts = [part for samples, _ in found.values() for part in (samples, pause)]
    found["all as one"] = np.concatenate(parts), " ".join(words for _, words in found.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--noise", type=float, nargs="*", default=())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faster-whisper", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--engine", type=json.loads, default={"dtype": "float32"})
    parser.add_argument("--compute-type", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engine = LLMEngine(
        EngineConfig.model_validate(
            {"model": given.folder, "num_blocks": 1024, "enable_prefix_caching": False}
            | given.engine
        )
    )
    other = subprocess.Popen(
        [given.python, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    settings = {"model": given.faster_whisper, "threads": given.threads}
    settings["type"] = given.compute_type
    other.stdin.write(json.dumps(settings) + "\n")
    normalize = EnglishTextNormalizer({})
    table = Table("recording", "seconds", "words", "errors: ours", "theirs", "time: ours / theirs")
    totals = np.zeros(6)
    file = Path(tempfile.gettempdir()) / f"recording-{os.getpid()}.wav"
    for name, (samples, words) in recordings(given.recordings, given.noise).items():
        soundfile.write(file, samples, RATE, "FLOAT")
        times = []
        for number in range(given.rounds + 1):  # the first one warms up both sides
            started = time.perf_counter()
            prompt = AudioPrompt(file, language="en", timestamps=True, transcription=OPTIONS)
            (output,) = engine.generate(prompt, SamplingParams(temperature=0.0))
            ours_s = time.perf_counter() - started
            ours = re.sub(r"<\|[0-9.]+\|>", " ", output.outputs[0].text)
            other.stdin.write(f"{file}\n")
            other.stdin.flush()
            theirs, theirs_s = json.loads(other.stdout.readline())
            times += [(ours_s, theirs_s)] if number else []
        ours_s, theirs_s = np.median(times, axis=0).tolist()
        expected = normalize(words).split()
        wrong = [errors(expected, normalize(text).split()) for text in (ours, theirs)]
        seconds = len(samples) / RATE
        row = [f"{seconds:.1f}", len(expected), *wrong, f"{ours_s / theirs_s:.2f}"]
        table.add_row(name, *map(str, row))
        if name != "all as one":
            totals += [seconds, len(expected), *wrong, ours_s, theirs_s]
        print(f"{name}\n  ours   {ours.strip()}\n  theirs {theirs.strip()}")
    rates = [f"{count / totals[1]:.1%}" for count in totals[2:4]]
    ratio = f"{totals[4] / totals[5]:.2f}"
    table.add_row("each alone", f"{totals[0]:.1f}", f"{totals[1]:.0f}", *rates, ratio)
    file.unlink()
    other.stdin.close()
    other.wait()
    Console().print(table)


if __name__ == "__main__":
    main()
