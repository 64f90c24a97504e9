"""The parts of :mod:`benchmarks.gpu`, each run in a separate process.

    python -m benchmarks.gpu_parts PART DEVICE FOLDER SECONDS [--small]

* ``device``: versions, and the ceilings: a copy (bytes read and written), and matrix products;
* ``throughput-0.5b``, ``throughput-7b``: random weights, made on the device, in the shapes of
  Qwen2.5: decodes, prefills, half-cached prompts, with and without mirrored rows, compared with
  transformers' ``generate`` and ``forward`` on other random weights, and with the ceilings;
* ``profile``: a decode step: its kernels, idle time of the device, synchronizations of the host;
* ``parity``: hidden states and greedy tokens of this engine and of transformers, on the device in
  float32 and bfloat16, compared with transformers on the CPU in float32;
* ``families``: every seeded family on the device compared with the CPU, in float32;
* ``tests``: the tests marked ``gpu``;
* ``verify``: cached pipelines compared with uncached ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from engine import (
    ChatPrompt,
    EngineConfig,
    GeneratorOutput,
    LLMEngine,
    Prompt,
    SamplingParams,
    TokensPrompt,
)
from engine.checkpoints.checkpoint import Checkpoint
from omni import Omni, verify
from omni.seeded.checkpoints import resolve_model
from tests.support.model_trial import TRIALS, Trial

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """The device of a part, its deadline, and the file of its rows."""

    device: torch.device
    file: Path
    deadline: float
    small: bool = False

    def row(self, table: str, **cells: Any) -> None:
        """Append a row of a table of the report to the file."""
        print(table, cells, flush=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"table": table, **cells}) + "\n")

    @contextmanager
    def case(self, table: str, **names: Any) -> Iterator[None]:
        """Run one of several cases: a failure becomes a row, and the next case continues.

        After the deadline no case starts.
        """
        if time.monotonic() > self.deadline:
            raise TimeoutError("the part's time is over")
        try:
            yield
        except TimeoutError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.row(table, **names, error=f"{type(error).__name__}: {str(error)[:300]}")

    def seconds(self, work: Callable[[], object], repeat: int = 10, warm_up: int = 3) -> float:
        """Measure the median time of work on the device."""
        taken = []
        for index in range(warm_up + repeat):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            if index >= warm_up:
                taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The usual dtype of this kind of device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def versions(run: Run) -> None:
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "transformers", "xformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if run.device.type == "cuda":
        seen = torch.cuda.get_device_properties(run.device)
        free, total = torch.cuda.mem_get_info(run.device)
        found |= {"device": seen.name, "capability": f"{seen.major}.{seen.minor}"}
        found["multiprocessors"] = str(seen.multi_processor_count)
        found["memory"] = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    for name, value in found.items():
        run.row("versions", name=name, value=value)


def copy_rate(run: Run) -> float:
    """Measure bytes per second, read and written."""
    source = torch.ones(2**20 if run.small else 2**30, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / run.seconds(lambda: target.copy_(source))


def product_rate(run: Run, dtype: torch.dtype) -> float:
    """Measure FLOP per second of a square product of random numbers."""
    size = 128 if run.small else 8192
    left, right = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    return 2 * size**3 / run.seconds(lambda: left @ right)


def device(run: Run) -> None:
    versions(run)
    run.row("ceilings", what="copy, read and written", value=copy_rate(run) / 1e9, unit="GB/s")
    for dtype in (torch.bfloat16, torch.float32):
        rate = product_rate(run, dtype) / 1e12
        run.row("ceilings", what=f"product, {dtype}", value=rate, unit="TFLOP/s")


_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
_SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 500, True),
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "7b": (3584, 18_944, 28, 28, 4, 152_064, False),
}


def config_of(shape: str) -> Qwen2Config:
    """Return the config of Qwen2.5-0.5B or 7B, or a tiny one for tests."""
    sizes: dict[str, Any] = dict(zip(_KEYS, _SHAPES[shape], strict=True))
    names = ["Qwen2ForCausalLM"]
    return Qwen2Config(architectures=names, max_position_embeddings=16_384, **sizes)


def _random_weights(
    checkpoint: Checkpoint,
    device: torch.device,
    build: Any,
    places_of: Callable[[Any], Any],
    check: Callable[[Any], object],
) -> Any:
    """Build the model with random weights on its device, instead of loading a checkpoint."""
    model = build(device)
    for name, target in places_of(model).targets.items():
        target.fill_(1.0) if "norm" in name else target.normal_(0.0, 0.02)
    return model


@contextmanager
def random_engine(run: Run, shape: str, **changes: Any) -> Iterator[LLMEngine]:
    """Create an engine on random weights; its checkpoint consists only of a config."""
    mirrors = changes.pop("mirrors", True)
    with TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        settings: dict[str, Any] = {"model": folder, "generation_config": "ignore"}
        settings |= {"device": str(run.device), "dtype": str(run.dtype).removeprefix("torch.")}
        names = ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        sizes = (128, 8, 128, 256) if shape == "tiny" else (8192, 256, 8192, 8448)
        settings |= dict(zip(names, sizes, strict=True))
        files = {"model.embed_tokens.weight": "model.safetensors"}
        with (
            patch("engine.models.model_loader.load_checked", _random_weights),
            patch.object(Checkpoint, "weight_files", files),
            patch.object(Checkpoint, "stored", None),
        ):
            outputs = None if mirrors else ()
            engine = LLMEngine(EngineConfig(**settings | changes), output_names=outputs)
        yield engine
        engine.close()
        del engine
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(run.device)


def random_prompts(count: int, length: int, shape: str, seed: int) -> list[TokensPrompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, config_of(shape).vocab_size, (count, length), generator=generator)
    return [TokensPrompt(tuple(row)) for row in ids.tolist()]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def decode_seconds(engine: LLMEngine, prompts: Sequence[TokensPrompt], steps: int) -> float:
    """Measure the median time of a step in which all prompts decode."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(steps + len(prompts) + 8))
    waiting = {str(index) for index in range(len(prompts))}
    while waiting:
        waiting -= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
    for _ in range(4):
        engine.step()
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started)
    for index in range(len(prompts)):
        engine.abort(str(index))
    return statistics.median(taken)


def _generated(model: Any, ids: Tensor, num_tokens: int) -> Tensor:
    """Generate greedily with transformers, for prompts of one length."""
    mask, ends = torch.ones_like(ids), {"eos_token_id": None, "pad_token_id": 0}
    options = {"do_sample": False, "max_new_tokens": num_tokens, **ends}
    written: Tensor = model.generate(ids, attention_mask=mask, **options)
    return written[:, ids.shape[1] :]


class Throughput:
    """Measurements of one shape, compared with the ceilings of the device."""

    def __init__(self, run: Run, shape: str) -> None:
        self.run, self.shape, self.config = run, shape, config_of(shape)
        self.bytes_rate, self.product_rate = copy_rate(run), product_rate(run, run.dtype)
        is_tiny = shape == "tiny"
        self.seats = (1, 4) if is_tiny else (1, 16, 64, 256)
        self.lengths = (32, 64) if is_tiny else (2048, 8192)
        self.prompt_len, self.steps = (16, 4) if is_tiny else (128, 32)
        self.generate_ms: dict[int, float] = {}
        self.forward_ms: dict[int, float] = {}

    def of_transformers(self) -> None:
        """Measure transformers' forward pass and decode steps, on other random weights."""
        run = self.run
        with torch.device(run.device):
            model: Any = AutoModelForCausalLM.from_config(self.config, dtype=run.dtype).eval()
        with torch.inference_mode():
            for count in self.seats:
                with run.case("transformers", requests=count):
                    prompts = random_prompts(count, self.prompt_len, self.shape, 1)
                    rows = [prompt.prompt_token_ids for prompt in prompts]
                    wall = [self._generate(model, rows, n) for n in (2, 1, 1 + self.steps)]
                    self.generate_ms[count] = 1e3 * (wall[2] - wall[1]) / self.steps
            for length in self.lengths:
                with run.case("transformers", prompt=length):
                    (prompt,) = random_prompts(1, length, self.shape, 2)
                    ids = torch.tensor([prompt.prompt_token_ids], device=run.device)
                    work = partial(model, ids, logits_to_keep=1, use_cache=True)
                    self.forward_ms[length] = 1e3 * run.seconds(work, repeat=3, warm_up=1)
        del model
        if run.device.type == "cuda":
            torch.cuda.empty_cache()

    def _generate(self, model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self.run.device)
        started = time.perf_counter()
        _generated(model, ids, num_tokens)
        self.run.synchronize()
        return _since(started)

    def decodes(self, engine: LLMEngine, side: str, seats: Sequence[int]) -> None:
        """Measure decode steps, compared with the minimum time to read weights and pages."""
        config, weights = self.config, engine.memory_plan.weights_bytes
        if not config.tie_word_embeddings:
            # A step reads some rows of the embedding, but all of a tied one, as the head.
            weights -= config.vocab_size * config.hidden_size * self.run.dtype.itemsize
        page = engine.memory_plan.page_bytes / engine.memory_plan.block_size
        for count in seats:
            with self.run.case(f"decodes, {self.shape}", side=side, requests=count):
                prompts = random_prompts(count, self.prompt_len, self.shape, 1)
                taken = decode_seconds(engine, prompts, self.steps)
                least = (weights + count * self.prompt_len * page) / self.bytes_rate
                ms, other = 1e3 * taken, self.generate_ms.get(count, 0.0)
                cells = {"ms": ms, "tokens_per_s": count / taken, "least_ms": 1e3 * least}
                cells |= {"of_ceiling": least / taken}
                cells |= {"generate_ms": other, "times_generate": other / ms}
                self.run.row(f"decodes, {self.shape}", side=side, requests=count, **cells)

    def prefills(self, engine: LLMEngine, side: str, lengths: Sequence[int]) -> None:
        """Measure the time to the first token, of new prompts and of half-cached ones."""
        config, hidden, layers = self.config, self.config.hidden_size, self.config.num_hidden_layers
        kv = hidden * _SHAPES[self.shape][4] // _SHAPES[self.shape][3]
        per_layer = hidden * (2 * hidden + 2 * kv + 3 * config.intermediate_size)
        for length in lengths:
            with self.run.case(f"prefills, {self.shape}", side=side, prompt=length):
                new, half = self._prefill_seconds(engine, length)
                # Matrix products of every token, and the two of causal attention.
                work = layers * (2 * length * per_layer + 2 * length * length * hidden)
                ms, other = 1e3 * new, self.forward_ms.get(length, 0.0)
                cells = {"ms": ms, "tokens_per_s": length / new, "half_cached_ms": 1e3 * half}
                cells |= {"of_ceiling": work / new / self.product_rate}
                cells |= {"forward_ms": other, "times_forward": other / ms}
                self.run.row(f"prefills, {self.shape}", side=side, prompt=length, **cells)

    def _prefill_seconds(self, engine: LLMEngine, length: int) -> tuple[float, float]:
        """Measure seconds of a new prompt, and of one whose first half is cached."""
        first, second = list[float](), list[float]()
        for seed in range(4):
            prompt, other = random_prompts(2, length, self.shape, 100 + seed)
            ids = prompt.prompt_token_ids[: length // 2] + other.prompt_token_ids[length // 2 :]
            half = TokensPrompt(ids)
            for given, taken in ((prompt, first), (half, second)):
                started = time.perf_counter()
                (output,) = engine.generate([given], greedy(1))
                taken.append(time.perf_counter() - started)
            if output.num_cached_tokens < length // 2 // 16 * 16:
                raise AssertionError(f"only {output.num_cached_tokens} tokens were cached")
        return statistics.median(first[1:]), statistics.median(second[1:])


def throughput(run: Run, shape: str) -> None:
    shape = "tiny" if run.small else shape
    bound = Throughput(run, shape)
    with run.case("transformers"):
        bound.of_transformers()
    last, first = bound.seats[-2:], bound.lengths[:1]
    sides: dict[str, tuple[dict[str, bool], Sequence[int], Sequence[int]]] = {
        "not mirrored": ({"mirrors": False}, bound.seats, bound.lengths),
        "mirrored": ({}, last, first),
        "eager, not mirrored": ({"mirrors": False, "enforce_eager": True}, last, ()),
    }
    for side, (changes, seats, lengths) in sides.items():
        with run.case("engine", side=side), random_engine(run, shape, **changes) as engine:
            bound.decodes(engine, side, seats)
            bound.prefills(engine, side, lengths)
            if run.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(run.device) / 2**30
                run.row("memory", side=side, peak_gib=peak, attention=engine.memory_plan.attention)


def profile(run: Run) -> None:
    """Profile one step of 64 decodes of the smaller shape."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    shape, count = ("tiny", 2) if run.small else ("0.5b", 64)
    with random_engine(run, shape, mirrors=False) as engine:
        for index, prompt in enumerate(random_prompts(count, 16, shape, 3)):
            engine.add_request(str(index), prompt, greedy(64))
        for _ in range(8):
            engine.step()
        run.row("one step", what="waits", value=_count_waits(run, engine))
        kinds = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profiled(activities=kinds) as found:
            started = time.perf_counter()
            engine.step()
            run.row("one step", what="ms with the profiler", value=1e3 * _since(started))
        _report_profile(run, found)
        for index in range(count):
            engine.abort(str(index))


def _since(started: float) -> float:
    return time.perf_counter() - started


def _count_waits(run: Run, engine: LLMEngine) -> int:
    """Count the device synchronizations of a step that torch reports."""
    if run.device.type != "cuda":
        engine.step()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        run.row(
            "waits", file=f"{Path(each.filename).name}:{each.lineno}", said=str(each.message)[:80]
        )
    return len(caught)


def _report_profile(run: Run, found: Any) -> None:
    kernels = [e for e in found.events() if e.device_type.name == "CUDA"]
    if kernels:
        busy = sum(e.time_range.elapsed_us() for e in kernels)
        first = min(e.time_range.start for e in kernels)
        span = max(e.time_range.end for e in kernels) - first
        run.row("one step", what="kernels and copies", value=len(kernels))
        run.row("one step", what="ms busy", value=busy / 1e3)
        run.row(
            "one step", what="ms idle between the first and the last", value=(span - busy) / 1e3
        )
    key = "self_device_time_total" if kernels else "self_cpu_time_total"
    ranked = sorted(found.key_averages(), key=lambda each: -getattr(each, key))
    for each in [each for each in ranked if getattr(each, key) > 0][:15]:
        run.row("where its time goes", name=each.key[:90], calls=each.count, us=getattr(each, key))


def _answers(engine: LLMEngine, prompts: Sequence[Prompt], num_tokens: int) -> list[Any]:
    outputs = engine.generate(prompts, greedy(num_tokens))
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return [output.outputs[0] for output in outputs]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative distance over all elements."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float((ours - theirs).norm() / theirs.norm())


def parity(run: Run) -> None:
    names = ["qwen2"] if run.small else ["qwen2-medium", "llama-medium", "gemma3", "mixtral"]
    dtypes = [torch.float32] if run.small else [torch.float32, torch.bfloat16]
    for name in names:
        for dtype in dtypes:
            with run.case("parity", model=name, dtype=str(dtype)):
                _compare_with_transformers(run, name, dtype)


@torch.inference_mode()
def _compare_with_transformers(run: Run, name: str, dtype: torch.dtype) -> None:
    folder = resolve_model(f"seeded:{name}")
    name_of: Any = str(dtype).removeprefix("torch.")
    config = EngineConfig(model=folder, device=str(run.device), dtype=name_of, num_blocks=64)
    prompt = TokensPrompt(tuple(range(5, 69)))
    engine = LLMEngine(config)
    (answer,) = _answers(engine, [prompt], 16)
    engine.close()
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=each).eval().to(place)
        for each, place in ((dtype, run.device), (torch.float32, "cpu"))
    ]
    rows = []
    for model in models:
        ids = torch.tensor([prompt.prompt_token_ids + answer.token_ids[:-1]], device=model.device)
        rows.append(model(ids, output_hidden_states=True).hidden_states[-1][0])
    ids = torch.tensor([prompt.prompt_token_ids], device=run.device)
    written = _generated(models[0], ids, 16)[0].tolist()
    same = [a == b for a, b in zip(answer.token_ids, written, strict=True)]
    ours, theirs = _distance(answer.tensors["hidden_states"], rows[1]), _distance(*rows)
    equal = f"{(*same, False).index(False)} of 16"
    cells = {"ours": ours, "transformers": theirs, "equal_tokens": equal}
    run.row("parity", model=name, dtype=str(dtype), **cells)


def families(run: Run) -> None:
    names = ["qwen2", "bert"] if run.small else list(TRIALS)
    for name in names:
        trial = TRIALS[name]
        if trial.prompt is None:
            continue  # a talker needs a thinker's rows: the part verify runs it
        with run.case("families", family=name):
            here, there = (_trial_rows(trial, place) for place in ("cpu", str(run.device)))
            apart = max((_distance(there[1][k], here[1][k]) for k in here[1]), default=0.0)
            cells = {"equal_tokens": here[0] == there[0], "apart": apart, "seconds": there[2]}
            run.row("families", family=name, **cells)


def _trial_rows(trial: Trial, place: str) -> tuple[list[Any], dict[str, Tensor], float]:
    """Run a family's trial on a device; return its tokens, tensors and seconds."""
    started = time.perf_counter()
    assert trial.prompt is not None
    prompt = trial.prompt()
    engine = trial.engine(resolve_model(f"seeded:{trial.seeded}"), place, block_size=16)
    try:
        if isinstance(engine, LLMEngine):
            prompts = [prompt, prompt * 8] if isinstance(prompt, str) else [prompt]
            found = _answers(engine, prompts, 8)
            pairs = [(i, *pair) for i, each in enumerate(found) for pair in each.tensors.items()]
            tokens, tensors = [e.token_ids for e in found], {f"{n} {i}": t for i, n, t in pairs}
            return tokens, tensors, _since(started)
        engine.add_request("x", prompt)
        output = None
        while output is None or not output.finished:
            (output,) = engine.step()
        if isinstance(output, GeneratorOutput):
            assert output.waveform is not None, output.error
            return [], {"waveform": output.waveform.samples}, _since(started)
        return [], dict(output.tensors), _since(started)
    finally:
        engine.close()


def tests(run: Run) -> None:
    """Run the tests marked ``gpu``, with at most 8 workers."""
    if run.device.type != "cuda":
        run.row("tests", name="all", outcome="skipped: they need a CUDA device")
        return
    files = [
        str(file)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text("utf-8")
    ]
    results = run.file.with_suffix(".xml")
    workers = str(min(8, os.cpu_count() or 1))
    # Warnings of other versions of Python or torch are not of interest here.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", *files]
    command += ["-n", workers, "-p", "no:cacheprovider", f"--junitxml={results}"]
    subprocess.run(command, cwd=ROOT, check=False)
    report_tests(run, results)


def report_tests(run: Run, results: Path) -> None:
    """Report the counts and failures of pytest's JUnit file."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [(case, case.find(kind)) for case in cases for kind in ("failure", "error")]
    failed = [(case, said) for case, said in failed if said is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(failed) - skipped, "failed": len(failed)}
    run.row("tests", **counts, skipped=skipped)
    for case, said in failed[:40]:
        message = "" if said is None else said.get("message", "")
        run.row("failed tests", name=case.get("name"), said=message[:300])


_PIPELINES = ("two_step", "encode_then_generate", "omni_speech", "qwen3_omni_seeded")


def verify_pipelines(run: Run) -> None:
    """Verify caching on the shipped pipelines with ``device: cpu``, on the given device."""
    # At least 16 tokens, so that there is a block to hit.
    texts = [f"Once upon a time, in a {place} by the sea, a clock told" for place in ("hut", "inn")]
    chats = [ChatPrompt(({"role": "user", "content": text},)) for text in texts]
    for name in _PIPELINES[: 1 if run.small else None]:
        with run.case("verify", pipeline=name), TemporaryDirectory() as folder:
            text = (ROOT / "stage_configs" / f"{name}.yaml").read_text("utf-8")
            file = Path(folder, f"{name}.yaml")
            file.write_text(text.replace("device: cpu", f"device: {run.device}"), "utf-8")
            started = time.perf_counter()
            with Omni(str(file)) as omni:
                report = verify(omni, chats if "omni" in name else texts)
            cells = {"equal": report.equal, "hits": report.has_hits, "seconds": _since(started)}
            ties, failed = len(report.near_ties), len(report.failures)
            run.row("verify", pipeline=name, **cells, near_ties=ties, failed=failed)
            for line in [] if report.equal and not report.failures else report.lines()[:20]:
                run.row("what verify says", pipeline=name, line=line)


PARTS: Mapping[str, Callable[[Run], None]] = {
    "device": device,
    "throughput-0.5b": partial(throughput, shape="0.5b"),
    "throughput-7b": partial(throughput, shape="7b"),
    "profile": profile,
    "parity": parity,
    "families": families,
    "tests": tests,
    "verify": verify_pipelines,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    file = args.folder / f"{args.part}.jsonl"
    PARTS[args.part](Run(args.device, file, time.monotonic() + args.seconds, args.small))


if __name__ == "__main__":
    main()
