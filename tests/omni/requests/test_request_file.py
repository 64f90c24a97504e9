"""Reading ``requests.jsonl``: every form of prompt; a bad line fails without the others."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from engine import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests
from tests.support.tables import rows

OWN = SamplingParams(temperature=0.0, max_tokens=7, stop=("end",))
STAGES = {"writer": OWN, "encoder": None}


def read(folder: Path, *lines: Any) -> list[OmniRequest | RequestError]:
    """Read lines; each is text, bytes or an object to write as JSON."""
    path = folder / "requests.jsonl"
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    written = [line.encode() if isinstance(line, str) else line for line in texts]
    path.write_bytes(b"\n".join(written) + b"\n")
    return read_requests(path, STAGES)


def read_one(folder: Path, line: Any) -> OmniRequest:
    (request,) = read(folder, line)
    assert isinstance(request, OmniRequest), request
    return request


def error_of(folder: Path, line: Any) -> str:
    """The error of a line between two good ones, which must be read."""
    before, entry, after = read(folder, {"prompt": "a"}, line, {"prompt": "b"})
    assert isinstance(before, OmniRequest)
    assert isinstance(after, OmniRequest)
    assert isinstance(entry, RequestError)
    assert entry.line == 2
    assert "requests.jsonl:2:" in entry.message
    assert "\n" not in entry.message
    entry.message.encode("utf-8")
    return entry.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeds_are_found_next_to_the_file_of_requests(tmp_path: Path, dtype: torch.dtype) -> None:
    embeds = torch.arange(6, dtype=dtype).reshape(3, 2)
    (tmp_path / "embeds").mkdir()
    save_file({"any": embeds}, tmp_path / "embeds/a.safetensors")
    line = {"prompt_embeds": "embeds/a.safetensors"}
    pair = read_one(tmp_path, {"encoder_prompt": line}).prompt
    assert isinstance(pair, ExplicitEncoderDecoderPrompt)
    for prompt in (read_one(tmp_path, line).prompt, pair.encoder_prompt):
        assert isinstance(prompt, EmbedsPrompt)
        assert torch.equal(prompt.prompt_embeds, embeds)
        assert prompt.prompt_embeds.dtype == dtype


FORMS: list[tuple[Any, Any]] = [
    ("a", TextPrompt("a")),
    ({"prompt": "Grüße, 世界\u2028!"}, TextPrompt("Grüße, 世界\u2028!")),
    ({"prompt_token_ids": [2, 0]}, TokensPrompt((2, 0))),
    (
        {"prompt": [{"role": "user", "content": "a"}]},
        ChatPrompt(({"role": "user", "content": "a"},)),
    ),
]


ABSENT_KEYS = {"prompt": "x", "prompt_token_ids": None, "images": None}


@pytest.mark.parametrize(("line", "prompt"), [*FORMS[1:], (ABSENT_KEYS, TextPrompt("x"))])
def test_a_line_has_its_prompt_in_one_form(line: Any, prompt: Any, tmp_path: Path) -> None:
    assert read_one(tmp_path, line).prompt == prompt


@pytest.mark.parametrize(("encoder", "encoder_prompt"), FORMS)
@pytest.mark.parametrize(("decoder", "decoder_prompt"), [*FORMS, (None, None)])
def test_both_sides_of_an_encoder_decoder_model_take_every_form(
    encoder: Any, encoder_prompt: Any, decoder: Any, decoder_prompt: Any, tmp_path: Path
) -> None:
    line = {"encoder_prompt": encoder, "decoder_prompt": decoder}
    expected = ExplicitEncoderDecoderPrompt(encoder_prompt, decoder_prompt)
    assert read_one(tmp_path, line).prompt == expected


@pytest.mark.parametrize("decoder", [None, "a", {"prompt_token_ids": [5]}])
def test_one_file_of_audio_is_the_encoders_prompt(decoder: Any, tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "sound/a.wav").touch()
    wishes = {"language": "fr", "task": "translate", "timestamps": True}
    for audio, wished in (("sound/a.wav", {}), ({"file": "sound/a.wav"} | wishes, wishes)):
        prompt = read_one(tmp_path, {"audio": [audio], "decoder_prompt": decoder}).prompt
        assert isinstance(prompt, ExplicitEncoderDecoderPrompt)
        found = prompt.encoder_prompt
        assert isinstance(found, AudioPrompt)
        assert found.audio == tmp_path / "sound/a.wav"
        assert {name: getattr(found, name) for name in wishes} == dict.fromkeys(wishes) | wished
        assert (prompt.decoder_prompt is None) == (decoder is None)


def test_one_image_is_the_encoders_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    prompt = read_one(tmp_path, {"images": ["a.png"], "decoder_prompt": "<|image|>what"}).prompt
    assert isinstance(prompt, ExplicitEncoderDecoderPrompt)
    assert isinstance(prompt.encoder_prompt, ImagePrompt)
    assert prompt.encoder_prompt.image == tmp_path / "a.png"
    assert prompt.decoder_prompt == TextPrompt("<|image|>what")


@pytest.mark.parametrize(
    "form",
    [
        {"prompt": "what is <image>"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        {"prompt_token_ids": [1, 2]},
    ],
)
def test_images_given_with_a_prompt_are_part_of_it(tmp_path: Path, form: dict[str, Any]) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        file.touch()
    prompt = read_one(tmp_path, {"images": ["a.png", "b.png"], **form}).prompt
    assert isinstance(prompt, TextPrompt | ChatPrompt | TokensPrompt)
    assert prompt.multi_modal_data == {"image": files}


def test_sound_and_images_given_with_a_prompt_are_part_of_it(tmp_path: Path) -> None:
    sounds = [tmp_path / "a.wav", tmp_path / "b.wav"]
    image = tmp_path / "a.png"
    for file in (*sounds, image):
        file.touch()
    parts = [{"type": "audio"}, {"type": "image"}, {"type": "audio"}]
    line = {
        "prompt": [{"role": "user", "content": parts}],
        "audio": ["a.wav", {"file": "b.wav"}],
        "images": ["a.png"],
    }
    prompt = read_one(tmp_path, line).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.multi_modal_data == {"image": [image], "audio": sounds}
    assert list(prompt.messages[0]["content"]) == parts


def test_all_other_keys_reach_the_request(tmp_path: Path) -> None:
    request = read_one(
        tmp_path,
        {
            "request_id": "r",
            "prompt": "x",
            "sampling": {"writer": {"max_tokens": 3, "temperature": 1}},
            "priority": -2,
            "cache_salt": "s",
            "speaker": "Ethan",
        },
    )
    assert request.request_id == "r"
    assert request.priority == -2
    assert request.cache_salt == "s"
    assert request.speaker == "Ethan"
    assert request.sampling == {
        "writer": SamplingParams(temperature=1.0, max_tokens=3, stop=("end",))
    }, "fields that the line leaves out keep the stage's values"


def test_generated_ids_differ_from_the_given_ones(tmp_path: Path) -> None:
    entries = read(
        tmp_path,
        {"prompt": "a"},
        "",
        {"prompt": "b", "request_id": "line-1"},
        {"prompt": "c"},
        "nonsense",
    )
    ids = [str(entry.request_id) for entry in entries]
    assert len(set(ids)) == 4
    assert ids[1] == "line-1"
    assert "4" in ids[2]
    assert "5" in ids[3]


def test_a_request_id_that_comes_twice_names_both_lines(tmp_path: Path) -> None:
    line = {"request_id": "r", "prompt": "x"}
    first, second, third = read(tmp_path, line, {"prompt": "y"}, line)
    assert isinstance(first, OmniRequest)
    assert isinstance(second, OmniRequest)
    assert isinstance(third, RequestError)
    assert third.request_id == "r"
    assert "requests.jsonl:3: request_id: 'r' is already used on line 1" in third.message


# A line between two good ones, and its error.
MISTAKES = rows(r"""
{"prompt": } | requests.jsonl:2:12: not valid JSON
{"prompt": "abc | not valid JSON: Unterminated string
[1] | expected a JSON object
{"prompt": "a", "prompt": "b"} | 'prompt' stands twice
{"prompt": "a", "priority": NaN} | NaN is not a number
[[[MANY | nested too deeply
{"prompt": "\ud800"} | half of a surrogate pair
{"prompt": "a", "prioritty": 1} | prioritty: unknown key; did you mean 'priority'?
{"request_id": "r"} | exactly one of prompt, messages, prompt_token_ids, prompt_embeds, \
encoder_prompt, audio, images must be given, got none
{"prompt": "a", "prompt_token_ids": [1]} | got prompt and prompt_token_ids
{"prompt": 3} | prompt: should be text or a list of chat messages, got 3
{"prompt": []} | prompt: must not be empty
{"prompt": [{"role": "user", "contents": "x"}]} | prompt[0].contents: unknown key; did you mean \
'content'?
{"prompt_token_ids": []} | prompt_token_ids: must not be empty
{"prompt_token_ids": [1, -1]} | prompt_token_ids[1]
{"images": ["a.png"], "prompt_embeds": "x.safetensors"} | images: not supported yet beside \
prompt_embeds
{"prompt": [{"role": "user", "content": [{"type": "text"}]}]} | prompt[0].content[0]: a part of \
type text has a text, and no other part has
{"audio": ["a.wav"], "prompt_embeds": "x.safetensors"} | audio: not supported yet beside \
prompt_embeds
{"audio": ["a.wav", {"file": "b.wav", "task": "translate"}], "prompt": "x"} | audio[1].task: is \
for a speech model's encoder; beside a prompt, say in it
{"audio": ["a.wav", "b.wav"]} | audio: must be a list of exactly one file, got 2
{"images": []} | images: must be a list of exactly one file, got 0
{"audio": "a.wav"} | audio: should be a
{"audio": ["no.wav"]} | no.wav' cannot be read: No such file
{"images": ["no.png"]} | no.png' cannot be read
{"audio": [{"file": "a.wav", "langauge": "en"}]} | audio[0].langauge: unknown key; did you mean \
'language'?
{"audio": [{"language": "en"}]} | audio[0].file: missing
{"audio": [{"file": "a.wav", "task": "sing"}]} | audio[0].task: should be 'transcribe' or \
'translate', got 'sing'
{"decoder_prompt": "x"} | decoder_prompt: must stand beside one of encoder_prompt, audio, images
{"prompt": "x", "decoder_prompt": {"prompt": "x"}} | decoder_prompt: must stand beside one of \
encoder_prompt
{"prompt": "x", "encoder_prompt": "x"} | got prompt and encoder_prompt
{"audio": ["a.wav"], "encoder_prompt": "x"} | got encoder_prompt and audio
{"encoder_prompt": {"prompt": "x", "prompt_token_ids": [1]}} | encoder_prompt: exactly one of \
prompt, messages, prompt_token_ids, prompt_embeds must be given, got prompt and prompt_token_ids
{"encoder_prompt": {}} | encoder_prompt: exactly one of
{"encoder_prompt": {"promt": "x"}} | encoder_prompt.promt: unknown key; did you mean 'prompt'?
{"encoder_prompt": "x", "decoder_prompt": {"decoder_prompt": "x"}} | \
decoder_prompt.decoder_prompt: unknown key
{"encoder_prompt": [1, 2]} | encoder_prompt: should be a
{"request_id": "", "prompt": "x"} | request_id
{"request_id": 3, "prompt": "x"} | request_id: should be text, got 3
{"prompt": "x", "speaker": ""} | speaker: must not be empty
{"prompt": "x", "priority": "1"} | priority: should be a valid integer
{"prompt": "x", "sampling": {"writr": {}}} | sampling.writr: unknown stage; did you mean 'writer'?
{"prompt": "x", "sampling": {"encoder": {"max_tokens": 1}}} | sampling.encoder: this stage does \
not sample
{"prompt": "x", "sampling": {"writer": {"max_token": 1}}} | sampling.writer.max_token: unknown \
key; did you mean 'max_tokens'?
{"prompt": "x", "sampling": {"writer": {"max_tokens": -1}}} | sampling.writer.max_tokens: should \
be greater than or equal to 0, got -1
{"prompt": "x", "sampling": {"writer": {"min_tokens": 8}}} | sampling.writer: min_tokens (8) is \
larger than max_tokens (7)
{"prompt": "x", "sampling": {"writer": 3}} | sampling.writer: should be a mapping of its fields, \
got 3
{"prompt_embeds": "no.safetensors"} | cannot be read
""")


@pytest.mark.parametrize(("line", "expected"), MISTAKES)
def test_a_bad_line_fails_alone_and_says_where(line: str, expected: str, tmp_path: Path) -> None:
    assert expected in error_of(tmp_path, line.replace("MANY", "[" * 200_000))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (save({name: torch.zeros(2, 3) for name in "ab"}), "must hold one tensor, got 2: a, b"),
        (save({"a": torch.zeros(2)}), "float32 (2,)"),
        (save({"a": torch.zeros(0, 3)}), "float32 (0, 3)"),
        (save({"a": torch.zeros(2, 3, dtype=torch.int64)}), "int64 (2, 3)"),
        (b"nonsense", "cannot be read"),
    ],
)
def test_a_file_without_prompt_embeds_is_refused(
    content: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "embeds.safetensors").write_bytes(content)
    assert expected in error_of(tmp_path, {"prompt_embeds": "embeds.safetensors"})


def test_bytes_that_are_not_utf8_are_located(tmp_path: Path) -> None:
    assert "requests.jsonl:2:13: not valid UTF-8" in error_of(tmp_path, b'{"prompt": "\xff"}')


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request"):
        read(tmp_path, "", "  ")


GOOD = b'{"request_id": "good", "prompt": "x"}\n'
NAMES_A_FILE = ["prompt_embeds", "audio", "images", "image_url", "beside"]


def line_that_names(key: str, name: str) -> dict[str, Any]:
    match key:
        case "prompt_embeds":
            return {key: name}
        case "image_url":
            part = {"type": "image_url", "image_url": {"url": name}}
            return {"messages": [{"role": "user", "content": [part]}]}
        case "beside":
            return {"images": [name], "prompt": "x"}
    return {key: [name]}


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(file.parent)  # socket addresses have a short maximum length
        try:
            listener.bind(file.name)
        finally:
            os.chdir(before)


@pytest.mark.parametrize(
    "make", [os.mkfifo, make_socket, lambda file: file.symlink_to(file.name), Path.mkdir]
)
@pytest.mark.parametrize("key", NAMES_A_FILE)
def test_a_special_file_is_refused_without_opening_it(key: str, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "it")
    message = error_of(tmp_path, line_that_names(key, "it"))
    assert "it' cannot be read: " in message


NO_NAMES = {
    "of 300 bytes": "x" * 300,
    "of 300 bytes in a folder": "y/" + "x" * 300,
    "a path of 5,000 bytes": "a/" * 2_500,
    "of a letter of four bytes, 100 times": "\N{MUSICAL SYMBOL G CLEF}" * 100,
    "a NUL": "a\0b",
    "only a NUL": "\0",
    "a folder that is a file": "requests.jsonl/x",
    "nothing but the folder": ".",
    "a device": "/dev/null",
    "absent": "absent",
    "a line break": "a\nb",
}


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("key", NAMES_A_FILE)
def test_a_name_that_no_file_has_fails_alone(key: str, name: str, tmp_path: Path) -> None:
    message = error_of(tmp_path, line_that_names(key, NO_NAMES[name]))
    assert "cannot be read" in message
    assert len(message) < 1_000


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_the_operating_system_fails_alone(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors from looking up a file and from reading it."""
    save_file({"rows": torch.zeros(1, 2)}, tmp_path / "rows.safetensors")
    real = os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if os.fspath(path).endswith("rows.safetensors"):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **options)

    def load(path: Any) -> None:
        raise OSError(number, os.strerror(number), path)

    line = line_that_names("prompt_embeds", "rows.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        assert "cannot be read" in error_of(tmp_path, line)
    monkeypatch.setattr("safetensors.torch.load_file", load)
    assert "cannot be read" in error_of(tmp_path, line)


LINES = {
    "a number beyond floats": b'{"prompt": "x", "sampling": {"top_p": 1e999}}',
    "a negative number beyond floats": b'{"prompt": "x", "priority": -1e999}',
    "Infinity": b'{"prompt": "x", "priority": Infinity}',
    "an integer of 5,000 digits": b'{"prompt": "x", "priority": ' + b"9" * 5_000 + b"}",
    "half a million values": b'{"prompt": [' + b"[]," * 2**19 + b"[]]}",
    "many wrong ids": b'{"prompt_token_ids": [' + b'"x",' * 100_000 + b'"x"]}',
    "a key twice, deep down": b'{"prompt": "x", "sampling": {"writer": {"n": 1, "n": 1}}}',
    "a thousand keys, and one twice": (
        b"{" + b"".join(b'"%d": 0,' % number for number in range(1_000)) + b'"0": 1}'
    ),
    "half a surrogate in a key": b'{"\\udc00": 1}',
    "half a surrogate in a file's name": b'{"audio": ["\\udcff"]}',
    "bytes that are no UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a second byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a NUL": b'{"prompt": "x"}\0',
    "a NUL in a string": b'{"prompt": "a\0b"}',
    "two objects": b'{"prompt": "x"} {"prompt": "y"}',
    "a carriage return inside": b'{"prompt":\r "a\rb"}',
    "a vertical tab": b"\x0b{}",
    "a comment": b"# none",
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_no_request_fails_alone(case: str, tmp_path: Path) -> None:
    message = error_of(tmp_path, LINES[case])
    assert len(message) < 1_000
    assert "sys." not in message


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_any_depth_fails_alone(brackets: tuple[bytes, bytes], tmp_path: Path) -> None:
    """No parser of a line may end the run when it gives up."""
    limit = sys.getrecursionlimit()
    opened, closed = brackets
    depths = [*range(1, 40), *range(180, 260), *range(limit - 220, limit + 20), 100_000]
    path = tmp_path / "requests.jsonl"
    lines = [
        b'{"prompt": "x", "sampling": ' + opened * depth + b"1" + closed * depth + b"}"
        for depth in depths
    ]
    path.write_bytes(b"\n".join(lines) + b"\n" + GOOD)
    *errors, good = read_requests(path, STAGES)
    assert len(errors) == len(depths)
    assert all(isinstance(error, RequestError) for error in errors)
    assert all(len(error.message) < 1_000 for error in errors)
    assert isinstance(good, OmniRequest)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_ends_blank_lines_and_a_byte_order_mark_are_ignored(
    end: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + end + GOOD.strip() + end + b"  \t" + end + end + b'{"prompt": "y"}'
    )
    first, second = read_requests(path, STAGES)
    assert isinstance(first, OmniRequest) and isinstance(second, OmniRequest)
    assert second.request_id == "line-5"


def test_a_file_whose_name_is_not_utf8_is_read_and_named(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xff"))
    folder.mkdir()
    path = Path(os.fsdecode(os.fsencode(folder) + b"/r\xfe.jsonl"))
    path.write_bytes(GOOD + b'{"audio": ["absent.wav"]}\n{\n')
    good, absent, bad = read_requests(path, STAGES)
    assert isinstance(good, OmniRequest)
    for error in (absent, bad):
        assert isinstance(error, RequestError)
        assert "\\udcfe.jsonl:" in error.message
        error.message.encode("utf-8")
    absent_file = Path(os.fsdecode(os.fsencode(folder) + b"/\xfd.jsonl"))
    with pytest.raises(ValueError, match="cannot be read: No such file") as raised:
        read_requests(absent_file, STAGES)
    str(raised.value).encode("utf-8")


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, ".", "absent.jsonl"])
def test_a_path_that_is_not_a_file_is_an_error(path: str) -> None:
    message = (
        r"^absent\.jsonl: cannot be read: No such file" if "absent" in path else "cannot be read"
    )
    with pytest.raises(ValueError, match=message):
        read_requests(path, STAGES)


def test_the_standard_input_is_a_file_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.wav").touch()
    content = GOOD + b'{"audio": ["a.wav"]}\n{\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    good, speech, bad = read_requests("-", STAGES)
    assert isinstance(good, OmniRequest) and isinstance(speech, OmniRequest)
    assert isinstance(bad, RequestError)
    assert bad.message.startswith("standard input:3:2: not valid JSON")


hostile_keys = st.sampled_from(
    [
        *("request_id", "prompt", "messages", "prompt_token_ids", "prompt_embeds", "sampling"),
        *("encoder_prompt", "decoder_prompt", "audio", "images", "priority", "cache_salt"),
        *("speaker", "role", "content", "type", "text", "image_url", "url", "input_audio"),
        *("data", "format", "file", "language", "writer", "encoder", "max_tokens", "x", "\\ud800"),
    ]
)
json_text = st.recursive(
    st.sampled_from(
        [
            *("null", "true", "1", "-0", "1e5", "1e999", "NaN", "1" * 30, '""', '"a"', '"../x"'),
            *('"\\u0000"', '"\\ud800"', '"messages"', '"data:,"', '"http://x"', f'"{"x" * 300}"'),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: "[" + ",".join(each) + "]")
        | st.lists(st.tuples(hostile_keys, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        )
    ),
    max_leaves=8,
)


@given(lines=st.lists(json_text.map(str.encode) | st.binary(max_size=30), max_size=4))
def test_the_other_lines_are_read_whatever_a_line_is(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "requests.jsonl"
    junk = [line.replace(b"\n", b" ") for line in lines]
    path.write_bytes(b"\n".join(junk) + b"\n" + GOOD.replace(b"good", b"the good one"))
    *entries, last = read_requests(path, STAGES)
    assert isinstance(last, OmniRequest)
    assert last.prompt == TextPrompt("x")
    junk[:1] = [line.removeprefix(b"\xef\xbb\xbf") for line in junk[:1]]
    assert len(entries) == sum(bool(line.strip()) for line in junk)
    for entry in entries:
        if isinstance(entry, RequestError):
            entry.message.encode("utf-8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 3}, "request_id must be str | None, got 3"),
        ({"priority": "high"}, "priority must be int, got 'high'"),
        ({"cache_salt": b"x"}, "cache_salt must be str | None, got b'x'"),
        ({"sampling": None}, "sampling must be Mapping, got None"),
        ({"sampling": {"writer": None}}, "sampling for stage 'writer' must be SamplingParams or a"),
        ({"sampling": {5: {}}}, "sampling must name stages by str, got 5"),
        ({"sampling": {"writer": [1]}}, "of its fields, got [1]"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OmniRequest("x", **fields)
    assert message in str(caught.value)
