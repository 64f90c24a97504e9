"""Questions spoken by espeak-ng, in many accents, variants, rates and pitches, stored on disk."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.spoken_sums.log_mel import SAMPLE_RATE, mel_powers
from training.spoken_sums.word_list import listed

_ACCENTS = (
    "en-us",
    "en-us",
    "en-gb",
    "en-gb-x-rp",
    "en-gb-scotland",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
    "en-us-nyc",
)
_VARIANTS = listed("""\
m1 m3 m4 m5 m6 m7 m8 f1 f3 f4 f5 Alex Alicia Andrea Andy Annie Denis Diogo Gene Hugo Jacky Lee
Marco Michael Mike adam anika announcer antonio aunty belinda benjamin boris caleb david ed
edward grandma grandpa john kaukovalta linda marcelo max miguel norbert pablo paul pedro quincy
rob sandro shelby steph travis victor zac klatt klatt2 klatt4
""")
HELD_OUT_VARIANTS = ("m2", "f2", "Mario", "Henrique", "robert", "steph2", "michel", "klatt3")
HELD_OUT_RATES = (150, 160)
"""Words per minute; training uses 115 to 205 except these."""

_RATES = (115, 205)
_ESPEAK_RATE = 22_050
_WAV_HEADER = 44  # --stdout writes a false length into it
_SHARD = 2_000


@dataclass(frozen=True, slots=True)
class Voice:
    """An espeak-ng voice.

    Attributes:
        name: accent and variant, such as ``en-us+m1``.
        rate: words per minute.
        pitch: from 0 to 99.
    """

    name: str
    rate: int
    pitch: int


@dataclass(frozen=True, slots=True)
class Question:
    """The words, and their log-mel powers, ``(bands, frames)`` half precision."""

    words: str
    powers: Tensor


def draw_voice(draw: random.Random, *, training: bool) -> Voice:
    """Draw a voice and a rate, of training or held out."""
    pitch = draw.randint(25, 75)
    accent = draw.choice(_ACCENTS)
    low, high = HELD_OUT_RATES
    if not training:
        return Voice(f"{accent}+{draw.choice(HELD_OUT_VARIANTS)}", draw.randint(low, high), pitch)
    rate = draw.choice((draw.randint(_RATES[0], low - 1), draw.randint(high + 1, _RATES[1])))
    return Voice(f"{accent}+{draw.choice(_VARIANTS)}", rate, pitch)


def speak(words: str, voice: Voice, *, cut: bool = True) -> Tensor:
    """Synthesize words; return samples at 16 kHz.

    Args:
        words: the text.
        voice: the voice.
        cut: if true, trim silence at both ends to 30 ms.

    Raises:
        CalledProcessError: espeak-ng does not know the voice.
        ValueError: the output is silent.
    """
    command = ["espeak-ng", "-v", voice.name, "-s", str(voice.rate), "-p", str(voice.pitch)]
    run = subprocess.run([*command, "--stdout", words], capture_output=True, check=True)
    samples = np.frombuffer(run.stdout[_WAV_HEADER:], np.int16).astype(np.float32) / 32768
    samples = soxr.resample(samples, _ESPEAK_RATE, SAMPLE_RATE)
    if not cut:
        return torch.from_numpy(samples)
    heard = np.flatnonzero(np.abs(samples) > 0.01)
    if not len(heard):
        raise ValueError(f"{voice} said nothing for {words!r}")
    around = 480
    return torch.from_numpy(samples[max(0, heard[0] - around) : heard[-1] + around].copy())


def noises(count: int, draw: random.Random) -> list[Question]:
    """Return sounds without speech: half a second to four of noise, as loud as speech or fainter.

    They are not sums; a thinker trained on speech alone hallucinates one.
    """
    made: list[Question] = []
    for _ in range(count):
        samples = torch.from_numpy(
            np.random.default_rng(draw.randrange(2**32)).standard_normal(
                draw.randint(SAMPLE_RATE // 2, 4 * SAMPLE_RATE), np.float32
            )
        )
        made.append(Question("", mel_powers(10 ** draw.uniform(-3.0, -0.5) * samples)))
    return made


def make_questions(folder: Path, texts: Iterable[str], *, seed: int) -> None:
    """Synthesize texts with training voices, and write missing shards.

    Args:
        folder: created if missing; a shard is ``questions-NNN.safetensors``.
        texts: in words; must be the same on every call.
        seed: for the voices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = list(texts)
    for number, start in enumerate(range(0, len(every), _SHARD)):
        path = folder / f"questions-{number:03d}.safetensors"
        if path.exists():
            continue
        draw = random.Random(seed + number)
        shard = [
            Question(words, mel_powers(speak(words, draw_voice(draw, training=True))))
            for words in every[start : start + _SHARD]
        ]
        write_questions(path, shard)
        print(f"{path.name}: {len(shard)} questions", flush=True)


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write a shard atomically."""
    powers = [each.powers.half() for each in questions]
    text = zlib.compress("\n".join(each.words for each in questions).encode())
    tensors = {
        "powers": torch.cat(powers, dim=1),
        "lengths": torch.tensor([each.shape[1] for each in powers]),
        "text": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def load_questions(folder: Path) -> list[Question]:
    """Load all questions written so far; memory-mapped, so that processes share them."""
    questions: list[Question] = []
    for path in sorted(folder.glob("questions-*.safetensors")):
        with safe_open(path, "pt") as file:
            text, lengths = file.get_tensor("text"), file.get_tensor("lengths").tolist()
        words = zlib.decompress(text.numpy().tobytes()).decode().split("\n")
        rows = _mapped_powers(path).split(lengths, dim=1)
        questions += [Question(text, row) for text, row in zip(words, rows, strict=True)]
    return questions


def _mapped_powers(path: Path) -> Tensor:
    """Return the powers of a shard, memory-mapped: read on use, and held once."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))["powers"]
    start = 8 + length + entry["data_offsets"][0]
    array = np.memmap(path, np.float16, "c", start, tuple(entry["shape"]))
    return torch.from_numpy(array)
