"""On a GPU: every GPU backend against the reference, over pages full of NaN.

Engines on a GPU are compared with engines on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.attention.metadata import AttentionBackend
from engine.attention.registry import get_backend
from tests.support.attention_steps import BOUNDS, SHAPES, Bounds, Shape, run_cross_step, run_steps
from tests.support.reference_attention import ReferenceBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
BACKENDS = pytest.mark.parametrize("name", ["triton", "xformers", "torch"])


def backend_of(name: str, dtype: torch.dtype, block_size: int) -> AttentionBackend:
    if name != "xformers":
        return get_backend(name, "cuda", dtype, block_size)
    try:
        return get_backend(name, "cuda", dtype, block_size)
    except ValueError as refusal:
        pytest.skip(str(refusal))  # each wheel supports one version of torch and CUDA


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]


@HALF
@BACKENDS
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize(
    "shape", ["prefill", "decodes of very unequal length", "mixed", "few long decodes"]
)
def test_backend_equals_the_reference_on_cuda(
    name: str, dtype: torch.dtype, block_size: int, bounds: Bounds, shape: str
):
    steps = SHAPES[shape].with_block_size(block_size)
    for softcap in (None, 30.0):
        output, memory = run_steps(
            backend_of(name, dtype, block_size), steps, bounds, softcap, dtype=dtype, device="cuda"
        )
        expected, written = run_steps(
            ReferenceBackend(), steps, bounds, softcap, dtype=dtype, device="cuda"
        )
        torch.testing.assert_close(output, expected, atol=tolerance(dtype), rtol=tolerance(dtype))
        assert torch.equal(memory, written)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("num_distances", [None, 33])
def test_triton_equals_the_reference_in_float32(shape: Shape, num_distances: int | None):
    steps = shape.with_block_size(16)
    bias = None
    if num_distances is not None:
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(steps.num_heads, num_distances, generator=generator).cuda()
    backend = backend_of("triton", torch.float32, 16)
    output, _ = run_steps(backend, steps, bias=bias, device="cuda")
    expected, _ = run_steps(ReferenceBackend(), steps, bias=bias, device="cuda")
    torch.testing.assert_close(output, expected, atol=5e-5, rtol=5e-5)


@HALF
@BACKENDS
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "lens",
    [((1, 17, 130), (1, 17, 130)), ((1, 1, 5, 40), (70, 0, 33, 0)), ((1, 1, 1), (1, 65, 300))],
    ids=["encoder", "cross", "cross decodes"],
)
def test_cross_attention_equals_the_reference_on_cuda(
    name: str, dtype: torch.dtype, block_size: int, lens: tuple[tuple[int, ...], tuple[int, ...]]
):
    output, expected = (
        run_cross_step(backend, *lens, block_size, dtype=dtype, device="cuda")
        for backend in (backend_of(name, dtype, block_size), ReferenceBackend())
    )
    torch.testing.assert_close(output, expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@BACKENDS
@pytest.mark.parametrize(
    "family", ["qwen2", "llama", "gemma2", "gemma3", "jamba", "bamba", "t5", "bart"]
)
def test_an_engine_on_cuda_gives_the_tokens_of_one_on_the_cpu(
    seeded: Callable[[str], str], family: str, name: str
):
    if name == "xformers":
        pytest.skip("it takes half types, whose rounding changes tokens of random weights")
    prompts = [TokensPrompt(tuple(range(5, 5 + length))) for length in (3, 18, 40)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for device, backend in (("cuda", name), ("cpu", "torch")):
        config = EngineConfig(
            model=seeded(family),
            num_blocks=128,
            device=device,
            dtype="float32",
            attention_backend=backend,
        )
        outputs = LLMEngine(config).generate(prompts, params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
