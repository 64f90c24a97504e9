"""A voice pipeline compared with transformers on the same weights, in one process, alternating.

    python -m benchmarks.omni_pipeline_cpu [--model qwen3] [--rounds 3] [--requests 8]
    python -m benchmarks.omni_pipeline_cpu --model pocket_tts    # see benchmarks/pocket_tts.py

The model is a seeded Qwen2.5-Omni or Qwen3-Omni of about 100 M parameters in fp32
(of :mod:`benchmarks.models`). All requests have the same system prompt and different recordings;
greedy, lengths fixed. Sides:

* ``transformers``: its ``generate`` for this model, one request after another;
* ``cache off``: this pipeline without prefix caching, all requests at once;
* ``cache on``: this pipeline, its caches emptied before every run: the prompt is shared within it;
* ``streaming``: as ``cache on``, with chunks between the stages;
* ``served``: the same with the shipped file, its stages in one worker, as in ``omni serve``;
* ``thinker alone``: the first stage as a separate pipeline, its caches emptied before every run.

Reported are the seconds of the two autoregressive stages, of the vocoder, and in total; and from
the start of the run to the first text and the first audio of each request. Every round runs every
side once, so that a drift of the machine affects all of them. Tokens and waveforms are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoTokenizer,
    Qwen2_5OmniForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths,
)
from transformers.utils import logging as transformers_logging

from benchmarks import pocket_tts
from benchmarks.models import benchmark_model
from engine import ChatPrompt, EngineConfig, SamplingParams
from engine.interface.config import GenerationParams, GeneratorConfig
from omni import Omni, Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from stages import AutoregressiveStage, GeneratorStage, StageInputs, StageOutput

SYSTEM = (
    "You are a helpful assistant. The user asks a question, and the assistant answers it with "
    "care. First collect the tools, then read the instructions, and finally check that nothing is "
    "missing. Memory is a kind of cache: it gives back what was stored, as long as nothing else "
    "took its place. The library has three floors: history and maps below, music in the middle, "
    "and poetry at the top. Scientists measure the distance between two points, write the numbers "
    "down, and measure again. In the morning the train leaves at seven; in the evening it returns."
)
NEVER = [10**6]
"""Stop tokens that no model has: lengths are fixed on both sides."""


@dataclass(frozen=True)
class Family:
    """The differences between the models.

    Attributes:
        name: name in :mod:`benchmarks.models`.
        reference: transformers' class.
        decode: its vocoder and the vocoder's method that decodes codes to audio.
        padding: padding of a recording for feature extraction.
        num_rows: number of placeholders for a number of feature frames.
        codec_signs: special ids after the codes, which the talker must not sample, of a config.
        drops_mask: true if its ``generate`` needs :func:`give_mask_back`.
        transforms: prefix of the names of the stages' transforms.
        hidden: outputs that the thinker passes to the talker.
        drawn: outputs that the talker passes to the vocoder in addition to its tokens.
        codes: tokens of the talker for 3.84 s of audio.
        shipped: the shipped pipeline with these stages.
        code_chunk: chunk size of the codes when streaming, as in the shipped pipelines.
        goals: for the autoregressive stages and the total, relative to transformers' time; and
            for the first audio when streaming, relative to that without streaming.
    """

    name: str
    reference: Any
    decode: tuple[str, str]
    padding: str
    num_rows: Callable[[int], int]
    codec_signs: Callable[[Any], Sequence[int]]
    drops_mask: bool
    transforms: str
    hidden: tuple[str, ...]
    drawn: tuple[str, ...]
    codes: int
    code_chunk: int
    shipped: str
    goals: tuple[float, float, float]


FAMILIES = {
    "qwen2_5": Family(
        name="qwen2_5_omni",
        reference=Qwen2_5OmniForConditionalGeneration,
        decode=("token2wav", "forward"),
        padding="max_length",
        num_rows=lambda frames: ((frames - 1) // 2 + 1 - 2) // 2 + 1,
        codec_signs=lambda config: (),
        drops_mask=True,
        transforms="",
        hidden=("hidden_states", "token_embeds", "position_ids"),
        drawn=(),
        codes=192,
        code_chunk=5,
        shipped="omni_speech",
        goals=(0.3, 0.5, 0.4),
    ),
    "qwen3": Family(
        name="qwen3_omni",
        reference=Qwen3OmniMoeForConditionalGeneration,
        decode=("code2wav", "chunked_decode"),
        padding="longest",
        num_rows=_get_feat_extract_output_lengths,
        codec_signs=lambda config: range(
            config.code2wav_config.codebook_size, config.talker_config.text_config.vocab_size
        ),
        drops_mask=False,
        transforms="qwen3_",
        hidden=("speech_rows", "position_ids", "token_ids"),
        drawn=("codes",),
        codes=48,
        code_chunk=1,
        shipped="qwen3_omni_seeded",
        goals=(0.2, 0.4, 0.15),
    ),
}


@dataclass
class Run:
    """Seconds and answers of one side in one round.

    Attributes:
        autoregressive_s: seconds in the thinker and the talker.
        vocoder_s: seconds in code2wav.
        whole_s: wall-clock seconds of all requests.
        first_text_s: per request, seconds from the start to its first text.
        first_audio_s: per request, seconds from the start to its first audio.
        text: per request, the thinker's tokens.
        codes: per request, the talker's codes, token by token.
        audio: per request, the samples.
    """

    autoregressive_s: float = 0.0
    vocoder_s: float = 0.0
    whole_s: float = 0.0
    first_text_s: list[float] = field(default_factory=list)
    first_audio_s: list[float] = field(default_factory=list)
    text: list[tuple[int, ...]] = field(default_factory=list)
    codes: list[tuple[int, ...]] = field(default_factory=list)
    audio: list[Tensor] = field(default_factory=list)


Recording = NDArray[np.float32]
Side = Callable[[Sequence[Recording]], Run]


def make_recordings(count: int, seconds: float) -> list[Recording]:
    """Generate different gliding tones, with a little noise."""
    times = np.arange(int(seconds * 16_000)) / 16_000
    random = np.random.default_rng(0)
    return [
        (0.3 * np.sin(2 * np.pi * (220 + 40 * index + 60 * times) * times)).astype(np.float32)
        + (0.01 * random.standard_normal(len(times))).astype(np.float32)
        for index in range(count)
    ]


def messages() -> list[dict[str, Any]]:
    question = [{"type": "audio"}, {"type": "text", "text": "What is this?"}]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def give_mask_back(
    talker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Restore the mask of ones that ``generate`` of transformers 5.23 drops.

    Its talker only adds the embeddings of the codec's pad and bos if there is a mask, and
    would generate different tokens for a request alone than for the same one in a padded batch.
    """
    if kwargs.get("attention_mask") is None:
        cache, embeds = kwargs.get("past_key_values"), kwargs.get("inputs_embeds")
        num_new = (kwargs["input_ids"] if embeds is None else embeds).shape[1]
        num_past = 0 if cache is None else cache.get_seq_length()
        kwargs["attention_mask"] = torch.ones(1, num_past + num_new, dtype=torch.int64)
    return args, kwargs


class TransformersSide:
    """Transformers' own ``generate``, its three parts timed from outside."""

    def __init__(
        self, folder: str, family: Family, args: argparse.Namespace, suppressed: Sequence[int]
    ) -> None:
        self._model = family.reference.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        self._family = family
        self._settings: dict[str, Any] = {
            "thinker_max_new_tokens": args.text,
            "thinker_do_sample": False,
            "thinker_suppress_tokens": list(suppressed),
            "thinker_eos_token_id": NEVER,
            "talker_max_new_tokens": args.codes,
            "talker_do_sample": False,
            "talker_repetition_penalty": 1.05,
            "talker_eos_token_id": NEVER,
            "token2wav_num_steps": args.steps,  # Qwen3-Omni's ignores it
        }
        if signs := list(family.codec_signs(self._model.config)):
            self._settings["talker_suppress_tokens"] = signs
        if family.drops_mask:
            self._model.talker.register_forward_pre_hook(give_mask_back, with_kwargs=True)

    @torch.inference_mode()
    def __call__(self, recordings: Sequence[Recording]) -> Run:
        """Run all requests."""
        run = Run()
        started = time.perf_counter()
        for recording in recordings:
            inputs = self._inputs(recording)
            with self._timed(run):
                ids, samples = self._model.generate(**inputs, **self._settings)
            run.text.append(tuple(ids[0, inputs["input_ids"].shape[1] :].tolist()))
            run.audio.append(samples.flatten())
            run.first_audio_s.append(time.perf_counter() - started)
        run.whole_s = time.perf_counter() - started
        return run

    def _inputs(self, recording: Recording) -> dict[str, Tensor]:
        features = self._extractor(
            recording,
            sampling_rate=16_000,
            padding=self._family.padding,
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = int(features["attention_mask"].sum())
        chat = self._tokenizer.apply_chat_template(
            messages(), tokenize=False, add_generation_prompt=True
        )
        text = str(chat).replace("<|AUDIO|>", "<|AUDIO|>" * self._family.num_rows(frames))
        inputs = dict(self._tokenizer(text, add_special_tokens=False, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        return inputs | {
            "input_features": features["input_features"],
            "feature_attention_mask": features["attention_mask"],
        }

    @contextmanager
    def _timed(self, run: Run) -> Iterator[None]:
        thinker, talker = self._model.thinker, self._model.talker
        part, decode = self._family.decode
        vocoder = getattr(self._model, part)

        def timed(call: Callable[..., Any], field_name: str) -> Callable[..., Any]:
            def inner(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                result = call(*args, **kwargs)
                spent = time.perf_counter() - started
                setattr(run, field_name, getattr(run, field_name) + spent)
                return result

            return inner

        def vocode(codes: Tensor, **kwargs: Any) -> Any:
            run.codes.append(tuple(codes.movedim(1, -1).flatten().tolist()))
            torch.manual_seed(0)
            return plain_vocode(codes, **kwargs)

        plain_vocode = getattr(vocoder, decode)
        thinker.generate = timed(thinker.generate, "autoregressive_s")
        talker.generate = timed(talker.generate, "autoregressive_s")
        setattr(vocoder, decode, timed(vocode, "vocoder_s"))
        try:
            yield
        finally:
            del thinker.generate, talker.generate
            delattr(vocoder, decode)


def engine_config(
    folder: str, args: argparse.Namespace, part: str, max_model_len: int, caching: bool
) -> EngineConfig:
    return EngineConfig(
        model=folder,
        part=part,
        dtype="float32",
        device="cpu",
        max_num_seqs=args.requests,
        max_model_len=max_model_len,
        num_blocks=args.requests * (max_model_len // 16 + 1) + 1,
        enable_prefix_caching=caching,
    )


def build_pipeline(
    folder: str,
    family: Family,
    args: argparse.Namespace,
    suppressed: Sequence[int],
    *,
    caching: bool = True,
    streaming: bool = False,
    alone: bool = False,
) -> Omni:
    fixed: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    thinker = AutoregressiveStage(
        "thinker",
        engine_config(folder, args, "thinker", 512, caching),
        sampling=SamplingParams(
            max_tokens=args.text, suppress_token_ids=tuple(suppressed), **fixed
        ),
        outputs=() if alone else family.hidden,
    )
    if alone:
        return Omni(Pipeline([thinker]))
    talker = AutoregressiveStage(
        "talker",
        engine_config(folder, args, "talker", 512 + args.codes, caching),
        sampling=SamplingParams(
            max_tokens=args.codes,
            repetition_penalty=1.05,
            suppress_token_ids=tuple(family.codec_signs(AutoConfig.from_pretrained(folder))),
            **fixed,
        ),
        outputs=family.drawn,
        inputs=StageInputs(
            ("thinker",),
            f"{family.transforms}thinker_to_talker",
            chunk_size=args.text_chunk if streaming else None,
        ),
        final_output=("text", "tensors") if family.drawn else ("text",),
    )
    code2wav = GeneratorStage(
        "code2wav",
        GeneratorConfig(
            model=folder,
            part="code2wav",
            device="cpu",
            max_batch_size=args.requests,
            generation=GenerationParams(num_steps=args.steps),
        ),
        inputs=StageInputs(
            ("talker",),
            f"{family.transforms}talker_to_code2wav",
            chunk_size=args.code_chunk if streaming else None,
        ),
        final_output=("audio",),
    )
    return Omni(Pipeline([thinker, talker, code2wav]))


def served_pipeline(
    folder: str, family: Family, args: argparse.Namespace, suppressed: Sequence[int]
) -> Omni:
    """Open the shipped pipeline on the same weights, with the same settings."""
    signs = list(family.codec_signs(AutoConfig.from_pretrained(folder)))
    fixed: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    overrides: dict[str, Any] = {}
    for name, length in (("thinker", 512), ("talker", 512 + args.codes), ("code2wav", 0)):
        overrides[f"stages.{name}.model"] = folder
        overrides[f"stages.{name}.placement"] = {"threads": args.threads}
        if length:
            config = engine_config(folder, args, name, length, True)
            for key in (
                "max_num_seqs",
                "max_model_len",
                "num_blocks",
                "max_num_batched_tokens",
            ):
                overrides[f"stages.{name}.engine.{key}"] = getattr(config, key)
    thinker = {"max_tokens": args.text, "suppress_token_ids": list(suppressed)}
    talker = {
        "max_tokens": args.codes,
        "repetition_penalty": 1.05,
        "suppress_token_ids": signs,
    }
    overrides["stages.thinker.sampling"] = fixed | thinker
    overrides["stages.talker.sampling"] = fixed | talker
    overrides["stages.talker.final_output"] = ["text", "tensors"] if family.drawn else ["text"]
    overrides["stages.talker.inputs.chunk_size"] = args.text_chunk
    overrides["stages.code2wav.inputs.chunk_size"] = args.code_chunk
    overrides["stages.code2wav.generation.num_steps"] = args.steps
    return Omni(PipelineConfig.load(family.shipped, overrides=overrides), apart=True)


def codes_of(talker: StageOutput) -> tuple[int, ...]:
    """Return the vocoder's input: the tokens, or codes of all codebooks for all but the last."""
    drawn = talker.tensors.get("codes")
    if drawn is None:
        return talker.token_ids
    first, number = talker.num_prompt_tokens, len(talker.token_ids) - 1
    return tuple(drawn[first : first + number].flatten().tolist())


def pipeline_side(omni: Omni) -> Side:
    def run_all(recordings: Sequence[Recording]) -> Run:
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.reset_prefix_cache()
        before = omni.stats()
        run, started = Run(), time.perf_counter()
        prompts = [
            ChatPrompt(tuple(messages()), multi_modal_data={"audio": [recording]})
            for recording in recordings
        ]
        first_text: dict[str, float] = {}
        first_audio: dict[str, float] = {}

        def note(output: Any) -> None:
            now = time.perf_counter() - started
            thinker, vocoder = output.stages.get("thinker"), output.stages.get("code2wav")
            if thinker is not None and thinker.token_ids:
                first_text.setdefault(output.request_id, now)
            if vocoder is not None and vocoder.audio_delta is not None:
                first_audio.setdefault(output.request_id, now)

        outputs = omni.generate(prompts, on_progress=note)
        run.whole_s = time.perf_counter() - started
        spent = {name: after.since(before[name]).busy_s for name, after in omni.stats().items()}
        run.vocoder_s = spent.pop("code2wav", 0.0)
        run.autoregressive_s = sum(spent.values())
        run.first_text_s = [first_text[output.request_id] for output in outputs]
        run.first_audio_s = [first_audio.get(output.request_id, 0.0) for output in outputs]
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            run.text.append(output.stages["thinker"].token_ids)
            if "code2wav" in output.stages:
                run.codes.append(codes_of(output.stages["talker"]))
                audio = output.stages["code2wav"].audio
                run.audio.append(torch.empty(0) if audio is None else audio.samples)
        return run

    return run_all


def median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return statistics.median(value(run) for run in runs)


def report(
    console: Console, title: str, runs: Mapping[str, Sequence[Run]], goals: tuple[float, ...]
) -> None:
    """Print a table of medians, and the ratios with goals; see :class:`Family`."""
    table = Table(title=title)
    for column in ("side", "two AR stages s", "vocoder s", "whole s", "AR", "whole"):
        table.add_column(column, justify="left" if column == "side" else "right")
    table.add_column("first text s", justify="right")
    table.add_column("first sound s", justify="right")
    base = runs["transformers"]
    for name, each in runs.items():
        spent = {
            key: median(each, value)
            for key, value in {
                "ar": lambda run: run.autoregressive_s,
                "vocoder": lambda run: run.vocoder_s,
                "whole": lambda run: run.whole_s,
                "text": lambda run: statistics.fmean(run.first_text_s or [0.0]),
                "audio": lambda run: statistics.fmean(run.first_audio_s or [0.0]),
            }.items()
        }
        table.add_row(
            name,
            f"{spent['ar']:.2f}",
            f"{spent['vocoder']:.2f}",
            f"{spent['whole']:.2f}",
            f"{spent['ar'] / median(base, lambda run: run.autoregressive_s):.2f}",
            f"{spent['whole'] / median(base, lambda run: run.whole_s):.2f}",
            f"{spent['text']:.3f}" if spent["text"] else "-",
            f"{spent['audio']:.3f}" if spent["audio"] else "-",
        )
    console.print(table)
    share = median(base, lambda run: run.vocoder_s / run.whole_s)
    console.print(f"the vocoder's share of transformers' time: {share:.2f}")
    console.print(f"goals: AR {goals[0]:.2f}, whole {goals[1]:.2f}")

    def first(name: str, value: Callable[[Run], list[float]]) -> float:
        return median(runs[name], lambda run: statistics.fmean(value(run)))

    whole = first("cache on", lambda r: r.first_audio_s)
    for name in ("streaming", "served"):
        audio = first(name, lambda r: r.first_audio_s) / whole
        console.print(f"first sound, {name} / whole: {audio:.2f} (goal {goals[2]:.2f})")
    alone = first("thinker alone", lambda r: r.first_text_s)
    for name in ("cache on", "streaming"):
        ratio = first(name, lambda r: r.first_text_s) / alone
        console.print(f"first text, {name} / thinker alone: {ratio:.2f} (goal 1.20)")


def compare(console: Console, runs: Mapping[str, Sequence[Run]]) -> None:
    """Print how many requests' tokens equal transformers', and the difference of waveforms."""
    base = runs["transformers"][0]
    for name, each in runs.items():
        run = each[0]
        text = sum(a == b for a, b in zip(run.text, base.text, strict=True))
        line = f"{name}: text equal in {text} of {len(base.text)}"
        if run.codes:
            codes = sum(a == b for a, b in zip(run.codes, base.codes, strict=True))
            pairs = zip(run.audio, base.audio, strict=True)
            apart = max(
                float((a - b).abs().max()) if a.shape == b.shape else float("nan") for a, b in pairs
            )
            line += f", codec tokens in {codes}; samples apart by {apart:.1e} at most"
        console.print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*FAMILIES, "pocket_tts"], default="qwen2_5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a recording")
    parser.add_argument("--text", type=int, default=32, help="tokens of text")
    parser.add_argument("--codes", type=int, help="codec tokens, by default 3.84 s of them")
    parser.add_argument("--steps", type=int, default=10, help="of the flow of Qwen2.5's vocoder")
    parser.add_argument("--text-chunk", type=int, default=4)
    parser.add_argument("--code-chunk", type=int, help="by default 5, or 1 with Qwen3")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.model == "pocket_tts":  # two stages, and other sides
        pocket_tts.compare(args.rounds, [1, args.requests], args.threads)
        return
    family = FAMILIES[args.model]
    args.codes = args.codes or family.codes
    args.code_chunk = args.code_chunk or family.code_chunk
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    folder = benchmark_model(family.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Random weights generate placeholders, which transformers' talker does not support.
    suppressed = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    pipelines = {
        "cache off": build_pipeline(folder, family, args, suppressed, caching=False),
        "cache on": build_pipeline(folder, family, args, suppressed),
        "streaming": build_pipeline(folder, family, args, suppressed, streaming=True),
        "served": served_pipeline(folder, family, args, suppressed),
        "thinker alone": build_pipeline(folder, family, args, suppressed, alone=True),
    }
    sides: dict[str, Side] = {"transformers": TransformersSide(folder, family, args, suppressed)}
    sides |= {name: pipeline_side(omni) for name, omni in pipelines.items()}
    recordings = make_recordings(args.requests, args.seconds)
    console = Console(width=120)
    for side in sides.values():  # threads, kernels and allocators warm up
        side(recordings[:2])
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            runs[name].append(side(recordings))
    title = (
        f"{family.name}, {args.requests} requests: {args.seconds:g} s of sound in, "
        f"{args.text} tokens of text and {args.codes} codec tokens out, {args.threads} threads"
    )
    report(console, title, runs, family.goals)
    compare(console, runs)
    for omni in pipelines.values():
        omni.close()


if __name__ == "__main__":
    main()
