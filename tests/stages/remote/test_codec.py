"""Messages survive encoding and decoding; invalid messages are refused."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.msgpack import Ext
from msgspec.msgpack import encode as pack
from PIL import Image

from engine import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EmbedsPrompt,
    EngineStats,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    ImagePrompt,
    Prompt,
    RequestMetrics,
    SamplingParams,
    SpeechPrompt,
    StructuredOutput,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    TranscriptionOptions,
    VideoFeatures,
    VideoPrompt,
    Waveform,
)
from engine.interface.outputs import CompletionDelta, OutputDelta, TranscriptionWindow
from engine.media.image_file import open_image
from prefix_cache import GroupStats, KVCacheStats
from stages.remote import codec
from stages.remote.codec import Decoder, encode
from stages.remote.messages import (
    Built,
    Call,
    Commands,
    Events,
    GaveUp,
    Idle,
    LinkMessage,
    NotBuilt,
    Returned,
    StageFacts,
    WorkerMessage,
)
from stages.remote.worker_log import Logged
from stages.stage_output import Completion, StageOutput
from stages.trace_events import StageEvent, Traced
from stages.worker.messages import (
    Abort,
    Ack,
    Chunk,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Lift,
    Output,
    StreamPlace,
)
from tests.support.notes import Note

DECODER = Decoder(Note | LinkMessage | WorkerMessage)
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
    """Return True if types are equal recursively and all numbers have the same bits."""
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
        reported = [(each.dtype, each.shape, each.tobytes()) for each in (left, right)]
        return reported[0] == reported[1]
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Image.Image):
        return (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())
    names = getattr(left, "__struct_fields__", ())
    if dataclasses.is_dataclass(left):
        names = [each.name for each in dataclasses.fields(left)]
    if names:
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(message: object) -> Any:
    return DECODER.decode(encode(message))


def arrived(value: object) -> Any:
    """Return a value after a round trip in a message."""
    return there_and_back(Note(value)).value


def arrived_prompt(prompt: Any) -> Any:
    (enter,) = Decoder(LinkMessage).decode(encode(Commands("s", (Enter(1, "r", prompt),)))).commands
    return enter.prompt


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
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
integers = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | integers | st.floats() | texts | st.binary(max_size=20)
plain = st.recursive(
    scalars | tensors() | arrays | st.builds(Path, st.text("ab/ü.", min_size=1)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(integers | texts, inner, max_size=4)
    ),
    max_leaves=12,
)
ids = st.lists(st.integers(0, 2**31), max_size=8).map(tuple)
media = texts | st.binary() | st.just(Path("a.wav")) | arrays | tensors()
medium = (
    st.builds(AudioPrompt, media, st.none() | integers, st.none() | texts)
    | st.builds(VideoPrompt, texts | st.binary(), st.booleans())
    | st.builds(VideoFeatures, tensors(), ids | tensors(), st.floats())
)
shown = st.dictionaries(texts, st.lists(media | medium, max_size=2).map(tuple), max_size=2)
decoder_prompts = (
    texts
    | st.builds(TextPrompt, texts, st.booleans(), shown)
    | st.builds(ChatPrompt, st.lists(st.dictionaries(texts, plain)).map(tuple), shown)
    | st.builds(TokensPrompt, ids, shown)
    | st.builds(EmbedsPrompt, tensors())
)
sounds = st.builds(AudioPrompt, media, st.none() | integers, st.none() | texts)
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
    structured_output=st.none()
    | st.builds(StructuredOutput, json_schema=st.just({"type": "null"}))
    | st.builds(StructuredOutput, choice=st.lists(texts, min_size=1, max_size=2).map(tuple)),
)
reasons = st.none() | st.sampled_from(FinishReason)
waveforms = st.none() | st.builds(Waveform, tensors(), integers)
logprobs = st.builds(
    TokenLogprobs,
    integers,
    st.floats(),
    st.lists(st.tuples(integers, st.floats())).map(tuple),
)
completions = st.builds(Completion, texts, ids, reasons, st.none())
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
    completions=st.lists(completions, max_size=2).map(tuple),
    audio=waveforms,
    audio_delta=waveforms,
    metrics=st.builds(RequestMetrics, st.none() | st.floats(), num_preemptions=integers),
)
deltas = st.builds(
    OutputDelta,
    texts,
    st.booleans(),
    text=st.none() | texts,
    token_ids=ids,
    logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
    finish_reason=reasons,
    others=st.lists(
        st.builds(CompletionDelta, integers, texts, ids, st.none(), reasons), max_size=2
    ).map(tuple),
    audio=waveforms,
    whole_audio=waveforms,
    error=st.none() | texts,
    tensors=st.dictionaries(texts, tensors(), max_size=3),
    windows=st.lists(st.builds(TranscriptionWindow, integers, st.floats()), max_size=2).map(tuple),
    metrics=st.none() | st.builds(RequestMetrics, st.none() | st.floats()),
)


tickets = st.integers(0, 2**63)
enters = st.builds(
    Enter,
    tickets,
    texts,
    prompts,
    st.lists(outputs, max_size=2).map(tuple),
    sampling=st.none() | samplings,
    cache_salt=st.none() | texts,
    streams=st.dictionaries(texts, st.builds(StreamPlace, integers), max_size=2),
)
commands = (
    enters
    | st.builds(Extend, texts, outputs, integers)
    | st.builds(Credit, texts, texts, st.booleans())
    | st.builds(Lift, texts)
    | st.builds(Abort, texts)
)
events = (
    st.builds(
        Output,
        tickets,
        st.none() | deltas,
        st.lists(st.builds(Chunk, texts, outputs, integers), max_size=2).map(tuple),
    )
    | st.builds(Ack, tickets)
    | st.builds(Failed, tickets, texts, st.booleans(), st.booleans(), st.booleans())
    | st.builds(
        Traced,
        st.lists(
            st.builds(StageEvent, texts, st.floats(), args=st.dictionaries(texts, integers)),
            max_size=2,
        ).map(tuple),
        integers,
        texts,
        st.floats(),
    )
)
facts = st.builds(
    StageFacts,
    st.none() | integers,
    st.none() | texts,
    st.none() | samplings,
    st.none() | integers,
    st.booleans(),
    st.booleans(),
    st.none() | st.lists(texts).map(tuple),
    st.booleans(),
    st.booleans(),
    st.dictionaries(texts, plain, max_size=2),
)
messages = (
    st.builds(Note, plain)
    | st.builds(Commands, texts, st.lists(commands, max_size=2).map(tuple))
    | st.builds(Events, st.dictionaries(texts, st.lists(events, max_size=2).map(tuple), max_size=2))
    | st.builds(Call, integers, st.none() | texts, texts, st.tuples(samplings | scalars))
    | st.builds(Returned, integers, error=st.none() | texts)
    | st.builds(Logged, texts, integers, texts, st.none() | texts)
    | st.builds(Idle, integers)
    | st.builds(GaveUp, texts)
    | st.builds(NotBuilt, texts)
    | st.builds(Built, st.dictionaries(texts, facts, max_size=1))
)


@given(messages)
@example(Note(float.fromhex("-0x0p0")))
@example(
    Note(
        [torch.ones(2, 1)[::2], torch.ones(0)[::2], torch.ones(1, 5)[:, ::5], torch.tensor(1)],
    )
)
@example(Note(struct.unpack("d", b"\x01\x23\x45\x67\x89\xab\xf0\x7f")[0]))
@example(Commands("s", (Enter(0, "r", ImagePrompt("x")), Enter(1, "r", TextPrompt("", True, {})))))
def test_messages_survive_a_round_trip(message: object):
    assert same(message, there_and_back(message))


def test_every_kind_of_message_is_generated():
    """A new kind of message must be added above."""
    tried = {Note, Enter, Extend, Credit, Lift, Abort, Output, Ack, Failed}
    tried |= {Traced, Commands, Events, Call, Returned, Logged, Idle, GaveUp, NotBuilt, Built}
    known = {*get_args(LinkMessage), *get_args(WorkerMessage), *get_args(Command), *get_args(Event)}
    assert known <= tried


def test_prompts_are_distinguished_by_their_fields():
    kinds = [each for each in get_args(Prompt) if each is not str] + [VideoFeatures, VideoPrompt]
    kinds.append(TranscriptionOptions)
    assert len({tuple(f.name for f in dataclasses.fields(kind)) for kind in kinds}) == len(kinds)
    assert set(codec._PROMPTS.values()) == set(kinds)


def test_stats_survive_a_round_trip():
    stats = EngineStats(
        num_steps=3,
        busy_s=0.5,
        num_running=2,
        kv=KVCacheStats(1, 2, 3, 4, 5, 6, 7, 8, 9, (GroupStats("recurrent", 1, 2, 3),)),
    )
    assert there_and_back(Events({}, {"s": stats})).stats == {"s": stats}


def test_parameters_and_conjugate_and_negative_views_arrive_as_plain_tensors():
    made = arrived(torch.nn.Parameter(torch.ones(2)))
    assert made.tolist() == [1, 1] and not made.requires_grad
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert arrived(numbers.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert arrived(numbers.conj().imag).tolist() == [-2, 4]


def test_sampling_parameters_arrive_with_unset_fields_unset_and_hashable():
    sampling = arrived(SamplingParams(top_k=3))
    assert sampling == SamplingParams(top_k=3)
    assert sampling.model_fields_set == {"top_k"}
    sampling = SamplingParams(logit_bias={50256: -100, 5: 1.5})
    assert arrived(sampling) == sampling and hash(arrived(sampling)) == hash(sampling)


def test_a_mapping_arrives_as_a_dict_and_a_numpy_scalar_as_a_number():
    assert arrived(MappingProxyType({"a": np.int64(1)})) == {"a": 1}
    assert arrived([np.bool_(True), np.float32(0.5)]) == [True, 0.5]


@pytest.mark.parametrize(
    "prompt",
    [
        TokensPrompt((1, "a", None)),  # type: ignore[arg-type]
        TextPrompt(5),  # type: ignore[arg-type]
        AudioPrompt({"a": 3}, "fast"),  # type: ignore[arg-type]
        ChatPrompt(({"role": 1, "content": [{"image": "x"}]},), {"image": 3}),  # type: ignore[dict-item]
        ExplicitEncoderDecoderPrompt(3, ()),  # type: ignore[arg-type]
    ],
)
def test_a_prompt_of_wrong_types_arrives_for_its_engine_to_refuse(prompt: Any):
    """The prompt is one user's mistake, and the channel is shared by all users."""
    assert same(prompt, arrived_prompt(prompt))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_an_image_arrives_as_the_stage_would_see_it(mode: str):
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    if mode == "I;16":
        image = Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800)
    else:
        image = Image.fromarray(pixels).convert(mode)
    assert image.mode == mode
    image.getexif()[0x0112] = 6
    made = arrived(image)
    assert made.size == (5, 7), "it is rotated upright"
    assert same(open_image(made), open_image(image))


def test_an_unsupported_image_is_refused_by_the_receiver():
    image = Image.fromarray(np.ones((2, 3), np.float32))
    made = arrived(image)
    with pytest.raises(ValueError, match="mode 'F'"):
        open_image(made)


def test_an_unreadable_image_is_reported_with_its_field(tmp_path: Path):
    file = tmp_path / "half.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    with Image.open(file) as image, pytest.raises(ValueError, match=r"\.prompt\.image .*read"):
        arrived_prompt(ImagePrompt(image))


UNKNOWN: Any = object()


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (Note(UNKNOWN), r"Note\.value cannot be sent to another process: .* builtins.object"),
        (
            Commands("s", (Abort("r"), Enter(1, "r", TextPrompt("a", True, {"image": [UNKNOWN]})))),
            r"Commands\.commands\[1\]\.prompt\.multi_modal_data\['image'\]\[0\] .*object",
        ),
        (Note([(1, {2: 1j})]), r"Note\.value\[0\]\[1\]\[2\] .*complex"),
        (Note(lambda: 1), "function"),
        (Note(np.array(["a"])), "array of <U1"),
        (Note(np.array([UNKNOWN])), "array of object"),
        (Note(np.datetime64("2020-01-01")), "datetime64"),
        (Note(np.longdouble(1)), "longdouble"),
        (Note(torch.ones(2, 2).to_sparse()), "sparse"),
        (Note(torch.ones(2, device="meta")), "meta"),
        (Note([1 << 64]), r"Note\.value\[0\] .*ints"),
        (Note(["a", "\ud800"]), r"Note\.value\[1\] .*surrogates"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_an_unsupported_value_is_reported_with_its_location(message: object, reported: str):
    with pytest.raises(ValueError, match=reported):
        encode(message)


def test_a_cyclic_value_is_refused():
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="nested too deeply"):
        encode(circle)


REQUEST = Commands(
    "s",
    (Enter(1, "r", EmbedsPrompt(torch.ones(2, 3)), sampling=SamplingParams(seed=4)), Abort("r")),
)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_value_error(content: bytes):
    with suppress(ValueError):
        DECODER.decode(content)


@given(st.data())
def test_a_garbled_message_is_a_message_or_a_value_error(data: st.DataObject):
    content = bytearray(
        encode(data.draw(st.sampled_from([REQUEST, Note([np.ones(3), Path("b")])])))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        DECODER.decode(bytes(content))


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (["Popen", "sh"], "Popen"),
        (["Abort", "r"], "Abort"),
        (["Commands", "s", [["Abort"]]], "length 2, got 1"),
        (["Commands", "s", [["Abort", 5]]], "Expected `str`, got `int`"),
        ({"a": 1}, "Expected `array`"),
        (["Note", Ext(1, pack(["float32", [2**40, 2**40], b"abcd"]))], "invalid for input"),
        (["Note", Ext(1, pack(["float32", [1], [0, 4]]))], "nothing is shared"),
        (["Note", Ext(1, pack(["load", [1], b"a"]))], "load"),
        (["Note", Ext(2, pack(["|O", [1], b"abcdefgh"]))], r"an array of \|O"),
        (["Note", Ext(3, pack(["RGB", [2**20, 2**20], b"abc"]))], "3 bytes for an image"),
        (["Note", Ext(3, pack(["P", [1, 1], b"a"]))], "P"),
        (["Note", Ext(5, pack({"temperature": -1.0}))], "temperature"),
        (["Note", Ext(99, pack(["float32", [1], b"abcd"]))], "99"),
    ],
)
def test_an_invalid_message_is_refused(content: Any, reported: str):
    with pytest.raises(ValueError, match=reported):
        DECODER.decode(pack(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 10**5],
    ids=["nothing", "a long list", "long bytes", "a deep list"],
)
def test_a_truncated_message_is_refused(content: bytes):
    with pytest.raises(ValueError, match="a message that cannot be read"):
        Decoder(Any).decode(content)
