"""Inputs as written by an adversary, each generated from a seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from engine import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
    VideoFeatures,
)

_YAML_WORDS = (
    *("&a ", "*a", "<<: *a", "? [a]: b", "- ", "{", "}", "[", "]", ": ", "#", "| ", "> ", "---"),
    *(
        "...",
        "\t",
        "\x00",
        "\x07",
        "\ufeff",
        "\u2028",
        "é",
        "\U0001f600",
        "'",
        '"',
        "\\",
        "%TAG ! x",
    ),
    *("!!python/object/apply:os.system [ls]", "!!binary x", "!!set {a}", "!!int ''", "!!bool x"),
    *("!!timestamp x", "!!omap [a]", "!!float ''", "!x y", "!!pairs [[a]]"),
    *("1e999", ".inf", "-.inf", ".nan", "0x" + "f" * 99, "59" + ":59" * 60, "9" * 400, "-1", "0"),
    *("null", "~", "true", "on", "1_000", "0o7", "2001-99-99", "os:system", "json:dumps", "a.b:c"),
    *("../../../etc/passwd", "/dev/zero", "seeded:", "seeded:nothing", "x" * 5000, "\n" * 50),
    "[" * 200,
    "{a: " * 200,
    "".join(f"\nk{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9) if n else 'x'}]" for n in range(12)),
)
_LINE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**30, -(10**30), 1e308, 0.5, "", " ", "x", "\x00", "\u2028"),
    *([], {}, [[]], [{}], {"": ""}, [None], "é" * 1000, "x" * 300, "trap.pipe", "trap.zero"),
    *("trap.folder", "trap.png", "trap.wav", "/dev/zero", "../..", "no such file", "\ud800"),
    *(["trap.wav"], ["trap.png"], ["trap.pipe"], [{"file": "trap.wav"}], {"file": "trap.pipe"}),
    *({"role": "user"}, [{"role": "user", "content": "x"}], [{"role": 3, "content": [3]}]),
    *({"writer": {"n": 10**9}}, {"writer": {"max_tokens": -1}}, {"reader": {"stop": [""]}}),
    *({"writer": {"stop": ["x" * 5000] * 50}}, {"nowhere": {}}, {"writer": None}),
)
_LINE_KEYS = (
    *("request_id", "prompt", "prompt_token_ids", "prompt_embeds", "encoder_prompt", "x"),
    *("decoder_prompt", "images", "audio", "sampling", "priority", "cache_salt", "speaker"),
)


def make_traps(folder: Path) -> None:
    """Create misleading files: a pipe, a link to a device, broken media."""
    os.mkfifo(folder / "trap.pipe")
    (folder / "trap.zero").symlink_to("/dev/zero")
    (folder / "trap.folder").mkdir()
    (folder / "trap.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    (folder / "trap.wav").write_bytes(b"RIFF\xff\xff\xff\xffWAVEfmt " + bytes(40))


def hostile_yaml(seed: int, texts: Sequence[str]) -> bytes:
    """Generate a pipeline file with a few changes of characters, words, lines and indentation."""
    random = Random(seed)
    text = random.choice(texts)
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        text = random.choice(_YAML_CHANGES)(random, text)
    data = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        at = random.randrange(len(data) + 1)
        data = data[:at] + random.randbytes(random.choice((1, 4, 64))) + data[at:]
    return data


def _insert(random: Random, text: str) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(_YAML_WORDS) + text[at:]


def _cut(random: Random, text: str) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + text[at + random.choice((1, 3, 20, 200)) :]


def _repeat(random: Random, text: str) -> str:
    at, length = random.randrange(len(text) + 1), random.choice((1, 10, 100))
    return text[:at] + text[at : at + length] * random.choice((2, 50)) + text[at:]


def _change_value(random: Random, text: str) -> str:
    lines = text.split("\n")
    at = random.randrange(len(lines))
    key, colon, _ = lines[at].partition(": ")
    lines[at] = key + (colon or ": ") + random.choice(_YAML_WORDS)
    return "\n".join(lines)


def _move_line(random: Random, text: str) -> str:
    lines = text.split("\n")
    line = lines.pop(random.randrange(len(lines)))
    indent = " " * random.randrange(8)
    lines.insert(random.randrange(len(lines) + 1), indent + line.lstrip())
    return "\n".join(lines)


_YAML_CHANGES: tuple[Callable[[Random, str], str], ...] = (
    *(_insert, _insert, _cut, _repeat, _change_value, _change_value, _move_line),
)


def hostile_line(seed: int) -> bytes:
    """Generate a line of a request file with wrong values, keys or JSON, without a line break."""
    random = Random(seed)
    data: dict[str, Any] = {"prompt": "Once", "sampling": {"writer": {"max_tokens": 3}}}
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        data[random.choice(_LINE_KEYS)] = random.choice(_LINE_VALUES)
    if random.random() < 0.2:
        data.pop("prompt")
    if random.random() < 0.1:
        field = random.choice(("n", "stop", "seed", "logprobs", "temperature", "top_k", "x"))
        data["sampling"] = {"writer": {field: random.choice(_LINE_VALUES)}}
    raw = json.dumps(data).encode()
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        at = random.randrange(len(raw) + 1)
        raw = raw[:at] + random.choice(_JSON_PIECES) + raw[at + random.choice((0, 0, 1, 9)) :]
    return raw.replace(b"\n", b" ")


_JSON_PIECES = (
    *(b"NaN", b"Infinity", b"[" * 100_000, b'{"a":' * 50_000, b"\x00", b"\xff", b"\xed\xa0\x80"),
    *(b'"', b"\\", b"\\ud800", b",", b"}", b"]", b"1e400", b"9" * 5000, b"\xef\xbb\xbf", b"//"),
    *(b'"prompt": "twice",', b"[]", b"{}", b"\x1b[31m", b"\xe2\x80\xa8"),
)


def hostile_sampling(random: Random) -> dict[str, Any]:
    """Generate some fields of ``SamplingParams``, valid and invalid."""
    values: dict[str, Sequence[Any]] = {
        "max_tokens": (0, 1, 3, 10**18, -1, "3", None, 2.5),
        "min_tokens": (0, 2, 10**18),
        "temperature": (0.0, 1.0, 1e-300, 1e300, float("nan"), float("inf"), -1),
        "top_k": (0, 1, 10**30),
        "top_p": (1.0, 1e-12, 0, 2),
        "min_p": (0.0, 1.0, -1),
        "repetition_penalty": (1.0, 1e-30, 1e30, 0),
        "presence_penalty": (2.0, -2.0, 3),
        "seed": (0, 2**63 - 1, 2**63, -1),
        "stop": ((), ("a",), ("",), ("x" * 10**5,), tuple("abcdefgh" * 100), "e", 3),
        "stop_token_ids": ((), (1,), (10**9,), (-1,), tuple(range(100_000))),
        "suppress_token_ids": ((), (5, 5), (10**9,), tuple(range(768))),
        "logit_bias": (
            *({}, {5: 100, "6": -100.0}, {10**9: 1}, {-1: 1}, {"a": 1}, {5: 101}, {10**30: 1}),
            *({5: "1"}, {5: 1, "5": 1}, {True: 1}, {5: None}, {5: float("nan")}, [[5, 1]], 3),
            *(dict.fromkeys(range(768), -100), dict.fromkeys(range(100_000), 1e-300)),
        ),
        "logprobs": (None, 0, 3, 10**9, -1),
        "n": (1, 2, 5, 10**6, 10**30, 0),
        "nonsense": (1,),
    }
    names = random.sample(list(values), random.choice((0, 0, 0, 1, 2)))
    return {name: random.choice(values[name]) for name in names}


def hostile_prompt(random: Random) -> Any:
    """Generate a prompt of any form, or an object that is none; sometimes a valid one."""
    if random.random() < 0.3:
        return random.choice((TextPrompt("Once"), TokensPrompt((5, 6, 7)), "The quick brown dog"))
    nan, inf = float("nan"), float("inf")
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(random.randrange(2**31)))
    wrong_rows: Sequence[Any] = (
        *(rows, rows[:, :5], rows[:0], rows[0], rows.long(), rows.to(torch.complex64)),
        *(rows.fill_diagonal_(nan), rows * inf, rows.to_sparse(), rows.to("meta"), rows.half()),
        *(rows.expand(1, 3, 64), rows[:1].expand(10**9, 64), rows.double() * 1e300, None, [[0.0]]),
        rows.clone().requires_grad_(),
    )
    ids: Sequence[Any] = (
        *((), (1, 2, 3), (0,) * 10**5, (-1,), (10**9,), (1.5,), ("a",), (None,), (True, 2), 3),
        *(
            [1, 2],
            np.array([3, 4]),
            torch.tensor([5]),
            range(5),
            count(),
            {1: 2},
            "12",
            b"12",
            None,
        ),
    )
    texts = ("Once upon", "", "\x00", "\ud800", "é" * 100, "x " * 40_000, "\u202e" * 9, 3, None)
    contents: Sequence[Any] = (
        *("hi", "", None, 3, [], [{}], [{"type": "text", "text": "a"}], [{"type": "image"}], [[]]),
        *(
            [{"type": "text", "text": 3}],
            {"a": 1},
            [{"type": "audio", "audio": "x.wav"}],
            "x" * 10**6,
        ),
    )
    shown: Sequence[Any] = (
        *({}, {"image": ["a.png"]}, {"image": "a.png"}, {"sound": []}, {"audio": [None]}, None, 3),
        {"video": [VideoFeatures(rows, (1, 1, 1), nan)]},
    )
    messages = [
        {"role": random.choice(("user", "system", "", 3)), "content": random.choice(contents)}
        for _ in range(random.randrange(4))
    ]
    inner: Any = random.choice((TextPrompt("a"), TokensPrompt((1,)), None, 3))
    return random.choice(
        (
            random.choice(texts),
            TextPrompt(random.choice(texts), random.choice((True, False, 3)), random.choice(shown)),  # type: ignore[arg-type]
            ChatPrompt(tuple(messages), random.choice(shown)),
            ChatPrompt(random.choice((3, None, ("a",), [{}]))),  # type: ignore[arg-type]
            TokensPrompt(random.choice(ids), random.choice(shown)),
            TokensPrompt(random.choice(ids)),
            EmbedsPrompt(random.choice(wrong_rows)),
            EmbedsPrompt(random.choice(wrong_rows)),
            AudioPrompt(random.choice(("a.wav", None, rows[0])), random.choice((None, 0, 16000))),  # type: ignore[arg-type]
            ImagePrompt(random.choice(("a.png", None, rows))),  # type: ignore[arg-type]
            ExplicitEncoderDecoderPrompt(inner, inner),
            SpeechPrompt(rows, rows, is_last=random.random() < 0.5),
            CodecPrompt((1, 2), is_last=random.random() < 0.5),
            random.choice((None, 3, object(), {"prompt": "a"}, b"a", [1, 2])),
        )
    )


_TEMPLATE_PIECES = (
    *("{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}", "text"),
    *("{% for a in range(99999) %}", "{% endfor %}", "{{ 'x' * 1000000000 }}", "{% endif %}"),
    *("{{ '%999999999d' % 1 }}", "{{ 7 ** (7 ** 12) }}", "{% if messages %}", "{% else %}"),
    *("{% set s = namespace(v='x') %}", "{% for i in range(60) %}{% set s.v = s.v ~ s.v %}"),
    *("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ lipsum(n=9999) }}", "{{"),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self._TemplateReference__context }}"),
    *("{{ cycler.__init__.__globals__.os.system('true') }}", "{% include 'a' %}", "{% raw %}"),
    *("{{ raise_exception('no') }}", "{{ messages | tojson(indent=99999999) }}", "{# "),
    *("{{ 'a' | center(999999999) }}", "{{ range(10**9) | list }}", "{{ (" * 500, "{% break %}"),
    *("{{ messages | sort(attribute='content') | map('upper') | list }}", "{% generation %}"),
    *("{{ strftime_now('%' * 1000000) }}", "{{ 'a' | replace('', 'b' * 999999) }}", "\x00"),
)


def hostile_template(seed: int) -> str:
    """Generate a chat template of pieces that loop, are invalid, or try to escape the sandbox."""
    random = Random(seed)
    pieces = random.choices(_TEMPLATE_PIECES, k=random.choice((1, 1, 2, 3, 6)))
    return "".join([_TEMPLATE_PIECES[0]] * random.randrange(2) + pieces)
