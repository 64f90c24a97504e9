"""This engine compared with transformers on the same encoder-decoder, alternating.

    python -m benchmarks.encoder_decoder_cpu [--rounds 3] [--requests 16] [--encoder 128]

The model is a seeded BART of about 50 M parameters (hidden 512, 6 + 6 layers, 8 heads, intermediate
2048, vocabulary 16,000, fp32). Sides:

* ``generate``: transformers, all requests in one padded batch;
* ``cache off``: this engine without prefix caching;
* ``cache on``: this engine, its cache emptied before every run;
* ``encoded``: as ``cache on``, but the encoder's output is cached, and the decoder's is not;
* ``torch only``: as ``cache on``, without the native kernels;
* ``ctranslate2``: a converted copy of the weights in fp32, in a separate process, if that
  package is installed.

Every round runs every side once, so that a drift of the machine affects all of them. Tokens of all
sides are compared; where they differ, the gap between the two most likely tokens is printed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from benchmarks.engine_cpu import TokenIds, report, report_equality, run_rounds
from benchmarks.models import benchmark_model
from engine import (
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    SamplingParams,
    TokensPrompt,
)

START = (2, 0)
"""Start of the decoder's prompt, on every side."""

Side = Callable[[TokenIds], TokenIds]


def make_inputs(count: int, length: int, seed: int = 0) -> TokenIds:
    generator = torch.Generator().manual_seed(seed)
    rows: TokenIds = torch.randint(1000, 15_000, (count, length), generator=generator).tolist()
    return rows


def build_engine(
    checkpoint: str,
    args: argparse.Namespace,
    *,
    caching: bool = True,
    attention: Literal["auto", "torch"] = "auto",
) -> LLMEngine:
    tables = -(-args.encoder // args.block_size) - (
        -(len(START) + args.generate) // args.block_size
    )
    return LLMEngine(
        EngineConfig(
            model=checkpoint,
            dtype="float32",
            device="cpu",
            attention_backend=attention,
            block_size=args.block_size,
            num_blocks=args.requests * tables + 1,
            max_num_seqs=args.requests,
            max_model_len=len(START) + args.generate,
            enable_prefix_caching=caching,
        )
    )


def engine_side(engine: LLMEngine, num_tokens: int, *, keep_encoded: bool = False) -> Side:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run(inputs: TokenIds) -> TokenIds:
        if not keep_encoded:
            engine.reset_prefix_cache()
        prompts = [
            ExplicitEncoderDecoderPrompt(TokensPrompt(tuple(ids)), TokensPrompt(START))
            for ids in inputs
        ]
        outputs = engine.generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def generate_side(model: Any, num_tokens: int) -> Side:
    @torch.inference_mode()
    def run(inputs: TokenIds) -> TokenIds:
        ids = torch.tensor(inputs)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            decoder_input_ids=torch.tensor([START] * len(inputs)),
            do_sample=False,
            num_beams=1,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            forced_eos_token_id=None,
            pad_token_id=1,
        )
        rows: TokenIds = out[:, len(START) :].tolist()
        return rows

    return run


@contextmanager
def ctranslate2_side(
    checkpoint: str, folder: str, num_tokens: int, num_threads: int
) -> Iterator[Side]:
    """Run CTranslate2 in a separate process: its threads would slow down the other sides here."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=serve_ctranslate2, args=(there, checkpoint, folder, num_tokens, num_threads)
    )
    process.start()

    def run(inputs: TokenIds) -> TokenIds:
        here.send(inputs)
        rows: TokenIds = here.recv()
        return rows

    try:
        yield run
    finally:
        here.close()
        process.join()


def serve_ctranslate2(
    pipe: Connection, checkpoint: str, folder: str, num_tokens: int, num_threads: int
) -> None:
    """Convert a copy, and answer until the other end is closed. Ids are sent as words, because
    its interface only accepts words."""
    ctranslate2: Any = importlib.import_module("ctranslate2")
    loaders = importlib.import_module("ctranslate2.converters.transformers")
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32)
    # Its converter reads a field that transformers has removed: BART uses post-norm.
    model.config.normalize_before = False
    spec = loaders.BartLoader().get_model_spec(model)
    words = [str(number) for number in range(model.config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "0", "2", "3"
    spec.config.decoder_start_token = str(START[0])
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.save(folder)
    translator = ctranslate2.Translator(
        folder, device="cpu", compute_type="float32", intra_threads=num_threads
    )
    skipped = len(START) - 1  # answers contain the prompt except for the start token
    while True:
        try:
            inputs: TokenIds = pipe.recv()
        except EOFError:
            return
        results = translator.translate_batch(
            [[str(token) for token in ids] for ids in inputs],
            target_prefix=[[str(token) for token in START[1:]]] * len(inputs),
            beam_size=1,
            max_decoding_length=skipped + num_tokens,
            min_decoding_length=skipped + num_tokens,
        )
        pipe.send([[int(word) for word in result.hypotheses[0][skipped:]] for result in results])


@torch.inference_mode()
def describe_difference(model: Any, encoder: list[int], a: list[int], b: list[int]) -> str:
    """Describe where two answers diverge, and the gap between the two most likely tokens there."""
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if position is None:
        return f"lengths {len(a)} and {len(b)}"
    decoder = torch.tensor([[*START, *a[:position]]])
    logits = model(torch.tensor([encoder]), decoder_input_ids=decoder).logits[0, -1]
    top = logits.topk(2).values
    return f"token {position}: top two logits {float(top[0] - top[1]):.1e} apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--encoder", type=int, default=128, help="tokens of an encoder input")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    checkpoint = benchmark_model("bart")
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sides = {
        "generate": generate_side(model, args.generate),
        "cache off": engine_side(build_engine(checkpoint, args, caching=False), args.generate),
        "cache on": engine_side(build_engine(checkpoint, args), args.generate),
        "encoded": engine_side(build_engine(checkpoint, args), args.generate, keep_encoded=True),
        "torch only": engine_side(build_engine(checkpoint, args, attention="torch"), args.generate),
    }
    console = Console()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        if importlib.util.find_spec("ctranslate2") is not None:
            sides["ctranslate2"] = running.enter_context(
                ctranslate2_side(checkpoint, folder, args.generate, args.threads)
            )
        else:
            console.print("ctranslate2 is not installed, and is left out")
        inputs = make_inputs(args.requests, args.encoder)
        for run in sides.values():  # threads, kernels, allocators and the one cache warm up
            run(inputs)
        seconds, answers = run_rounds(sides, inputs, args.rounds)
    title = (
        f"{args.requests} requests of {args.encoder} encoder tokens and {args.generate} decoded, "
        f"{args.threads} threads"
    )
    report(console, title, seconds)
    for name, rows in answers.items():
        triples = zip(inputs, answers["generate"], rows, strict=True)
        parted = [describe_difference(model, ids, a, b) for ids, a, b in triples if a != b]
        report_equality(console, name, len(rows), parted)


if __name__ == "__main__":
    main()
