"""This engine compared with llama.cpp on the same GGUF file; and the accuracy of formats.

    python -m benchmarks.gguf_cpu FILE.gguf --llama-cpp ../llamacpp/bin/python [--rounds 3]
        [--threads 2] [--prompt 256] [--generate 64]
    python -m benchmarks.gguf_cpu FILE.gguf --formats [--text README.md] [--tokens 512]

The first needs a Python with PyPI's ``xllamacpp``, in a separate environment. It runs in another
process; only one of the two works at a time. Each round runs every job on both:
1 and 8 requests of the same token ids at once, greedy, once for 1 token, which is the prefill, and
once for ``--generate``; the difference is the decode. Ratios are medians of the rounds' ratios.

``--formats`` converts the file's weights to other formats and compares the next-token
distributions over a text with those of the dequantized weights in float32: the mean
Kullback-Leibler divergence, and how often the most likely token is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt

OTHER = r"""
import json, sys, threading, time
import xllamacpp
settings = json.loads(sys.stdin.readline())
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel = settings["file"], 8
params.n_ctx, params.n_gpu_layers = 8 * settings["length"], 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, 0
server = xllamacpp.Server(params)
def ask(ids, count):
    server.handle_completions({"prompt": ids, "n_predict": count, "temperature": 0,
                               "ignore_eos": True, "cache_prompt": False})
print("ready", file=sys.stderr, flush=True)
for line in sys.stdin:
    job = json.loads(line)
    threads = [threading.Thread(target=ask, args=(ids, job["count"])) for ids in job["prompts"]]
    started = time.perf_counter()
    [t.start() for t in threads], [t.join() for t in threads]
    print(time.perf_counter() - started, file=sys.stderr, flush=True)
"""


class LlamaCpp:
    """llama.cpp in another Python process, idle between requests."""

    def __init__(self, python: str, file: Path, threads: int, length: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", OTHER], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._send({"file": str(file), "threads": threads, "length": length})
        self._until("ready")

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def _until(self, word: str) -> str:
        """Return the next line that is the word, or for "" a number; skip other log lines."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip() == word or (not word and line.strip().replace(".", "").isdigit()):
                return line
        raise RuntimeError("llama.cpp ended")

    def seconds(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Run prompts at once and return the seconds."""
        self._send({"prompts": prompts, "count": count})
        return float(self._until(""))


def ours(engine: LLMEngine, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Do the same with this engine, its cache emptied before."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    started = time.perf_counter()
    engine.generate([TokensPrompt(tuple(ids)) for ids in prompts], params)
    return time.perf_counter() - started


def compare(args: argparse.Namespace, console: Console) -> None:
    """Print tokens per second of both sides, and their ratios."""
    torch.set_num_threads(args.threads)
    length = args.prompt + args.generate
    config = EngineConfig(model=str(args.file), num_blocks=8 * -(-length // 16) + 9)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30_000, (8, args.prompt), generator=generator).tolist()
    rates: dict[tuple[str, int, str], list[float]] = {}
    other = LlamaCpp(args.llama_cpp, args.file, args.threads, length + 16)
    with closing(LLMEngine(config, output_names=())) as engine:
        print("\n".join(engine.memory_plan.lines()[:2]))
        sides = {"ours": lambda *job: ours(engine, *job), "llama.cpp": other.seconds}
        for round_ in range(args.rounds + 1):  # the first one warms up
            for count in (1, 8):
                for side, run in sides.items():
                    prefill = run(ids[:count], 1)
                    decode = run(ids[:count], args.generate) - prefill
                    if round_:
                        found = {"prefill": count * args.prompt / prefill}
                        found["decode"] = count * (args.generate - 1) / decode
                        for what, rate in found.items():
                            rates.setdefault((what, count, side), []).append(rate)
    table = Table("job", "requests", "ours, tokens/s", "llama.cpp", "ours / llama.cpp")
    for what, count in (("prefill", 1), ("prefill", 8), ("decode", 1), ("decode", 8)):
        mine, theirs = rates[what, count, "ours"], rates[what, count, "llama.cpp"]
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        middle = [f"{statistics.median(each):.1f}" for each in (mine, theirs)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(what, str(count), *middle, spread)
    console.print(table)


def rewrite(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """Rewrite a file with all its matrices in one format."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of_items = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of_items)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        own = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def log_probs(config: EngineConfig, text: str, num_tokens: int) -> Tensor:
    """Compute next-token log-probabilities at every position, ``(tokens, vocabulary)``."""
    with closing(LLMEngine(config, output_names=["hidden_states"])) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer(text)["input_ids"][:num_tokens]
        (output,) = engine.generate([TokensPrompt(ids)], SamplingParams(max_tokens=1))
        rows = output.outputs[0].tensors["hidden_states"]
        logits = engine._runner._model.compute_logits(rows.to(engine.dtype))
    return logits.log_softmax(-1)


def accuracy(args: argparse.Namespace, console: Console) -> None:
    """Print the divergence of formats."""
    text = args.text.read_text("utf-8")
    table = Table("format", "mean KL, nats", "99th percentile", "same likeliest token")
    with tempfile.TemporaryDirectory() as folder:
        plain = rewrite(args.file, Path(folder, "F32.gguf"), GGMLQuantizationType.F32)
        common = {"num_blocks": args.tokens // 16 + 4, "max_model_len": args.tokens + 8}
        reference = log_probs(EngineConfig(model=str(plain), **common), text, args.tokens)
        sides: dict[str, dict[str, Any]] = {"the file as it is": {"model": str(args.file)}}
        sides["dtype: bfloat16"] = {"model": str(plain), "dtype": "bfloat16"}
        for name in ("int8", "int4"):
            sides[f"quantization: {name}"] = {"model": str(plain), "quantization": name}
        for name in ("Q8_0", "Q5_0", "Q4_1", "Q4_0"):
            sides[name] = {"model": Path(folder, f"{name}.gguf")}
        for name, settings in sides.items():
            if isinstance(settings["model"], Path):
                kind = GGMLQuantizationType[name]
                settings["model"] = str(rewrite(args.file, settings["model"], kind))
            found = log_probs(EngineConfig(**common, **settings), text, args.tokens)
            divergence = (reference.exp() * (reference - found)).sum(-1)
            same = (found.argmax(-1) == reference.argmax(-1)).float().mean()
            figures = (divergence.mean(), divergence.quantile(0.99))
            table.add_row(name, *(f"{figure:.2e}" for figure in figures), f"{same:.1%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", help="a Python that has xllamacpp")
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    if not (args.formats or args.llama_cpp):
        sys.exit("give --llama-cpp PYTHON, --formats, or both")
    console = Console(width=100)
    if args.llama_cpp:
        compare(args, console)
    if args.formats:
        accuracy(args, console)


if __name__ == "__main__":
    main()
