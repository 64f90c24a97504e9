"""Pocket TTS at its published shape compared with transformers, alternating, on a CPU.

    python -m benchmarks.pocket_tts [--rounds 3] [--frames 50] [--requests 1 8]

Random weights of 100 M parameters, a text, and a voice of 4 s; the noise is 0, and the length is
fixed. ``transformers`` runs one request after another, including its processor and decoder; ours
runs all at once with empty caches, streamed, so that the time to its first audio is known.
``warm`` has the voice and the text in its caches. A real-time factor is seconds per second
of audio. The floor is the time to read the backbone's weights once per frame, at the rate at which
this machine sums numbers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from transformers.models.pocket_tts.feature_extraction_pocket_tts import PocketTTSFeatureExtractor
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSForConditionalGeneration
from transformers.models.pocket_tts.processing_pocket_tts import PocketTTSProcessor
from transformers.models.pocket_tts_audio_tokenizer import PocketTTSAudioTokenizerModel

from benchmarks.models import benchmark_model
from engine import AudioPrompt, ChatPrompt
from omni import Omni, OmniRequest
from stages import AutoregressiveStage

TEXT = "The harbour wakes before the town does, and fishing boats come in with the tide."
FRAME_S, RATE = 0.08, 24_000
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
PARTS = [{"type": "audio"}, {"type": "text", "text": TEXT}]
Run = Callable[[int], tuple[float, float]]
"""Runs a number of requests; returns seconds until all have their first audio, and in total."""


def voice() -> np.ndarray:
    """Generate noise that swells and fades."""
    noise = np.random.default_rng(0).standard_normal(4 * RATE)
    return (0.1 * noise * np.sin(np.arange(4 * RATE) / 4000)).astype(np.float32)


def reference(folder: str, frames: int) -> Run:
    """Create transformers' side, from a text and samples to samples."""
    model = PocketTTSForConditionalGeneration.from_pretrained(folder).eval()
    codec = PocketTTSAudioTokenizerModel.from_pretrained(f"{folder}/codec").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extractor = PocketTTSFeatureExtractor.from_pretrained(folder)
    processor = PocketTTSProcessor(extractor, tokenizer, codec, tokenizer.chat_template)
    text = processor.apply_chat_template([{"role": "user", "content": PARTS}], tokenize=False)

    def run(count: int) -> tuple[float, float]:
        started = time.perf_counter()
        for _ in range(count):
            inputs = processor(text=text, audio=[voice()], return_tensors="pt", sampling_rate=RATE)
            latents = model.generate(**inputs, max_new_tokens=frames, do_sample=False)
            assert len(processor.decode(latents[0])) == round(frames * FRAME_S * RATE)
        seconds = time.perf_counter() - started
        return seconds, seconds

    return run


def pipeline(folder: str, frames: int, settings: Mapping[str, Any]) -> Omni:
    """Open the shipped pipeline on the same weights."""
    engine = {"device": "cpu", "dtype": "float32", "num_blocks": 256, **settings}
    stated = {f"stages.backbone.engine.{name}": value for name, value in engine.items()}
    return Omni(
        "pocket_tts",
        overrides={
            "stages.backbone.model": folder,
            "stages.codec.model": f"{folder}/codec",
            "stages.codec.engine.device": "cpu",
            # The last token produces no audio.
            "stages.backbone.sampling": {"temperature": 0.0, "max_tokens": frames},
            **stated,
        },
    )


def ours(omni: Omni, frames: int, *, warm: bool) -> Run:
    """Create this project's side: all requests at once, streamed."""
    prompt = ChatPrompt(
        ({"role": "user", "content": PARTS},), {"audio": [AudioPrompt(voice(), RATE)]}
    )

    def run(count: int) -> tuple[float, float]:
        if not warm:
            for stage in omni.pipeline.stages.values():
                stage.reset_prefix_cache()
        first: dict[str, float] = {}
        samples: dict[str, int] = defaultdict(int)
        started = time.perf_counter()
        for output in omni.stream([OmniRequest(prompt, request_id=str(n)) for n in range(count)]):
            assert output.error is None, output.error
            codec = output.stages.get("codec")
            if codec is not None and codec.audio_delta is not None:
                first.setdefault(output.request_id, time.perf_counter() - started)
                samples[output.request_id] += len(codec.audio_delta.samples)
        assert {*samples.values()} == {round(frames * FRAME_S * RATE)}, samples
        return max(first.values()), time.perf_counter() - started

    return run


def bytes_per_second() -> float:
    """Measure the memory bandwidth of reading uncached numbers."""
    numbers = torch.ones(2**27)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - started)
    return numbers.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    compare(args.rounds, args.requests, args.threads, args.frames)


def compare(rounds: int, requests: Sequence[int], threads: int, frames: int = 50) -> None:
    """Print a table for each number of requests at once."""
    torch.set_num_threads(threads)
    folder = benchmark_model("pocket_tts")
    sides: dict[str, Run] = {"transformers": reference(folder, frames)}
    floors = {}
    rate = bytes_per_second()
    for name, settings in FORMATS.items():
        omni = pipeline(folder, frames, settings)
        sides[name] = ours(omni, frames, warm=False)
        sides[f"{name}, warm"] = ours(omni, frames, warm=True)
        backbone = omni.pipeline.stages["backbone"]
        assert isinstance(backbone, AutoregressiveStage)
        read = backbone.engine.memory_plan.weights_bytes
        floors[name] = floors[f"{name}, warm"] = read / rate / FRAME_S
    sound_s = frames * FRAME_S
    for count in requests:
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(rounds + 1):  # the first one warms up
            for name, run in sides.items():
                measured = run(count)
                if number:
                    found[name].append(measured)
        table = Table(title=f"{count} requests of {sound_s:g} s of sound, {threads} threads")
        for column in ("side", "first sound s", "all s", "real-time factor", "floor", "ratio"):
            table.add_column(column, justify="left" if column == "side" else "right")
        for name, times in found.items():
            first, whole = (statistics.median(each) for each in zip(*times, strict=True))
            pairs = zip(times, found["transformers"], strict=True)
            ratio = statistics.median(mine[1] / theirs[1] for mine, theirs in pairs)
            floor = f"{floors[name] / count:.3f}" if name in floors else ""
            factor = f"{whole / sound_s / count:.3f}"
            table.add_row(name, f"{first:.2f}", f"{whole:.2f}", factor, floor, f"{ratio:.2f}")
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
