"""Decoders equal transformers: tokens, hidden states and logits, through the whole engine.

Prompts run in chunks with decodes, in mixed batches, twice: the second time from the cache.
Pages hold NaN until they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from engine import EmbedsPrompt, EngineConfig, LLMEngine, Prompt, SamplingParams, TokensPrompt
from omni.seeded.language_models import build_causal_lm
from prefix_cache import SlidingWindowSpec
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.greedy_reference import GreedyAnswer, GreedyReference, assert_greedy
from tests.support.native_kernels import needs_kernels

SLIDING, FULL = "sliding_attention", "full_attention"
# Larger than the larger block, and not a multiple of either.
WINDOW = 18
# Shorter and longer than a block, the window, several windows, and a chunk of a recurrent scan.
PROMPT_LENGTHS = (1, 5, 16, 17, 40, 75, 130)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALED: dict[str, Any] = {
    FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
# Caps low enough to change these small scores and logits.
LOW_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
UNTIED, SLIDES, KEY_HEAD = (
    {"tie_word_embeddings": False},
    {"sliding_window": WINDOW},
    {"num_key_value_heads": 1},
)
SLIDES_TOO = {"use_sliding_window": True, **SLIDES}
EXPERTS = {"norm_topk_prob": False, "num_experts_per_tok": 3}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", UNTIED),
    "qwen2 window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen2 sliding upper layers": ("qwen2", {**SLIDES_TOO, "max_window_layers": 1}),
    "qwen2 sliding in all layers": ("qwen2", {**SLIDES_TOO, "max_window_layers": 0, **UNTIED}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, **UNTIED}),
    "qwen3 sliding": (
        "qwen3",
        {**SLIDES_TOO, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 24},
    ),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {**UNTIED, "rope_parameters": LLAMA3}),
    "llama yarn": ("llama", YARN),
    "llama all heads alike": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "mistral": ("mistral", SLIDES),
    "mistral untied": ("mistral", SLIDES | UNTIED),
    "mistral of a wide window": ("mistral", {**UNTIED, "sliding_window": 200}),
    "ministral": ("ministral", SLIDES | UNTIED),
    "ministral all layers": ("ministral", {**SLIDES, "layer_types": [SLIDING] * 3}),
    "gemma2": ("gemma2", SLIDES | LOW_CAPS),
    "gemma2 untied": ("gemma2", {**SLIDES, **UNTIED, "query_pre_attn_scalar": 40}),
    "gemma2 no caps": ("gemma2", {**SLIDES, **NO_CAPS, "attention_bias": True, "head_dim": 24}),
    "gemma3": ("gemma3_text", SLIDES),
    "gemma3 scaled rope": (
        "gemma3_text",
        {**SLIDES, **UNTIED, "final_logit_softcapping": 3.0, "rope_parameters": SCALED},
    ),
    "jamba": ("jamba", UNTIED),
    "jamba tied": ("jamba", {}),
    "jamba without experts": ("jamba", {"num_experts": 1}),
    "jamba with all experts": ("jamba", {"num_experts_per_tok": 4}),
    "jamba with other biases": ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    "jamba with a wide convolution": ("jamba", {"mamba_d_conv": 7, "hidden_act": "gelu"}),
    "jamba all mamba": ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8}),
    "jamba all attention": ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    "qwen3_moe": ("qwen3_moe", UNTIED),
    "qwen3_moe with experts in some layers": (
        "qwen3_moe",
        {**EXPERTS, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "qwen3_moe with experts in every second layer": (
        "qwen3_moe",
        {**SLIDES_TOO, "decoder_sparse_step": 2, "head_dim": 32},
    ),
    "mixtral": ("mixtral", UNTIED),
    "mixtral sliding": ("mixtral", {**SLIDES, "num_experts_per_tok": 1}),
    "bamba": ("bamba", UNTIED),
    "bamba tied, one group": ("bamba", {"mamba_n_groups": 1, "attn_layer_indices": [1, 3]}),
    "bamba with biases": (
        "bamba",
        dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias"), True),
    ),
    "bamba without a bias": ("bamba", {"mamba_conv_bias": False}),
    "bamba with limited steps": ("bamba", {"time_step_limit": (0.3, 0.9)}),
    "bamba all mamba": ("bamba", {"attn_layer_indices": []}),
    "bamba yarn": ("bamba", YARN),
    "qwen3_next": (
        "qwen3_next",
        {"tie_word_embeddings": False, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "qwen3_5": ("qwen3_5_text", UNTIED),
    "qwen3_5 with experts": (
        "qwen3_5_moe_text",
        {"tie_word_embeddings": True, "attention_bias": True},
    ),
    # Dimensions of size 1 change strides, and kernels read those.
    "qwen2 with one head": ("qwen2", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "gemma3 with one head": (
        "gemma3_text",
        {**SLIDES, "num_attention_heads": 1, "num_key_value_heads": 1},
    ),
    "qwen3 with one key head": ("qwen3", KEY_HEAD),
    "llama with one key head": ("llama", KEY_HEAD),
    "ministral with one key head": ("ministral", SLIDES | KEY_HEAD),
    "gemma2 with one key head": ("gemma2", SLIDES | KEY_HEAD),
    "jamba with one key head": ("jamba", UNTIED | KEY_HEAD),
    "bamba with one key head": ("bamba", UNTIED | KEY_HEAD),
}


# Four layers include each kind.
FOUR_LAYERS = ("jamba", "bamba", "qwen3_next", "qwen3_5")


def build(folder: Path, name: str, **options: Any) -> str:
    family, settings = VARIANTS[name]
    num_layers = 4 if family.startswith(FOUR_LAYERS) else 3
    given: dict[str, Any] = {"num_hidden_layers": num_layers, "with_tokenizer": False}
    return str(build_causal_lm(folder, family, **(given | settings | options)))


@dataclass(frozen=True)
class Variant:
    """A checkpoint, and transformers' hidden states and logits for ids in one pass."""

    folder: str
    theirs: Any
    pass_over: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Variant]:
    @cache
    def make(name: str) -> Variant:
        folder = build(tmp_path_factory.mktemp("decoder"), name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

        @cache  # every engine is compared with it
        @torch.inference_mode()
        def pass_over(ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            return output.hidden_states[-1][0], output.logits[0]

        return Variant(folder, model, pass_over)

    return make


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)
    return [
        tuple(torch.randint(10, 700, (length,), generator=generator).tolist())
        for length in PROMPT_LENGTHS
    ]


def engine_of(folder: str, **settings: Any) -> LLMEngine:
    """Build an engine whose pages hold NaN, except for the null page."""
    usual = {"max_num_seqs": 4, "max_model_len": 160, "num_blocks": 400, "block_size": 4}
    engine = LLMEngine(EngineConfig.model_validate({"model": folder} | usual | settings))
    memory = engine._runner._memory
    memory.buffer[memory.config.large_page_bytes :] = 0xFF
    return engine


def generate(engine: LLMEngine, ids: Sequence[tuple[int, ...]], params: Any = GREEDY) -> Any:
    outputs = engine.generate([TokensPrompt(each) for each in ids], params)
    assert [output.error for output in outputs] == [None] * len(ids)
    engine.check_integrity()
    return outputs


WAYS = ((4, 9, "torch"), (1, 4096, "torch"), (16, 64, "native"))
NATIVE = WAYS[2:]


def ways_of(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return all ways for a family's first variant, and one each in turn for the others."""
    names = [each for each in VARIANTS if VARIANTS[each][0] == VARIANTS[name][0]]
    place = names.index(name)
    return WAYS if not place else NATIVE if " one " in name else (WAYS[place % len(WAYS)],)


@pytest.mark.shows("parity", "hidden states", "prefix hits")
@pytest.mark.parametrize(
    ("name", "block_size", "budget", "backend"),
    [
        pytest.param(name, *way, marks=needs_kernels if way in NATIVE else ())
        for name in VARIANTS
        for way in ways_of(name)
    ],
)
def test_tokens_hidden_states_and_logits_equal_transformers(
    variant: Callable[[str], Variant], name: str, block_size: int, budget: int, backend: str
) -> None:
    expected = variant(name)
    engine = engine_of(
        expected.folder,
        block_size=block_size,
        num_blocks=1600 // block_size,
        max_num_batched_tokens=budget,
        attention_backend=backend,
    )
    said: set[tuple[int, ...]] = set()
    for _ in range(2):
        outputs = generate(engine, prompts())
        for ids, output in zip(prompts(), outputs, strict=True):
            token_ids = output.outputs[0].token_ids
            rows, logits = expected.pass_over((*ids, *token_ids[:-1]))
            found = output.outputs[0].tensors["hidden_states"]
            # With experts after 130 tokens, transformers itself differs by 1.1e-4 from its own
            # float64 on some machines, this engine by 5e-5.
            torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-5)
            found = engine._runner._model.compute_logits(found)
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-5)
            assert_greedy_choices(logits[len(ids) - 1 :], token_ids)
            said.add(token_ids)
    assert outputs[-1].num_cached_tokens == (PROMPT_LENGTHS[-1] - 1) // block_size * block_size
    assert len(said) >= len(PROMPT_LENGTHS), "answers that do not depend on prompts show little"


WINDOWED = [name for name, (_, settings) in VARIANTS.items() if WINDOW in settings.values()]


@pytest.mark.parametrize("name", WINDOWED)
def test_the_layers_that_slide_are_those_of_transformers_and_the_window_matters(
    variant: Callable[[str], Variant], name: str
) -> None:
    """Otherwise nothing here would show that the window is applied."""
    expected = variant(name)
    theirs = expected.theirs
    layers = theirs.get_decoder().layers
    windows = [
        # Some layers have no such attribute: all of them follow the config.
        WINDOW
        if theirs.config.model_type in ("mistral", "mixtral")
        else layer.self_attn.sliding_window
        for layer in layers
    ]
    engine = engine_of(expected.folder)
    specs = [layer.spec for layer in engine._runner._model.attention_layers]
    assert windows == [
        spec.window if isinstance(spec, SlidingWindowSpec) else None for spec in specs
    ]
    wide = AutoModelForCausalLM.from_pretrained(
        expected.folder, dtype=torch.float32, sliding_window=1000
    )
    ids = torch.tensor([prompts()[-1]])
    with torch.inference_mode():
        apart = (wide(ids).logits - theirs(ids).logits)[0].abs().amax(dim=1)
    assert apart[:WINDOW].max() < 1e-4 and apart[WINDOW:].max() > 1e-2


@needs_kernels
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_prompts_longer_than_many_windows_in_long_chunks(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, name)
    engine = engine_of(
        folder, max_model_len=700, max_num_batched_tokens=300, attention_backend="native"
    )
    ids = torch.randint(0, 768, (680,), generator=torch.Generator().manual_seed(5))
    (output,) = generate(engine, [tuple(ids.tolist())], SamplingParams(max_tokens=0))
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).last_hidden_state[0]
    hidden = output.outputs[0].tensors["hidden_states"]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2 untied", "qwen3 with biases", "llama 3 rope", "mistral untied", "ministral"),
        *("gemma2 untied", "gemma3 scaled rope", "jamba", "bamba", "mixtral"),
        "qwen3_moe",
    ],
)
def test_a_headless_checkpoint_gives_hidden_states(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, name, with_head=False)
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 768, (40,), generator=torch.Generator().manual_seed(5))
    (output,) = generate(engine_of(folder), [tuple(ids.tolist())], SamplingParams(max_tokens=0))
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).last_hidden_state[0]
    hidden = output.outputs[0].tensors["hidden_states"]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [8, 64])
def test_embeddings_and_token_ids_share_a_batch(
    variant: Callable[[str], Variant], budget: int
) -> None:
    """The embeddings are not rows of the table, so no token ids could replace them."""
    folder = variant("llama 3 rope").folder
    reference = GreedyReference(folder)
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(n, 64, generator=generator) for n in (1, 30, 9)]
    embeds = [(EmbedsPrompt(each), reference.from_embeds(each, NUM_TOKENS)) for each in rows]
    tokens = [(TokensPrompt(ids), reference.from_ids(ids, NUM_TOKENS)) for ids in prompts()[1:5:3]]
    mixed: list[tuple[Prompt, GreedyAnswer]] = [tokens[0], *embeds[:2], tokens[1], embeds[2]]
    engine = engine_of(folder, max_num_batched_tokens=budget, max_num_seqs=8)
    for repetition in range(2):
        outputs = engine.generate([prompt for prompt, _ in mixed], GREEDY)
        for output, (_, answer) in zip(outputs, mixed, strict=True):
            completion = output.outputs[0]
            assert_greedy(answer, completion.token_ids)
            torch.testing.assert_close(
                completion.tensors["hidden_states"], answer.hidden_states, atol=1e-4, rtol=0
            )
            if repetition:
                assert output.num_cached_tokens == (output.num_prompt_tokens - 1) // 4 * 4


def test_biased_and_penalised_tokens_of_one_batch_are_those_of_transformers(
    variant: Callable[[str], Variant],
) -> None:
    folder = variant("qwen2").folder
    reference = GreedyReference(folder)
    choices = [(0.0, 1.0), (2.0, 1.0), (0.5, 1.5), (0.0, 1.3), (100.0, 0.8), (5.0, 2.0)]
    given, params, answers, num_changed = prompts()[: len(choices)], [], [], 0
    for prompt, (strength, penalty) in zip(given, choices, strict=True):
        plain = reference.from_ids(prompt, NUM_TOKENS).token_ids
        # Positive and negative biases on the greedy tokens, which the penalty also changes.
        bias = {token_id: strength * (-1) ** place for place, token_id in enumerate(plain)}
        changes = {"repetition_penalty": penalty, "logit_bias": bias if strength else {}}
        params.append(SamplingParams(**GREEDY.model_dump() | changes))
        options: dict[str, Any] = {"repetition_penalty": penalty}
        if strength:
            options["sequence_bias"] = {(token_id,): value for token_id, value in bias.items()}
        answers.append(reference.from_ids(prompt, NUM_TOKENS, **options))
        num_changed += answers[-1].token_ids != plain
    assert num_changed >= 4
    outputs = generate(engine_of(folder, max_num_seqs=6), given, params)
    for output, answer in zip(outputs, answers, strict=True):
        assert_greedy(answer, output.outputs[0].token_ids)
