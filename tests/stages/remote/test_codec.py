"""Messages survive the way to bytes and back; what is no message is refused."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from pydantic import BaseModel

from engine import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EmbedsPrompt,
    EngineStats,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    ImagePrompt,
    RequestMetrics,
    SamplingParams,
    SpeechPrompt,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    VideoFeatures,
    VideoPrompt,
    Waveform,
)
from engine.media.image_file import open_image
from prefix_cache import EncoderCacheStats, GroupStats, KVCacheStats
from stages.remote.codec import Codec
from stages.stage import Completion, StageOutput, StageRequest

CODEC = Codec()
DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype)
        and str(each)
        in {
            *("torch.float32", "torch.float64", "torch.float16", "torch.bfloat16", "torch.bool"),
            *("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64"),
            *("torch.complex64", "torch.complex128", "torch.float8_e4m3fn", "torch.uint16"),
        }
    },
    key=str,
)


def same(left: Any, right: Any) -> bool:
    """Of the same types all the way down, with the same bits in every number."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and bits(left) == bits(right)
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        left, right = np.asarray(left), np.asarray(right)
        told = [(each.dtype, each.shape, each.tobytes()) for each in (left, right)]
        return told[0] == told[1]
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Image.Image):
        return (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())
    if dataclasses.is_dataclass(left):
        names = [each.name for each in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(message: object) -> Any:
    return CODEC.decode(CODEC.encode(message))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))
    made = flat.view(dtype).view(shape)
    layout = draw(st.sampled_from(["as it is", "transposed", "strided", "expanded"]))
    if layout == "transposed" and made.ndim > 1:
        return made.transpose(0, -1)
    if layout == "strided" and made.ndim:
        return made[::2]
    return made.unsqueeze(0).expand(3, *shape) if layout == "expanded" else made


arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes(endianness="?"),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
texts = st.text(st.characters(exclude_categories=()), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=20)
keys = st.integers() | texts | st.tuples(st.integers(), texts)
plain = st.recursive(
    scalars | tensors() | arrays | st.builds(Path, st.text("ab/ü.", min_size=1)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
ids = st.lists(st.integers(0, 2**31), max_size=8).map(tuple)
media = texts | st.binary() | st.just(Path("a.wav")) | arrays | tensors()
shown = st.dictionaries(texts, st.lists(media, max_size=2), max_size=2)
decoder_prompts = (
    texts
    | st.builds(TextPrompt, texts, st.booleans(), shown)
    | st.builds(ChatPrompt, st.lists(st.dictionaries(texts, plain)).map(tuple), shown)
    | st.builds(TokensPrompt, ids, shown)
    | st.builds(EmbedsPrompt, tensors())
)
sounds = st.builds(AudioPrompt, media, st.none() | st.integers(), st.none() | texts)
encoder_prompts = decoder_prompts | sounds | st.builds(ImagePrompt, media)
prompts = (
    encoder_prompts
    | st.builds(ExplicitEncoderDecoderPrompt, encoder_prompts, st.none() | decoder_prompts)
    | st.builds(SpeechPrompt, tensors(), tensors(), st.none() | tensors(), st.none() | texts)
    | st.builds(CodecPrompt, ids | st.lists(ids, max_size=3).map(tuple), is_last=st.booleans())
    | st.builds(VideoFeatures, tensors(), ids | tensors(), st.floats(), st.none() | sounds)
    | st.builds(VideoPrompt, texts | st.binary(), st.booleans())
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 99),
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    seed=st.none() | st.integers(0, 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
)
requests = st.builds(StageRequest, texts, prompts, st.none() | samplings, st.integers())
reasons = st.none() | st.sampled_from(FinishReason)
waveforms = st.none() | st.builds(Waveform, tensors(), st.integers())
logprobs = st.builds(
    TokenLogprobs,
    st.integers(),
    st.floats(),
    st.lists(st.tuples(st.integers(), st.floats())).map(tuple),
)
outputs = st.builds(
    StageOutput,
    texts,
    texts,
    st.booleans(),
    text=st.none() | texts,
    token_ids=ids,
    finish_reason=reasons,
    error=st.none() | texts,
    tensors=st.dictionaries(texts, tensors(), max_size=3),
    logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
    completions=st.lists(st.builds(Completion, texts, ids, reasons), max_size=2).map(tuple),
    audio=waveforms,
    audio_delta=waveforms,
    metrics=st.builds(RequestMetrics, st.none() | st.floats(), num_preemptions=st.integers()),
)


@given(plain | outputs | requests)
@example(float.fromhex("-0x0p0"))
@example([torch.ones(2, 1)[::2], torch.ones(0)[::2], torch.ones(1, 5)[:, ::5], torch.tensor(1)])
@example(struct.unpack("d", b"\x01\x23\x45\x67\x89\xab\xf0\x7f")[0])
@example((2**64, -(2**63) - 1, "\ud800", {"\udfff": -0.0}))
def test_what_goes_in_comes_out(message: object):
    assert same(message, there_and_back(message))


def test_a_nan_keeps_its_payload():
    payload = torch.tensor([0x7FC01234, 0x7F801234, -1], dtype=torch.int32).view(torch.float32)
    assert same(payload, there_and_back(payload))


def test_every_float_type_that_torch_has_survives():
    for dtype in DTYPES:
        if dtype.is_floating_point:
            made = torch.arange(256, dtype=torch.uint8).view(dtype)
            assert same(made, there_and_back(made)), dtype


def test_stats_survive():
    stats = EngineStats(
        num_steps=3,
        busy_s=0.5,
        num_running=2,
        encoder_cache=EncoderCacheStats(1, 2, 3, 4, 5, 6, 7),
        kv=KVCacheStats(1, 2, 3, 4, 5, 6, 7, 8, 9, (GroupStats("recurrent", 1, 2, 3),)),
    )
    assert there_and_back(stats) == stats


def test_a_parameter_arrives_as_its_values():
    parameter = torch.nn.Parameter(torch.ones(2))
    arrived = there_and_back(parameter)
    assert arrived.tolist() == [1, 1] and not arrived.requires_grad


def test_conjugates_and_negatives_arrive_as_what_they_show():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert there_and_back(numbers.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert there_and_back(numbers.conj().imag).tolist() == [-2, 4]


def test_what_was_left_to_defaults_still_is():
    sampling = there_and_back(SamplingParams(top_k=3))
    assert sampling == SamplingParams(top_k=3)
    assert sampling.model_fields_set == {"top_k"}


def test_a_bias_arrives_as_one_that_can_be_hashed():
    sampling = SamplingParams(logit_bias={50256: -100, 5: 1.5})
    arrived = there_and_back(StageRequest("r", TextPrompt("x"), sampling)).sampling
    assert arrived == sampling and hash(arrived) == hash(sampling)


def test_a_mapping_arrives_as_a_dict():
    assert there_and_back(MappingProxyType({"a": 1})) == {"a": 1}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_an_image_arrives_as_the_stage_would_see_it(mode: str):
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    if mode == "I;16":
        image = Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800)
    else:
        image = Image.fromarray(pixels).convert(mode)
    assert image.mode == mode
    image.getexif()[0x0112] = 6
    arrived = there_and_back(image)
    assert arrived.size == (5, 7), "it is upright"
    assert same(open_image(arrived), open_image(image))


def test_an_image_that_is_refused_is_refused_there_with_the_same_words():
    image = Image.fromarray(np.ones((2, 3), np.float32))
    arrived = there_and_back(image)
    with pytest.raises(ValueError, match="mode 'F'"):
        open_image(arrived)


def test_an_image_that_cannot_be_read_is_told_with_its_field(tmp_path: Path):
    file = tmp_path / "half.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    with Image.open(file) as image, pytest.raises(ValueError, match=r"ImagePrompt\.image .*read"):
        there_and_back(ImagePrompt(image))


class Colour(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: float


class Model(BaseModel):
    width: int = 3


@dataclass(frozen=True, slots=True)
class Order:
    colour: Colour
    place: Point
    model: Model
    anything: Any = None


def test_types_are_registered_by_whoever_needs_them():
    codec = Codec()
    for each in (Order, Colour, Point, Model, Order):
        codec.register(each)
    order = Order(Colour.RED, Point(1, 2.0), Model(width=4), [TextPrompt("a")])
    assert codec.decode(codec.encode(order)) == order


def test_what_cannot_be_told_is_not_registered():
    @dataclass
    class Derived:
        number: int = dataclasses.field(init=False, default=1)

    for wrong, told in (
        (object, "dataclass"),
        (dict, "dataclass"),
        (Derived, "number"),
        (dataclass(type("TextPrompt", (), {})), "another type that is called TextPrompt"),
        (Point(1, 2), "Point"),
    ):
        with pytest.raises(ValueError, match=told):
            Codec().register(wrong)


class Unknown:
    pass


UNKNOWN: Any = Unknown()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (UNKNOWN, "Unknown cannot be sent to another process: it is of type .*Unknown"),
        (
            StageRequest("r", TextPrompt("a", multi_modal_data={"image": [UNKNOWN]})),
            r"StageRequest\.prompt\.multi_modal_data\['image'\]\[0\] .*Unknown",
        ),
        ([(1, {2: Colour.RED})], r"list\[0\]\[1\]\[2\] .*Colour"),
        (lambda: 1, "function"),
        (np.array(["a"]), "array of <U1"),
        (np.array([UNKNOWN]), "array of object"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (1 << 10**4, "integer of 1251 bytes"),
        (Point(1, 2.0), "Point"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_messages_do_not_know_is_told_with_its_place(message: object, told: str):
    with pytest.raises(ValueError, match=told):
        CODEC.encode(message)


def test_a_circle_is_told():
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="levels"):
        CODEC.encode(circle)


REQUEST = StageRequest(
    "r", EmbedsPrompt(torch.ones(2, 3)), SamplingParams(seed=4), cache_salt="\ud800"
)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(content: bytes):
    with suppress(ValueError):
        CODEC.decode(content)


@given(st.data())
def test_a_garbled_message_is_a_message_or_a_value_error(data: st.DataObject):
    content = bytearray(CODEC.encode([REQUEST, np.ones(3), {"a": Path("b")}, 2**90, {3}]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        CODEC.decode(bytes(content))


@given(st.recursive(scalars | st.integers(0, 15), lambda inner: st.lists(inner, max_size=6)))
def test_any_lists_are_a_message_or_a_value_error(lists: Any):
    try:
        content = msgspec.msgpack.encode(lists)
    except (OverflowError, UnicodeEncodeError):
        return
    with suppress(ValueError):
        CODEC.decode(content)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([4, "Popen", ["sh"]], "unknown type 'Popen'"),
        ([4, "TextPrompt"], "TextPrompt has 3 fields, and 0 came"),
        ([4, "SamplingParams", [3, "temperature", -1.0]], "temperature"),
        ([4, "FinishReason", "bored"], "bored"),
        ([5, "float32", [2**40, 2**40], b"abcd"], "4 bytes for a tensor"),
        ([5, "float32", [-1, -1], b"abcd"], "no shape"),
        ([5, "float32", [1], [[0, b"", 0, 4]]], "neither bytes nor a reference"),
        ([5, "load", [1], b"a"], "load"),
        ([6, "|O", [1], b"abcdefgh"], r"\|O"),
        ([9, "RGB", 2**20, 2**20, b"abc"], "3 bytes for an image"),
        ([9, "P", 1, 1, b"a"], "mode 'P'"),
        ([3, 1], "a key without a value"),
        ([3, [0], 1], "unhashable"),
        ([99], "unknown mark"),
        ([], "marked list"),
        ({"a": 1}, "marked list"),
        ([2, [[0]]], "scalars"),
        ([8, "a"], "place of bytes"),
        ([14, b"a" * 2000], "2000 bytes"),
        (msgspec.msgpack.Ext(5, b"a"), "marked list"),
    ],
)
def test_what_is_no_message_is_told(content: Any, told: str):
    with pytest.raises(ValueError, match=told):
        CODEC.decode(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 10**5, b"\x92\x00" * 9999],
    ids=["nothing", "a long list", "long bytes", "a deep list", "a deep marked list"],
)
def test_what_announces_more_than_it_has_is_refused(content: bytes):
    with pytest.raises(ValueError, match="a message that cannot be read"):
        CODEC.decode(content)
