"""Chat templates and tokenizers work as in transformers, within limits of time and memory."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engine.text import tokenizer as tokenizer_module
from engine.text.stop_checker import IncrementalDetokenizer
from engine.text.tokenizer import (
    TemplateLimitError,
    TemplateLimits,
    TemplateProcesses,
    TemplateRefusalError,
    _for_template,
    _patterns,
    doubtful_patterns,
    eos_token_ids,
    load_tokenizer,
    raise_panic,
    render_chat,
    token_ids,
)
from tests.support.tokenizers import TOKENIZERS, byte_level

MESSAGES = [{"role": "user", "content": "Hello, dog."}]


@pytest.fixture
def chat_tokenizer(qwen2_checkpoint: str) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(qwen2_checkpoint)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def test_chat_asks_for_the_assistants_message(chat_tokenizer: PreTrainedTokenizerFast):
    text = render_chat(chat_tokenizer, MESSAGES)
    assert "Hello, dog." in text
    assert text == chat_tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert text != chat_tokenizer.apply_chat_template(MESSAGES, tokenize=False)


def test_chat_without_a_template_or_messages_is_a_clear_error(
    chat_tokenizer: PreTrainedTokenizerFast,
):
    with pytest.raises(ValueError, match="at least one message"):
        render_chat(chat_tokenizer, [])
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(byte_level(), MESSAGES)


@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        ({"role": "user"}, "message 1 lacks content"),
        ("hello", "message 1 must be a mapping of role and content, got 'hello'"),
        ({"role": "user", "content": 3}, "message 1: content must be text or a list of parts"),
        ({"role": "user", "content": None}, "message 1: content must be text or .*, got None"),
        ({"role": 3, "content": "x"}, "message 1: role must be a str, got 3"),
        ({"role": "user", 3: 1}, r"message 1 lacks content; it has \['3', 'role'\]"),
        ({"role": "user", "content": ["x"]}, "message 1, part 0 must be a mapping whose type"),
        ({"role": "user", "content": [{"text": "x"}]}, "message 1, part 0 must be a mapping whose"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "type is one of text, image, audio, video, got {'type': 'input_audio'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0 is of type text, so its text"),
        (
            {"role": "user", "content": [{"type": "audio", "audio": "question.wav"}]},
            r"part 0 carries 'audio'; .* multi_modal_data\['audio'\]",
        ),
    ],
)
def test_content_that_a_template_might_skip_silently_is_refused(
    chat_tokenizer: PreTrainedTokenizerFast, message: Any, mistake: str
):
    with pytest.raises(ValueError, match=mistake):
        render_chat(chat_tokenizer, [*MESSAGES, message])


# Templates of the three kinds found in published checkpoints.
READS_TEXT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }} {% endfor %}"
PRINTS_ANYTHING = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
SKIPS_LISTS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% endif %} {% endfor %}"
)
READS_PARTS = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}"
    "{% endfor %} {% endfor %}"
)
READS_EITHER = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}<{{ p['type'] }}>{% endif %}{% endfor %}{% endif %} {% endfor %}"
)
TEXT_ONLY = (READS_TEXT, PRINTS_ANYTHING, SKIPS_LISTS)


def part(kind: str, text: str | None = None) -> dict[str, str]:
    return {"type": kind} if text is None else {"type": kind, "text": text}


Use = Callable[[Any], PreTrainedTokenizerFast]


@pytest.fixture
def use(chat_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Function that returns a tokenizer with the given template."""

    def use(template: Any) -> PreTrainedTokenizerFast:
        monkeypatch.setattr(chat_tokenizer, "chat_template", template)
        return chat_tokenizer

    return use


def test_the_exception_of_a_template_is_a_clear_error(use: Use):
    with pytest.raises(ValueError, match=r"refuses the messages.*roles must alternate"):
        render_chat(use("{{ raise_exception('roles must alternate') }}"), MESSAGES)


@pytest.mark.parametrize("template", TEXT_ONLY)
def test_a_template_that_reads_text_gets_joined_parts_and_refuses_images(use: Use, template: str):
    content = [part("text", "One."), part("text", "Two.")]
    text = render_chat(use(template), [{"role": "user", "content": content}])
    assert text.strip() == "user: One.\nTwo."
    content = [part("image"), part("text", "Who?")]
    with pytest.raises(ValueError, match="1 shows image, but .* text alone from the role 'user'"):
        render_chat(use(template), [*MESSAGES, {"role": "user", "content": content}])


@pytest.mark.parametrize("template", [READS_PARTS, READS_EITHER])
def test_parts_are_passed_unchanged_to_a_template_that_reads_them(use: Use, template: str):
    messages = [{"role": "user", "content": [part("image"), part("text", "Who?")]}]
    kept = json.dumps(messages)
    assert render_chat(use(template), messages).strip() == "user: <image>Who?"
    assert json.dumps(messages) == kept, "the caller's messages are unchanged"


# As in published templates: system content is text, user content is parts, or the reverse.
BY_ROLE = (
    "{% if messages[0]['role'] == 'system' %}SYS:{{ messages[0]['content'] | trim }} {% endif %}"
    "{% for m in messages if m['role'] != 'system' %}{{ m['role'] }}: "
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}"
    "{% endfor %} {% endfor %}"
)
BY_ROLE_STRICT = BY_ROLE.replace(
    "{{ messages[0]['content'] | trim }}", "{{ '' + messages[0]['content'] }}"
)
NEEDS_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}"
)


@pytest.mark.parametrize("template", [BY_ROLE, BY_ROLE_STRICT])
@pytest.mark.parametrize("system_parts", [False, True])
@pytest.mark.parametrize("user", [[part("image"), part("text", "Who?")], "Who?"])
def test_each_role_gets_the_form_that_the_template_reads(
    use: Use, template: str, system_parts: bool, user: Any
):
    system = [part("text", "Be brief.")] if system_parts else "Be brief."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    image = "" if user == "Who?" else "<image>"
    assert render_chat(use(template), messages) == f"SYS:Be brief. user: {image}Who? "


@pytest.mark.parametrize("template", [*TEXT_ONLY, READS_PARTS, READS_EITHER])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_template_that_requires_a_system_message_reads_every_form(
    use: Use, template: str, as_parts: bool
):
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "I."), ("user", "Why?")]
    messages = [
        {"role": role, "content": [part("text", words)] if as_parts else words}
        for role, words in said
    ]
    text = render_chat(use(NEEDS_SYSTEM + template), messages)
    assert text == "system: Be brief. user: Who? assistant: I. user: Why? "
    with pytest.raises(ValueError, match="refuses the messages: system first"):
        render_chat(use(NEEDS_SYSTEM + template), messages[1:])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'][0]['text'] if m['role'] == 'developer' }}"
        "{% endfor %}{{ messages[-1]['content'] }}",
    ],
)
def test_content_that_a_template_leaves_out_is_an_error(use: Use, template: str):
    developer = [part("text", "Be brief."), part("text", "Be kind.")]
    messages = [{"role": "developer", "content": developer}, *MESSAGES]
    with pytest.raises(ValueError, match="leaves out what a message of the role 'developer' says"):
        render_chat(use(template), messages)


def test_escaped_content_is_an_error(use: Use):
    with pytest.raises(ValueError, match="leaves out"):
        render_chat(use("{{ messages[0]['content'] | string | escape }}"), MESSAGES)


@pytest.mark.parametrize("template", [READS_PARTS, BY_ROLE, SKIPS_LISTS])
def test_a_tool_call_needs_no_content(use: Use, template: str):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    messages = [*MESSAGES, {"role": "assistant", "content": ""}, *MESSAGES]
    text = render_chat(use(template), messages)
    assert text.count("Hello, dog.") == 2
    parts = "{% for m in messages %}{% for p in m['content'] or [] %}{{ p['text'] }}{% endfor %}"
    parts += "{{ m['tool_calls'][0]['name'] if m['tool_calls'] }} {% endfor %}"
    assert render_chat(use(parts), [*MESSAGES, call]) == "Hello, dog. look "
    either = "{% for m in messages %}{{ m['content'] or m['tool_calls'][0]['name'] }} {% endfor %}"
    assert render_chat(use(either), [*MESSAGES, call]) == "Hello, dog. look "


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_and_template_kwargs_render_as_in_transformers(use: Use):
    tokenizer = use(
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ effort }}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    theirs = tokenizer.apply_chat_template(
        MESSAGES, tools=[TOOL], tokenize=False, add_generation_prompt=True, effort="low"
    )
    assert render_chat(tokenizer, MESSAGES, [TOOL], {"effort": "low"}) == theirs


@pytest.mark.parametrize(
    "message",
    ["{{ m['role'] }}: {{ m['content'] }}<end>", "{{ m['role'] }}: {{ m['content'] | trim }}<end>"],
)
@pytest.mark.parametrize(
    "last", ["The dog", "The dog ", "e", [{"type": "text", "text": "The dog is "}]]
)
def test_the_last_message_is_continued_as_in_transformers(use: Use, message: str, last: Any):
    tokenizer = use(
        f"{{% for m in messages %}}{message}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    text = last if isinstance(last, str) else last[0]["text"]
    plain = [*MESSAGES, {"role": "assistant", "content": text}]
    theirs = tokenizer.apply_chat_template(plain, tokenize=False, continue_final_message=True)
    assert render_chat(tokenizer, messages, values={"continue_final_message": True}) == theirs
    whole = tokenizer.apply_chat_template(plain, tokenize=False)
    assert render_chat(tokenizer, messages, values={"add_generation_prompt": False}) == whole


def test_a_message_that_cannot_be_continued_is_refused(use: Use):
    tokenizer = use("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    continued = {"continue_final_message": True}
    with pytest.raises(ValueError, match="needs add_generation_prompt to be false"):
        render_chat(tokenizer, MESSAGES, values=continued | {"add_generation_prompt": True})
    image = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(ValueError, match="needs text at the end of the last message"):
        render_chat(tokenizer, [*MESSAGES, image], values=continued)


def test_a_template_that_leaves_out_tools_is_refused(use: Use):
    template = use("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match="knows no tools: it leaves out 'look'"):
        render_chat(template, MESSAGES, [TOOL])
    call = {"role": "assistant", "content": "", "tool_calls": [TOOL]}
    with pytest.raises(ValueError, match="knows no tools: it leaves out 'look'"):
        render_chat(template, [*MESSAGES, call])
    parts = use(
        "{% for m in messages %}"
        "{% for p in m['content'] %}{{ p['text'] or p['type'] }}{% endfor %}{% endfor %}"
    )
    shown = {"role": "user", "content": [part("audio"), part("text", "What?")]}
    with pytest.raises(ValueError, match="knows no tools: it leaves out 'look'"):
        render_chat(parts, [shown], [TOOL])


@pytest.mark.parametrize("tool", [{}, {"function": {}}, "look", {"function": {"name": 1}}])
def test_a_malformed_tool_is_named(chat_tokenizer: PreTrainedTokenizerFast, tool: Any):
    with pytest.raises(ValueError, match="tool 0 must be a mapping whose function has a name"):
        render_chat(chat_tokenizer, MESSAGES, [tool])


def test_template_kwargs_cannot_repeat_other_arguments(chat_tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tools', which is given else"):
        render_chat(chat_tokenizer, MESSAGES, (), {"tools": []})


def test_many_roles_cost_few_tries(use: Use, monkeypatch: pytest.MonkeyPatch):
    tokenizer, calls = use("{{ '' }}"), []
    render = TemplateProcesses.render

    def count(*arguments: Any) -> Any:
        calls.append(True)
        return render(*arguments)

    monkeypatch.setattr(TemplateProcesses, "render", count)
    messages = [{"role": f"role {number}", "content": "x"} for number in range(40)]
    with pytest.raises(ValueError, match="leaves out what a message of the role 'role 0' says"):
        render_chat(tokenizer, messages)
    assert len(calls) <= 17


FEATURES_OF_TRANSFORMERS = (
    "{{ messages | tojson }}{{ {'b': 'é', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 2 %}"
    "{% break %}{% endif %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}",
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ tools is none }}|{{ documents is none }}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};"
    "{% endfor %}",
    "{% for m in messages %}{{ m.keys() | list | sort }}{% endfor %}",
    "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{{ dict(a=1) }}{{ range(3) | list }}",
    "{{ strftime_now('%Y') }}{{ messages[0].content.split(' ')[0] | upper | trim }}",
    "{% macro say(m) %}<{{ m.role }}>{{ caller() }}{% endmacro %}{% for m in messages %}"
    "{% call say(m) %}{{ m['content'] | string }}{% endcall %}{% endfor %}",
)


@pytest.mark.parametrize("template", FEATURES_OF_TRANSFORMERS)
def test_templates_get_the_same_values_as_in_transformers(use: Use, template: str):
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "Who is it?"},
        {"role": "assistant", "content": "I.", "reasoning": "think", "tool_calls": None},
        {"role": "user", "content": "Ünd?", "thinking": "a", "reasoning_content": "b"},
    ]
    tokenizer = use(template)
    shown = [_for_template(message) for message in conversation]
    text, _ = TemplateProcesses().render(
        template,
        {
            **tokenizer.special_tokens_map,
            "messages": shown,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        },
        TemplateLimits(),
    )
    theirs = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == theirs


def test_all_tries_of_a_prompt_share_one_time_limit(use: Use, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []

    def render(self: object, template: str, values: object, limits: TemplateLimits) -> Any:
        asked.append(limits.seconds)
        if len(asked) == 3:
            raise TemplateLimitError("took more than it may")
        return "nothing that was said", 0.5

    monkeypatch.setattr(TemplateProcesses, "render", render)
    with pytest.raises(TemplateLimitError):
        render_chat(use("{{ 1 }}"), MESSAGES, limits=TemplateLimits(seconds=1.2))
    assert asked == pytest.approx([1.2, 0.7, 0.2])


@pytest.mark.parametrize("template", [[{"name": "default", "template": "x"}], 3])
def test_a_template_that_is_not_text_is_a_clear_error(use: Use, template: Any):
    with pytest.raises(ValueError, match="chat template must be text, got (list|int)"):
        render_chat(use(template), MESSAGES)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
@pytest.mark.parametrize("has_own", [False, True])
def test_the_processors_template_is_used(
    qwen2_checkpoint: str, tmp_path: Path, name: str, has_own: bool
):
    folder = shutil.copytree(qwen2_checkpoint, tmp_path / "model")
    if not has_own:
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            (folder / file).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps({"chat_template": READS_PARTS}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert render_chat(tokenizer, MESSAGES).strip() == "user: Hello, dog."
    assert tokenizer.chat_template == READS_PARTS


@pytest.mark.parametrize("content", ["{ damaged", "[]", '{"a":' * 2000 + "1" + "}" * 2000])
def test_a_damaged_template_file_is_named(qwen2_checkpoint: str, tmp_path: Path, content: str):
    folder = shutil.copytree(qwen2_checkpoint, tmp_path / "model")
    (folder / "chat_template.json").write_text(content)
    with pytest.raises(ValueError, match=r"in .*chat_template\.json cannot be loaded"):
        load_tokenizer(folder)


TIGHT = TemplateLimits(max_chars=10_000, seconds=0.2, num_bytes=2**28)
VALUES: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
GOOD = "{{ messages[0].content }}"


@pytest.fixture
def processes() -> Iterator[TemplateProcesses]:
    running = TemplateProcesses()
    yield running
    for each in running._idle:
        each.close()


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in "
    "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx"
    "{% endfor %}{% endfor %}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of format": "{{ '{:999999999}'.format(1) }}",
    "a repeated string": "{{ 'x' * 1000000000 }}",
    "a padded string": "{{ 'x'.ljust(1000000000) }}",
    "a centred string": "{{ 'x' | center(1000000000) }}",
    "an indented string": "{{ 'x\\ny' | indent(1000000000) }}",
    "a doubled string": "{% set ns = namespace(s='x') %}{% for a in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a power": "{{ 7 ** (7 ** 12) }}",
    "a shower of words": "{{ lipsum(n=100000, min=90000, max=99999) }}",
    "json with an indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "recursion twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a large text": "{{ 'x' * 20000 }}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_template_is_stopped_and_the_next_one_renders(
    processes: TemplateProcesses, kind: str
):
    with pytest.raises(TemplateLimitError, match="chat template") as caught:
        processes.render(ENDLESS[kind], VALUES, TIGHT)
    assert "engine.limits." in str(caught.value)
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


@pytest.mark.parametrize(
    ("template", "message", "is_deliberate"),
    [
        ("{{ raise_exception('no') }}", "no", True),
        ("{% for %}", "Expected an expression", True),
        ("{{ messages[0].content + 1 }}", "concatenate", False),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", False),
        ("{{ range(1000000000) | list }}", "Range too big", False),
        ("{{ ''.__class__.__mro__ }}", "unsafe", True),
        ("{{ messages.append(1) }}", "is unsafe", True),
        ("{% set ns = namespace(_x=1) %}", "begins with '_'", True),
        ("{{ cycler.__init__.__globals__ }}", "unsafe", True),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "", False),
    ],
)
def test_the_error_of_a_template_is_reported(
    processes: TemplateProcesses, template: str, message: str, is_deliberate: bool
):
    with pytest.raises(TemplateRefusalError) as caught:
        processes.render(template, VALUES, TemplateLimits())
    assert message in str(caught.value)
    assert caught.value.is_deliberate is is_deliberate
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


def test_values_without_a_json_form_are_shown_by_type(processes: TemplateProcesses):
    values = {"messages": [{"content": object(), "when": {1, 2}}]}
    text, _ = processes.render("{{ messages[0].content }} {{ messages[0].when }}", values, TIGHT)
    assert text == "<object> <set>"
    circle: list[Any] = []
    circle.append(circle)
    for bad in ({"a": circle}, {"a": {(1, 2): 3}}):
        with pytest.raises(ValueError, match="no plain data"):
            processes.render(GOOD, bad, TIGHT)


def test_an_idle_process_is_reused_and_replaced_if_it_was_killed(processes: TemplateProcesses):
    processes.render(GOOD, VALUES, TemplateLimits())
    (kept,) = processes._idle
    for _ in range(3):
        processes.render(GOOD, VALUES, TemplateLimits())
    assert processes._idle == [kept]
    os.kill(kept._process.pid, signal.SIGKILL)
    kept._process.wait()
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


CUBIC, EXPONENTIAL = "a*a*[cd]", "(a|aa)+c"
LONG_PIECE = "a" * 64 + "bc"
SLOW_TEXT = "a" * 3000 + "bc"


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = [
    # GPT-2, cl100k and Llama 3, Qwen2, Qwen3.5, CLIP, DeepSeek, and o200k.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + SPACES,
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    tokenizer_module._O200K,
]


def cut_by(pattern: str, part: str = "pre_tokenizer") -> PreTrainedTokenizerBase:
    """A tokenizer of the letters a to d that applies a pattern first."""
    vocabulary = {piece: number for number, piece in enumerate([*"abcd[ x", LONG_PIECE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="["))
    if part == "pre_tokenizer":
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), split])
    elif part == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(pattern), "x")])
    else:
        tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(pattern), "x")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[")


def ids(tokenizer: PreTrainedTokenizerBase, text: str, seconds: float = 30.0) -> list[int]:
    return token_ids(tokenizer, text, add_special_tokens=True, seconds=seconds)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_slow_pattern_is_stopped_and_the_next_text_is_read(part: str) -> None:
    tokenizer = cut_by(CUBIC, part)
    assert ids(tokenizer, "abc ab") == tokenizer("abc ab")["input_ids"]
    with pytest.raises(ValueError, match=r"more than 0\.3 s .* for 3002 .*tokenizer_seconds"):
        ids(tokenizer, SLOW_TEXT, seconds=0.3)
    assert ids(tokenizer, "cab") == tokenizer("cab")["input_ids"]


def test_a_pattern_that_retries_too_often_is_an_error() -> None:
    tokenizer = cut_by(EXPONENTIAL)
    with pytest.raises(ValueError, match="cannot take this: .*retry-limit"):
        ids(tokenizer, LONG_PIECE)
    assert ids(tokenizer, "bad") == tokenizer("bad")["input_ids"]
    # Unconverted it is not an Exception, so it would end the calling thread.
    with pytest.raises(BaseException, match="retry-limit") as caught:
        tokenizer(LONG_PIECE)
    assert not isinstance(caught.value, Exception)
    with pytest.raises(ValueError, match="cannot take this"):
        raise_panic(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, KeyError])
def test_other_exceptions_are_not_taken_for_a_panic(kind: type[BaseException]) -> None:
    raise_panic(kind())


class BusyTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Tokenizer with Python code of its own, as in some families."""

    def _encode_plus(self, text: str, **settings: bool) -> BatchEncoding:  # type: ignore[override]
        return super()._encode_plus(text.strip(), **settings)


@pytest.mark.parametrize("pattern", [CUBIC, r"\p{L}+"])
def test_a_checkpoint_with_a_pattern_that_cannot_be_stopped_is_refused(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_by(pattern).save_pretrained(tmp_path)
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda folder, **_: BusyTokenizer(tokenizer_object=load(folder).backend_tokenizer),
    )
    trusted = load_tokenizer(tmp_path, trust_remote_code=True)
    assert trusted is not None and ids(trusted, " ab ") == trusted("ab")["input_ids"]
    if pattern != CUBIC:
        assert isinstance(load_tokenizer(tmp_path), BusyTokenizer)
        return
    with pytest.raises(ValueError, match=r"a\*a\*\[cd\].*BusyTokenizer cannot be run where"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_with_a_doubtful_decoder_pattern_is_refused(tmp_path: Path) -> None:
    cut_by(CUBIC, "decoder").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"makes text of tokens by the pattern 'a\*a\*\[cd\]'"):
        load_tokenizer(tmp_path)


def test_a_panic_while_detokenizing_is_an_error() -> None:
    detokenizer = IncrementalDetokenizer(cut_by(EXPONENTIAL, "decoder"))
    with pytest.raises(ValueError, match="cannot take this"):
        detokenizer.append(7)


@pytest.mark.parametrize("name", [*TOKENIZERS, "seeded"])
def test_usual_tokenizers_have_no_doubtful_patterns(
    name: str, seeded: Callable[[str], str]
) -> None:
    tokenizer = TOKENIZERS[name]() if name in TOKENIZERS else load_tokenizer(seeded("qwen2"))
    assert tokenizer is not None
    assert doubtful_patterns(tokenizer) == () and not list(_patterns(tokenizer, "decoder"))


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_not_doubted(pattern: str) -> None:
    tokenizer = cut_by(pattern)
    assert doubtful_patterns(tokenizer) == ()
    assert len(tokenizer.tokenize("a b  'd 123 ab")) >= 8


@pytest.mark.parametrize(
    "pattern",
    [
        *(" {2,}", "'s| ?ab", "aa*", "x?ab+c*d?", r"\s+", r"\n", r"[\n\r\t]"),
        *(r"\s{2,}|[\n\r\t]", r"\d", r"\p{L}+", r"[^a-z\]]*", "."),
    ],
)
def test_a_run_of_one_class_is_not_doubted(pattern: str) -> None:
    assert doubtful_patterns(cut_by(pattern)) == ()


@pytest.mark.parametrize(
    "pattern",
    [
        *(CUBIC, EXPONENTIAL, "a+b", "a?b?c", "a+b+", "a||b", "a+?b", r"\s*[\r\n]+"),
        *("(a+)+", r"\s+$", "a{1000,}", "(?=a)", "[[a]b]+", r"(a)\1"),
    ],
)
def test_any_other_pattern_is_doubted(pattern: str) -> None:
    for part in ("pre_tokenizer", "normalizer"):
        assert doubtful_patterns(cut_by(pattern, part)) == (pattern,)


def test_a_text_longer_than_model_max_length_is_not_refused_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level().backend_tokenizer, model_max_length=4
    )
    assert len(ids(tokenizer, "hello world, hello dog")) > 4
    assert not caplog.records


@pytest.mark.parametrize("name", ["qwen2", "llama", "bert"])
def test_a_loaded_tokenizer_is_that_of_transformers(name: str, seeded: Callable[[str], str]):
    folder = seeded(name)
    tokenizer, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    text = "The harbour wakes — 12 €."
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]


def test_a_folder_may_lack_a_tokenizer_but_not_be_missing_or_have_a_damaged_one(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match="nowhere is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{ damaged")
    with pytest.raises(ValueError, match=rf"{tmp_path.name} cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (Qwen2Config(eos_token_id=7), GenerationConfig(eos_token_id=[8, 9]), {8, 9}),
        (Qwen2Config(eos_token_id=7), GenerationConfig(eos_token_id=None), {7}),
        (Qwen2Config(eos_token_id=7), None, {7}),
        (Qwen2Config(eos_token_id=[7, 6]), None, {7, 6}),
        (Qwen2Config(eos_token_id=0), None, {0}),
        (LlavaConfig(text_config=Qwen2Config(eos_token_id=5)), None, {5}),
    ],
)
def test_eos_comes_from_the_first_source_that_names_it(
    config: PreTrainedConfig, generation: GenerationConfig | None, expected: set[int]
):
    assert eos_token_ids(config, generation, byte_level()) == expected


def test_eos_comes_from_the_tokenizer_if_no_config_names_it():
    config = Qwen2Config(eos_token_id=None)
    assert eos_token_ids(config, None, byte_level()) == {byte_level().eos_token_id}
    assert eos_token_ids(config, None, None) == frozenset()
    assert eos_token_ids(None, None, None) == frozenset()
