"""BART, T5, Whisper and Mllama against transformers with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import LayerOps, NativeLayerOps
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderDecoderModel
from engine.models.mllama.mllama import MllamaModel
from engine.models.model_loader import find_family, load_model
from engine.models.seq2seq.seq2seq import relative_buckets
from engine.native import load_kernels
from engine.requests.encoder_input import EncoderInput, EncoderView
from omni.seeded.encoder_decoders import build_bart, build_mllama, build_t5, build_whisper
from prefix_cache import CrossAttentionSpec
from tests.support.encoder_decoder_reference import EncoderDecoderReference, assert_greedy_choices
from tests.support.encoder_decoder_run import EncoderDecoderRun, generate
from tests.support.encoder_inputs import image_input, speech_input, text_input
from tests.support.examples import examples
from tests.support.native_kernels import needs_kernels

FAMILIES = ("bart", "t5", "t5-gated", "whisper", "mllama")
NUM_TOKENS = 10
Builder = Callable[..., Path]

VARIANTS: dict[str, tuple[Builder, dict[str, Any]]] = {
    "bart scaled, of uneven halves": (
        build_bart,
        {
            "scale_embedding": True,
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 96,
            "activation_function": "relu",
        },
    ),
    "t5 of uneven halves": (build_t5, {"num_decoder_layers": 3, "num_layers": 1}),
    "t5 with few buckets": (
        build_t5,
        {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9},
    ),
    "t5 gated by silu, with long distances": (
        build_t5,
        {"feed_forward_proj": "gated-silu", "relative_attention_max_distance": 128},
    ),
    "whisper of uneven halves": (build_whisper, {"decoder_layers": 1, "decoder_ffn_dim": 64}),
    "mllama with llama3 rope": (
        build_mllama,
        {
            "cross_attention_layers": [0, 2],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}


@dataclass(frozen=True)
class Family:
    """A checkpoint here and in transformers, with requests for it.

    Attributes:
        decoded: hidden states and logits that transformers has for the ids of one of the requests.
    """

    folder: str
    model: EncoderDecoderModel
    reference: EncoderDecoderReference
    entries: Sequence[EncoderInput | None]
    prompts: Sequence[Sequence[int]]
    decoded: Callable[[int, tuple[int, ...]], tuple[Tensor, Tensor]]


def load(folder: str | Path, **options: Any) -> EncoderDecoderModel:
    chosen: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 128,
    }
    model = load_model(Checkpoint.open(folder), ModelSettings(**(chosen | options)))
    assert isinstance(model, EncoderDecoderModel)
    return model


def family_of(folder: str) -> Family:
    """Encoder inputs and prompts of mixed lengths; default prompts and longer ones."""
    model, reference = load(folder), EncoderDecoderReference(folder)
    kind = reference.config.model_type
    prompts: list[list[int]] = [[2, 0], [2, 0, 51, 178, 2, 60, 61], [2], [2, 0, 9, 8, 7, 33, 5]]
    entries: list[EncoderInput | None] = [text_input(n, seed=n) for n in (3, 17, 1, 30)]
    if kind == "whisper":
        entries = [speech_input(seed=seed) for seed in range(4)]
    if isinstance(model, MllamaModel):
        image = model.image_token_id
        sizes = ((50, 50), (110, 50), (100, 110))
        images = [image_input(folder, *size, seed=i) for i, size in enumerate(sizes)]
        entries = [images[0], images[1], None, images[2]]
        prompts = [
            [0, image, 5, 6],
            [0, 50, 51, 52, 53, image, 7],
            [0, 60, 61, 62, 63],
            [image, 40, 41],
        ]

    @cache  # backends and schedules are compared with the same
    def decoded(number: int, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return reference.decode(entries[number], ids)

    return Family(folder, model, reference, entries, prompts, decoded)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Family:
    return family_of(seeded(request.param))


def inputs_of(family: Family) -> list[EncoderInput]:
    return [entry for entry in family.entries if entry is not None]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


def assert_parity(family: Family, model: EncoderDecoderModel, **options: Any) -> None:
    """Greedy tokens, hidden states and logits of requests that start one after the other."""
    tokens, hidden = generate(model, family.entries, family.prompts, NUM_TOKENS, **options)
    requests = zip(family.prompts, tokens, hidden, strict=True)
    for number, (prompt, ids, rows) in enumerate(requests):
        expected, logits = family.decoded(number, tuple(ids[:-1]))
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(model.compute_logits(rows), logits, atol=1e-4, rtol=1e-5)
        assert_greedy_choices(logits[len(prompt) - 1 :], ids[len(prompt) :])


@torch.inference_mode()
def test_encoder_rows_equal_transformers_alone_and_in_a_padded_batch(family: Family):
    inputs = inputs_of(family)
    expected = [family.reference.encode(entry) for entry in inputs]
    assert [len(rows) for rows in expected] == [entry.num_tokens for entry in inputs]
    alone = [family.model.encode([entry]) for entry in inputs]
    assert_close(alone, expected, atol=1e-5)
    batch = family.model.encode(inputs)
    assert batch.shape[1] == family.model.encoder_hidden_size
    assert_close(batch.split([entry.num_tokens for entry in inputs]), expected, atol=1e-4)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "backend", ["torch", "reference", pytest.param("native", marks=needs_kernels)]
)
def test_greedy_tokens_and_hidden_states_equal_transformers(
    family: Family, backend: str, block_size: int
):
    ops = NativeLayerOps(load_kernels()) if backend == "native" else LayerOps()
    model = load(family.folder, block_size=block_size, ops=ops)
    assert_parity(family, model, backend=backend)


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_chunks_of_the_decoder_prompt_change_rounding_only(family: Family, chunk: int):
    assert_parity(family, family.model, chunk=chunk)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path):
    build, options = VARIANTS[name]
    variant = family_of(str(build(tmp_path, **options)))
    assert_parity(variant, variant.model)


def test_a_batch_gives_each_request_what_it_gets_alone(family: Family):
    _, together = generate(family.model, family.entries, family.prompts, NUM_TOKENS)
    alone = [
        generate(family.model, [entry], [prompt], NUM_TOKENS)[1][0]
        for entry, prompt in zip(family.entries, family.prompts, strict=True)
    ]
    assert_close(together, alone, atol=5e-5)


def test_every_token_depends_on_the_encoder_input(family: Family):
    """From the image on, in Mllama: only there does the first image layer look at it."""
    entry, prompt = family.entries[0], family.prompts[0]
    assert entry is not None
    features = {
        name: feature.flip(-1) if feature.is_floating_point() else feature
        for name, feature in entry.features.items()
    }
    other = replace(entry, features=features, token_ids=entry.token_ids[::-1])
    runs = [EncoderDecoderRun(family.model, [e], [prompt], [9]) for e in (entry, other)]
    hidden, changed = (run.step([prompt])[0] for run in runs)
    assert (hidden - changed).abs().amax(dim=1).min() > 1e-3


def test_keys_and_values_of_the_encoder_are_enough_after_its_step(family: Family):
    """The encoder never runs again, and nothing of it is kept outside the pages."""
    model = family.model
    calls: list[EncoderInput] = []

    class Counting(torch.nn.Module):
        def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
            calls.extend(inputs)
            rows: Tensor = encoder(inputs)
            return rows

    encoder = model.encoder
    counting: Any = Counting()
    counting.check_input = encoder.check_input
    counting.max_len = encoder.max_len
    if isinstance(model, MllamaModel):
        counting.num_image_rows = model.encoder.num_image_rows
    model.encoder = counting
    try:
        generate(model, family.entries, family.prompts, NUM_TOKENS)
    finally:
        model.encoder = encoder
    assert calls == inputs_of(family)


@settings(max_examples=examples(15))
@given(data=st.data())
def test_any_schedule_gives_the_same_hidden_states(family: Family, data: st.DataObject):
    generator = torch.Generator().manual_seed(5)
    sequences = [
        [*prompt, *torch.randint(5, 700, (6,), generator=generator).tolist()]
        for prompt in family.prompts
    ]
    lens = [len(ids) for ids in sequences]
    run = EncoderDecoderRun(family.model, family.entries, family.prompts, lens)
    hidden: list[list[Tensor]] = [[] for _ in sequences]
    while run.done != lens:
        rest = [end - done for end, done in zip(lens, run.done, strict=True)]
        counts = [data.draw(st.integers(0, min(n, 5))) for n in rest]
        if not any(counts):
            counts = [min(n, 1) for n in rest]
        chunks = [
            ids[done : done + n] for ids, done, n in zip(sequences, run.done, counts, strict=True)
        ]
        for r, rows in enumerate(run.step(chunks)):
            hidden[r].append(rows)
    expected = [family.decoded(number, tuple(ids))[0] for number, ids in enumerate(sequences)]
    assert_close([torch.cat(rows) for rows in hidden], expected, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])
def test_weights_are_held_once(name: str, seeded: Callable[[str], str]):
    """Also the embedding, at which encoder, decoder and head look.

    Whisper's keys have no biases; ours have zeros, because queries and values have biases.
    """
    reference = EncoderDecoderReference(seeded(name))
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in reference.model.state_dict().values()}
    assert load(seeded(name), pack_weights=False).weight_nbytes == sum(stored.values())


def test_every_layer_keeps_its_own_tokens_or_the_encoders(family: Family):
    specs = [layer.spec for layer in family.model.attention_layers]
    num_cross = sum(isinstance(spec, CrossAttentionSpec) for spec in specs)
    assert 0 < num_cross < len(specs)
    assert len(set(specs)) == 2
    names = [layer.layer_name for layer in family.model.attention_layers]
    assert len(set(names)) == len(names)
    # The group whose blocks mirror the stage outputs comes first.
    assert not isinstance(specs[0], CrossAttentionSpec)


def test_limits_are_those_of_the_config(seeded: Callable[[str], str]):
    limits = {}
    for name in FAMILIES:
        checkpoint = Checkpoint.open(seeded(name))
        longest = find_family(checkpoint).max_positions(checkpoint.config)
        limits[name] = (longest, load(seeded(name)).max_encoder_len)
    assert limits == {
        "bart": (256, 256),
        "t5": (512, 512),
        "t5-gated": (512, 512),
        "whisper": (128, 100),
        "mllama": (512, 68),
    }


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (6, 9), (64, 512)])
def test_relative_buckets_are_those_of_transformers(num_buckets: int, max_distance: int):
    distances = torch.arange(max_distance + 50)
    expected = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    buckets = relative_buckets(num_buckets, max_distance)
    # What lies beyond the table takes its last column.
    assert torch.equal(buckets[distances.clamp(max=max_distance)], expected)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_head_that_differs_from_the_embedding_is_a_head_of_its_own(tmp_path: Path):
    """T5 1.1 stores one, although transformers' config says that all T5s are tied."""

    def add_head(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["shared.weight"].flip(0).contiguous()

    folder = rewrite(build_t5(tmp_path, gated=True), add_head)
    own_head = family_of(folder)
    assert_parity(own_head, own_head.model)


@pytest.mark.parametrize(
    "name", ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
)
def test_embedding_is_found_under_any_of_its_names(name: str, tmp_path: Path):
    def rename(weights: dict[str, Tensor]) -> None:
        weights[name] = weights.pop("model.shared.weight")

    plain = load(build_bart(tmp_path / "plain"))
    renamed = load(rewrite(build_bart(tmp_path / "renamed"), rename))
    entries, prompts = [text_input(9)], [[2, 0, 7]]
    _, expected = generate(plain, entries, prompts, 3)
    _, hidden = generate(renamed, entries, prompts, 3)
    assert torch.equal(hidden[0], expected[0])


def test_head_alone_is_the_embedding_too(tmp_path: Path):
    def rename(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights.pop("model.shared.weight")

    renamed = family_of(rewrite(build_bart(tmp_path), rename))
    assert_parity(renamed, renamed.model)


def test_bart_without_a_bias_on_its_logits(tmp_path: Path):
    def drop(weights: dict[str, Tensor]) -> None:
        del weights["final_logits_bias"]

    bare = family_of(rewrite(build_bart(tmp_path), drop))
    assert_parity(bare, bare.model)


def test_missing_weights_are_named(tmp_path: Path):
    def drop(weights: dict[str, Tensor]) -> None:
        del weights["encoder.final_layer_norm.weight"], weights["shared.weight"]

    folder = rewrite(build_t5(tmp_path), drop)
    with pytest.raises(ValueError, match=r"lacks the weights shared\.weight, encoder\.final"):
        load(folder)


def test_t5_refuses_float16(seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="T5 overflows in float16"):
        load(seeded("t5"), dtype=torch.float16)


BAD_TEXTS = {
    "empty": (EncoderInput(0, b""), "has 0 tokens; this model takes 1 to 256"),
    "too long": (text_input(257), "has 257 tokens; this model takes 1 to 256"),
    "beyond the vocabulary": (EncoderInput(2, b"", token_ids=(4, 768)), "must be 0 to 767"),
    "negative": (EncoderInput(2, b"", token_ids=(-1, 4)), "must be 0 to 767"),
    "miscounted": (EncoderInput(3, b"", token_ids=(5, 4)), "gives 2 rows .* num_tokens=3"),
    "speech": (speech_input(), "encodes text, got an encoder input with input_features"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_text_encoder_says_what_is_wrong(case: str, seeded: Callable[[str], str]):
    entry, message = BAD_TEXTS[case]
    model = load(seeded("bart"))
    for check in (lambda: model.encoder_view(entry, [2, 0]), lambda: model.encode([entry])):
        with pytest.raises(ValueError, match=message):
            check()


BAD_SPEECH = {
    "text": (text_input(100), "takes input_features"),
    "short": (speech_input(num_rows=99), r"must be \(16, 200\) .* got \(16, 198\)"),
    "other bins": (speech_input(mel_bins=80), r"must be \(16, 200\) .* got \(80, 200\)"),
    "miscounted": (replace(speech_input(), num_tokens=99), "gives 100 rows .* num_tokens=99"),
}


@pytest.mark.parametrize("case", BAD_SPEECH)
def test_speech_encoder_says_what_is_wrong(case: str, seeded: Callable[[str], str]):
    entry, message = BAD_SPEECH[case]
    with pytest.raises(ValueError, match=message):
        load(seeded("whisper")).encoder_view(entry, [2])


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_encoder_input_is_required(name: str, seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="needs an input for its encoder"):
        load(seeded(name)).encoder_view(None, [2])


def test_all_tokens_see_all_rows_of_text_and_speech(seeded: Callable[[str], str]):
    assert load(seeded("bart")).encoder_view(text_input(9), [2, 0]) == EncoderView(0, 9, 9)


@pytest.fixture(scope="module")
def mllama(seeded: Callable[[str], str]) -> MllamaModel:
    model = load(seeded("mllama"))
    assert isinstance(model, MllamaModel)
    return model


def test_tokens_see_the_tiles_of_the_image_from_its_place_on(
    mllama: MllamaModel, seeded: Callable[[str], str]
):
    image = mllama.image_token_id
    entry = image_input(seeded("mllama"), 110, 50)
    assert int(entry.features["aspect_ratio_mask"].sum()) == 2
    assert mllama.encoder_view(entry, [0, 9, image, 5]) == EncoderView(2, 68, 2 * 17)
    assert mllama.encoder_view(None, [0, 9]) == EncoderView(512, 0, 0)


@pytest.mark.parametrize(("has_image", "num_places"), [(True, 0), (True, 2), (False, 1)], ids=str)
def test_one_image_has_one_place(
    has_image: bool, num_places: int, mllama: MllamaModel, seeded: Callable[[str], str]
):
    entry = image_input(seeded("mllama"), 50, 50) if has_image else None
    prompt = [0, *[mllama.image_token_id] * num_places]
    with pytest.raises(ValueError, match=f"has {num_places} image tokens"):
        mllama.encoder_view(entry, prompt)


def test_image_encoder_says_what_is_wrong(mllama: MllamaModel, seeded: Callable[[str], str]):
    good = image_input(seeded("mllama"), 110, 50)

    def with_feature(name: str, value: Tensor) -> EncoderInput:
        return replace(good, features={**good.features, name: value})

    two_images = good.features["pixel_values"].repeat(2, 1, 1, 1, 1)
    cases = {
        "takes the features pixel_values": text_input(68),
        r"pixel_values of one image must be \(1, 4, 3, 56, 56\)": with_feature(
            "pixel_values", two_images
        ),
        "must be ones and then zeros": with_feature(
            "aspect_ratio_mask", torch.tensor([[0, 1, 0, 0]])
        ),
        "aspect_ratio_ids must be 1 to 8, got 0": with_feature(
            "aspect_ratio_ids", torch.tensor([0])
        ),
        "gives 68 rows .* num_tokens=34": replace(good, num_tokens=34),
    }
    for message, entry in cases.items():
        with pytest.raises(ValueError, match=message):
            mllama.encode([entry])
