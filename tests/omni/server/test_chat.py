"""Chats and completions of the official client equal those of ``Omni`` in Python."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from omni import ChatPrompt, OmniRequest, SamplingParams, TextPrompt, TokensPrompt
from omni.server.openai.chat_request import ChatMessage
from stages import StageOutput
from tests.support.live_server import LiveServer

HELLO: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant, and you count the clocks."},
    {"role": "user", "content": "How many clocks are there in the library?"},
]

# Fields of vLLM with their defaults.
NEUTRAL: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "bad_words": [],
    "top_k": -1,
    "mm_processor_kwargs": {},
    "request_id": "one",
    "guided_decoding_backend": "auto",
}

# Fields of a client, and the sampling parameters of the stage.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
    (
        {"temperature": 1.1, "seed": 1, "top_p": 0.7, "extra_body": {"top_k": 9, "min_p": 0.01}},
        {"temperature": 1.1, "seed": 1, "top_p": 0.7, "top_k": 9, "min_p": 0.01},
    ),
    (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    ),
    (
        {"extra_body": {"repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 3}},
        {"repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 3},
    ),
    ({"n": 3, "temperature": 1.0, "seed": 5}, {"n": 3, "temperature": 1.0, "seed": 5}),
    ({"logit_bias": {"5": 100}}, {"logit_bias": {5: 100.0}}),
    (
        {"logit_bias": {"5": 90, "7": 100, "9": -100}, "presence_penalty": 2.0, "temperature": 1.0,
         "seed": 3},
        {"logit_bias": {5: 90, 7: 100, 9: -100}, "presence_penalty": 2.0, "temperature": 1.0,
         "seed": 3},
    ),
    ({"stop": "e"}, {"stop": ["e"]}),
    ({"stop": ["e", "a"], "n": 2, "seed": 2, "temperature": 1.0},
     {"stop": ["e", "a"], "n": 2, "seed": 2, "temperature": 1.0}),
    ({"extra_body": NEUTRAL}, {}),
]  # fmt: skip


def in_python(server: LiveServer, prompt: Any, sampling: dict[str, Any]) -> StageOutput:
    request = OmniRequest(prompt, sampling={"writer": sampling})
    (output,) = server.omni("chat").generate([request])
    assert output.error is None
    return output.stages["writer"]


def reported(output: StageOutput) -> list[tuple[str | None, str]]:
    """Text and reason of every completion."""
    if not output.completions:
        return [(output.text, output.finish_reason.value)]
    return [(each[0], each[2].value) for each in output.completions]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "sampling"), SAMPLING)
def test_an_answer_equals_that_of_omni_in_python(
    server: LiveServer, client: Any, asked: dict[str, Any], sampling: dict[str, Any], stream: bool
):
    output = in_python(server, ChatPrompt(tuple(HELLO)), sampling)
    expected = reported(output)
    texts, roles = [""] * len(expected), [""] * len(expected)
    reasons: list[str | None] = [None] * len(expected)
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.chat.completions.create(model="chat", messages=HELLO, **more, **asked)
    *parts, last = answer if stream else [answer, answer]
    for part in parts:
        assert (part.usage is None) == stream and part.id == last.id and part.model == "chat"
        for choice in part.choices:
            assert reasons[choice.index] is None, "nothing follows the end"
            message = choice.delta if stream else choice.message
            roles[choice.index] += message.role or ""
            texts[choice.index] += message.content or ""
            reasons[choice.index] = choice.finish_reason
    assert list(zip(texts, reasons, strict=True)) == expected
    assert roles == ["assistant"] * len(expected) and last.id.startswith("chatcmpl-")
    assert not stream or last.choices == []
    lengths = [len(each[1]) for each in output.completions] or [len(output.token_ids)]
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        output.num_prompt_tokens, sum(lengths), output.num_prompt_tokens + sum(lengths),
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_token_ids_are_returned_if_requested(
    server: LiveServer, client: Any, endpoint: str, stream: bool
):
    sampling = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    is_chat = endpoint == "chat"
    prompt = ChatPrompt(tuple(HELLO)) if is_chat else TextPrompt("Once upon")
    output = in_python(server, prompt, sampling)
    create = client.chat.completions.create if is_chat else client.completions.create
    asked = {"messages": HELLO} if is_chat else {"prompt": "Once upon"}
    body = sampling | {"return_token_ids": True}
    answer = create(model="chat", stream=stream, extra_body=body, **asked)
    if not stream:
        where = answer if is_chat else answer.choices[1]
        assert where.prompt_token_ids == list(output.prompt_token_ids)
    found: list[list[int]] = [[], []]
    for each in answer if stream else [answer]:
        for choice in each.choices:
            found[choice.index] += (choice.model_extra or {}).get("token_ids", ())
    assert [tuple(each) for each in found] == [each.token_ids for each in output.completions]


def test_the_last_message_is_continued(server: LiveServer, client: Any):
    begun = [*HELLO, {"role": "assistant", "content": "There are"}]
    values = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = ChatPrompt(tuple(begun), chat_template_kwargs=values)
    output = in_python(server, prompt, {"max_tokens": 9})
    answer = client.chat.completions.create(
        model="chat", messages=begun, max_tokens=9, extra_body=values
    )
    assert answer.choices[0].message.content == output.text
    whole = in_python(server, ChatPrompt(tuple(begun)), {"max_tokens": 9})
    assert answer.usage.prompt_tokens == output.num_prompt_tokens < whole.num_prompt_tokens


@pytest.mark.parametrize("num_answers", [1, 2])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_chunk_may_count_the_tokens_so_far(
    server: LiveServer, client: Any, endpoint: str, num_answers: int
):
    asked = {
        "n": num_answers, "temperature": 1.0, "seed": 5, "stream": True, "max_tokens": 9,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    if endpoint == "chat":
        chunks = list(client.chat.completions.create(model="chat", messages=HELLO, **asked))
    else:
        chunks = list(client.completions.create(model="chat", prompt="Once upon", **asked))
    *chunks, last = chunks
    counts: dict[int, list[int]] = {index: [] for index in range(num_answers)}
    for chunk in chunks:
        (choice,) = chunk.choices
        assert chunk.usage.prompt_tokens == last.usage.prompt_tokens > 0
        assert chunk.usage.total_tokens == (
            chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        )
        counts[choice.index].append(chunk.usage.completion_tokens)
    if endpoint == "chat":  # the chunk that names the role comes before the first token, as in vLLM
        assert all(each.pop(0) == 0 for each in counts.values())
    for each in counts.values():
        assert each[0] > 0 and each == sorted(each) and each[-1] == 9
    assert last.choices == [] and last.usage.completion_tokens == 9 * num_answers


def test_a_prompt_may_be_truncated_to_its_end(client: Any):
    ids = list(range(5, 45))
    whole = client.completions.create(model="chat", prompt=ids[-7:])
    cut = client.completions.create(
        model="chat", prompt=ids, extra_body={"truncate_prompt_tokens": 7}
    )
    assert cut.usage.prompt_tokens == 7 and cut.choices[0].text == whole.choices[0].text


@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
def test_no_chunk_counts_tokens_without_a_request_for_usage(client: Any, options: dict[str, bool]):
    stream = client.chat.completions.create(
        model="chat", messages=HELLO, stream=True,
        stream_options={"continuous_usage_stats": True, **options},
    )  # fmt: skip
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_a_stream_has_several_pieces_and_no_usage_by_default(client: Any):
    # Who is slow gets several tokens in a piece, though hardly a hundred of them.
    stream = client.chat.completions.create(
        model="chat",
        messages=HELLO,
        stream=True,
        max_completion_tokens=100,
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert len(chunks) > 4 and all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_equal_those_of_omni_in_python(
    server: LiveServer, client: Any, top: int | None, stream: bool
):
    given = {} if top is None else {"top_logprobs": top}
    answer = client.chat.completions.create(
        model="chat", messages=HELLO, logprobs=True, stream=stream, **given
    )
    expected = in_python(server, ChatPrompt(tuple(HELLO)), {"logprobs": top or 0})
    found = [
        each
        for part in (answer if stream else [answer])
        for choice in part.choices
        if choice.logprobs is not None
        for each in choice.logprobs.content
    ]
    assert [each.logprob for each in found] == [each.logprob for each in expected.logprobs]
    assert [[one.logprob for one in each.top_logprobs] for each in found] == [
        [logprob for _, logprob in each.top] for each in expected.logprobs
    ]
    assert "".join(each.token for each in found) == expected.text
    assert all(bytes(each.bytes).decode() == each.token for each in found)


def test_bytes_of_tokens_join_to_the_characters_of_the_text(server: LiveServer, client: Any):
    answer = client.chat.completions.create(
        model="chat", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=90,
        temperature=2.0, seed=3, extra_body={"ignore_eos": True},
    )  # fmt: skip
    tokenizer: Any = server.pipelines.find("chat").tokenizers["writer"]
    (choice,) = answer.choices
    specials = {str(each) for each in tokenizer.added_tokens_decoder.values()}
    found = [each for each in choice.logprobs.content if each.token not in specials]
    assert len(found) < len(choice.logprobs.content), "no special token among them"
    assert any(each.token == "\ufffd" for each in found), "no part of a character among them"
    joined = b"".join(bytes(each.bytes or b"") for each in found)
    assert joined.decode(errors="replace").rstrip("\ufffd") == choice.message.content
    for one in [*found, *(top for each in found for top in each.top_logprobs)]:
        assert one.bytes is None or bytes(one.bytes).decode(errors="replace") == one.token


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_has_its_logprobs(
    server: LiveServer, client: Any, stream: bool, endpoint: str
):
    drawn = {"n": 3, "temperature": 1.0, "seed": 7}
    found: dict[int, list[float]] = {0: [], 1: [], 2: []}
    prompt: Any
    if endpoint == "chat":
        prompt, more = ChatPrompt(tuple(HELLO)), {"logprobs": True, "top_logprobs": 2}
        create, given = client.chat.completions.create, {"messages": HELLO, **more}
    else:
        prompt, create = TextPrompt("Once upon"), client.completions.create
        given = {"prompt": "Once upon", "logprobs": 2}
    answer = create(model="chat", stream=stream, **drawn, **given)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            if choice.logprobs is not None and endpoint == "chat":
                found[choice.index] += [each.logprob for each in choice.logprobs.content]
            elif choice.logprobs is not None:
                found[choice.index] += choice.logprobs.token_logprobs
    expected = in_python(server, prompt, {"logprobs": 2, **drawn}).completions
    assert len({each.text for each in expected}) > 1
    for index, each in enumerate(expected):
        assert found[index] == [entry.logprob for entry in each.logprobs]
        assert len(found[index]) == len(each.token_ids)


def test_a_bias_forces_or_bans_a_token_and_leaves_logprobs_unchanged(
    server: LiveServer, client: Any
):
    def ask(**bias: int) -> list[float]:
        answer = client.completions.create(
            model="chat", prompt=[5, 6, 7], max_tokens=3, logprobs=0, logit_bias=bias
        )
        return answer.choices[0].logprobs.token_logprobs

    prompt = TokensPrompt((5, 6, 7))
    sampling = {"max_tokens": 3, "logprobs": 0}
    free = in_python(server, prompt, sampling)
    liked, banned = max(free.token_ids) + 1, free.token_ids[0]
    for bias in ({liked: 100}, {banned: -100}):
        params = SamplingParams(temperature=0.0, logit_bias=bias, **sampling)
        request = OmniRequest(prompt, sampling={"writer": params})
        (output,) = server.omni("chat").generate([request])
        expected = output.stages["writer"]
        assert (expected.token_ids == (liked,) * 3) == (liked in bias)
        assert banned not in expected.token_ids
        reported = ask(**{str(token_id): value for token_id, value in bias.items()})
        assert free.logprobs is not None and expected.logprobs is not None
        assert reported == [each.logprob for each in expected.logprobs]
        assert reported[0] < free.logprobs[0].logprob, "the model finds it less likely"


def test_a_repeated_prompt_is_reported_as_cached(client: Any):
    messages = [{"role": "user", "content": "The clocks of the library " * 6}]
    first, again = (
        client.chat.completions.create(model="chat", messages=messages) for _ in range(2)
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert first.choices == again.choices


def test_each_stage_may_have_sampling_parameters(server: LiveServer, client: Any):
    stages = {"writer": {"max_tokens": 3, "temperature": 1.0, "seed": 4}}
    answer = client.chat.completions.create(
        model="two_step", messages=HELLO, max_tokens=6, extra_body={"stages": stages}
    )
    request = OmniRequest(
        ChatPrompt(tuple(HELLO)), sampling={**stages, "reader": {"max_tokens": 6}}
    )
    (expected,) = server.omni("two_step").generate([request])
    assert answer.choices[0].message.content == expected.stages["reader"].text


def test_an_answer_can_be_sent_back_unchanged(server: LiveServer, client: Any):
    first = client.chat.completions.create(model="chat", messages=HELLO)
    said = first.choices[0].message
    more = {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "then?"}]}  # fmt: skip  # noqa: E501
    answer = client.chat.completions.create(
        model="chat", messages=[*HELLO, said.model_dump(), more]
    )
    messages = (*HELLO, {"role": "assistant", "content": said.content}, more)
    expected = in_python(server, ChatPrompt(messages), {})
    assert answer.choices[0].message.content == expected.text


def test_an_unknown_audio_id_is_refused(client: Any):
    spoken: dict[str, Any] = {"role": "assistant", "audio": {"id": "audio-1"}}
    with pytest.raises(openai.BadRequestError, match="no audio 'audio-1' is kept") as error:
        client.chat.completions.create(model="chat", messages=[*HELLO, spoken, HELLO[-1]])
    assert error.value.param == "messages[2].audio.id"
    spoken["role"] = "user"
    with pytest.raises(openai.BadRequestError, match="belongs to an assistant's message"):
        client.chat.completions.create(model="chat", messages=[*HELLO, spoken])


def test_reasoning_is_for_the_template_and_part_ids_change_nothing(client: Any):
    part = {"type": "text", "text": HELLO[1]["content"], "uuid": "a"}
    thought = [
        {"role": "assistant", "content": "None.", key: "Let me count."}
        for key in ("reasoning_content", "reasoning")
    ]
    answers = [
        client.chat.completions.create(
            model="chat", messages=[HELLO[0], question, *said, HELLO[1]]
        ).choices
        for question in (HELLO[1], {"role": "user", "content": [part]})
        for said in ([thought[0]], [thought[1]], [{"role": "assistant", "content": "None."}])
    ]
    assert all(each == answers[0] for each in answers), "this template does not show it"
    message = ChatMessage(role="assistant", content="None.", reasoning_content="Let me count.")
    assert message.for_template("None.")["reasoning_content"] == "Let me count."


def test_a_developer_message_is_a_system_message(client: Any):
    developer = [{**HELLO[0], "role": "developer"}, HELLO[1]]
    answers = [
        client.chat.completions.create(model="chat", messages=messages).choices
        for messages in (HELLO, developer)
    ]
    assert answers[0] == answers[1]


def test_only_requests_with_the_same_salt_share_cached_tokens(client: Any):
    messages = [{"role": "user", "content": "A clock that nobody else has asked about. " * 4}]
    cached = [
        client.chat.completions.create(
            model="chat", messages=messages, extra_body={"cache_salt": salt} if salt else {}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert cached[:3] == [0, 0, 0] and cached[3] > 0 and cached[4] > 0


PROMPTS = ["Once upon a time", "Twice upon a hill", "There"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_equal_those_of_omni_in_python(server: LiveServer, client: Any, stream: bool):
    sampling = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 7}
    answer = client.completions.create(model="chat", prompt=PROMPTS, stream=stream, **sampling)
    texts, reasons = ([""] * 6, [""] * 6)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""
    expected = [
        each
        for prompt in PROMPTS
        for each in reported(in_python(server, TextPrompt(prompt), sampling))
    ]
    assert list(zip(texts, reasons, strict=True)) == expected


@pytest.mark.parametrize("prompt", [PROMPTS, [[5, 6, 7], [8, 9]]])
def test_an_echo_is_the_prompt_before_each_completion(server: LiveServer, client: Any, prompt: Any):
    asked = {"model": "chat", "prompt": prompt, "n": 2, "temperature": 1.0, "seed": 3}
    plain = client.completions.create(**asked)
    tokenizer: Any = server.pipelines.find("chat").tokenizers["writer"]
    texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in prompt]
    expected = [texts[choice.index // 2] + choice.text for choice in plain.choices]
    whole = client.completions.create(**asked, echo=True)
    assert [choice.text for choice in whole.choices] == expected
    streamed = [""] * len(expected)
    for part in client.completions.create(**asked, echo=True, stream=True):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected
    with pytest.raises(openai.BadRequestError, match="the prompt's are not known") as error:
        client.completions.create(**asked, echo=True, logprobs=1)
    assert error.value.param == "echo"


def test_prompts_may_be_token_ids(server: LiveServer, client: Any):
    one = client.completions.create(model="chat", prompt=[5, 6, 7])
    several = client.completions.create(model="chat", prompt=[[5, 6, 7], [8, 9]])
    expected = [in_python(server, TokensPrompt(ids), {}).text for ids in ((5, 6, 7), (8, 9))]
    assert [choice.text for choice in one.choices] == expected[:1]
    assert [choice.text for choice in several.choices] == expected
    assert one.usage.prompt_tokens == 3 and several.usage.prompt_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions_have_text_offsets(server: LiveServer, client: Any, stream: bool):
    answer = client.completions.create(model="chat", prompt="There", logprobs=2, stream=stream)
    expected = in_python(server, TextPrompt("There"), {"logprobs": 2})
    tokens: list[str] = []
    numbers: list[float] = []
    offsets: list[int] = []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            tokens += choice.logprobs.tokens
            numbers += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
    assert numbers == [each.logprob for each in expected.logprobs]
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_positions_in_the_text_without_special_tokens(
    server: LiveServer, client: Any, stream: bool
):
    answer = client.completions.create(
        model="chat", prompt="There", logprobs=2, stream=stream, max_tokens=90, n=2,
        temperature=2.0, seed=3, extra_body={"ignore_eos": True},
    )  # fmt: skip
    texts, found = ["", ""], [[], []]  # type: ignore[var-annotated]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            each = choice.logprobs
            found[choice.index] += zip(each.tokens, each.text_offset, strict=True)
    tokenizer: Any = server.pipelines.find("chat").tokenizers["writer"]
    specials = {str(each) for each in tokenizer.added_tokens_decoder.values()}
    assert {token for each in found for token, _ in each} & specials
    for text, tokens in zip(texts, found, strict=True):
        plain = [each for each in tokens if each[0] not in specials and "\ufffd" not in each[0]]
        assert len(tokens) == 90 and len(plain) > 30
        assert all(text[offset : offset + len(token)] == token for token, offset in plain)
        assert [offset for _, offset in tokens] == sorted(offset for _, offset in tokens)


@pytest.mark.parametrize("number", [0, 2])
def test_the_chosen_token_is_among_the_top_logprobs_of_completions(
    server: LiveServer, client: Any, number: int
):
    sampling = {"max_tokens": 30, "temperature": 2.0, "seed": 4}
    answer = client.completions.create(
        model="chat", prompt="There", logprobs=number, **sampling
    ).choices[0]
    expected = in_python(server, TextPrompt("There"), {"logprobs": number, **sampling})
    reported = answer.logprobs
    assert any(each.token_id not in dict(each.top) for each in expected.logprobs)
    for token, logprob, top, each in zip(
        reported.tokens,
        reported.token_logprobs,
        reported.top_logprobs,
        expected.logprobs,
        strict=True,
    ):
        assert top[token] == logprob == each.logprob
        assert len(top) <= number + 1
        assert {logprob for _, logprob in each.top} | {each.logprob} >= set(top.values())
