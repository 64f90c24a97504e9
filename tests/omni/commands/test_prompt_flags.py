"""Flags of the command line become requests, or an error that names the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import AudioPrompt, ChatPrompt, ExplicitEncoderDecoderPrompt, TextPrompt
from omni.commands.options import PromptFlags


def test_every_prompt_is_a_request() -> None:
    requests = PromptFlags(prompts=["a", "b"]).requests()
    assert [request.prompt for request in requests] == ["a", "b"]
    assert [request.request_id for request in requests] == ["prompt-1", "prompt-2"]


def test_the_decoder_prompt_stands_beside_every_encoder_prompt() -> None:
    requests = PromptFlags(encoder_prompts=["a", "b"], decoder_prompt="c").requests()
    assert [request.prompt for request in requests] == [
        ExplicitEncoderDecoderPrompt("a", "c"),
        ExplicitEncoderDecoderPrompt("b", "c"),
    ]


def test_every_prompt_shows_all_images() -> None:
    files = (Path("a.png"), Path("b.png"))
    requests = PromptFlags(prompts=["x", "y"], images=files).requests()
    assert [request.prompt for request in requests] == [
        TextPrompt(text, multi_modal_data={"image": files}) for text in ("x", "y")
    ]


def test_audio_brings_its_language() -> None:
    (request,) = PromptFlags(audio=[Path("a.wav")], language="fr").requests()
    prompt = request.prompt
    assert isinstance(prompt, ExplicitEncoderDecoderPrompt)
    assert prompt.decoder_prompt is None
    audio = prompt.encoder_prompt
    assert isinstance(audio, AudioPrompt)
    assert (audio.audio, audio.language) == (Path("a.wav"), "fr")


def test_every_prompt_shows_all_sound() -> None:
    sound, images = (Path("a.wav"), Path("b.wav")), (Path("a.png"),)
    requests = PromptFlags(prompts=["x", "y"], audio=sound, images=images).requests()
    assert [request.prompt for request in requests] == [
        TextPrompt(text, multi_modal_data={"image": images, "audio": sound}) for text in ("x", "y")
    ]


def test_every_chat_is_a_conversation_of_one_message() -> None:
    requests = PromptFlags(chats=["x", "y"]).requests()
    assert [request.prompt for request in requests] == [
        ChatPrompt(({"role": "user", "content": text},)) for text in ("x", "y")
    ]
    assert [request.request_id for request in requests] == ["prompt-1", "prompt-2"]


def test_every_chat_begins_with_the_images_and_then_the_sound() -> None:
    sound, images = (Path("a.wav"),), (Path("a.png"), Path("b.png"))
    requests = PromptFlags(chats=["x", "y"], audio=sound, images=images).requests()
    for text, request in zip("xy", requests, strict=True):
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt)
        (message,) = prompt.messages
        assert [part["type"] for part in message["content"]] == ["image", "image", "audio", "text"]
        assert message["role"] == "user" and message["content"][-1]["text"] == text
        assert prompt.multi_modal_data == {"image": images, "audio": sound}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"chats": ["a"], "prompts": ["b"]}, "--chat and --prompt do not go together"),
        ({"chats": ["a"], "decoder_prompt": "x"}, "--decoder-prompt stands beside"),
        (
            {"chats": ["a"], "audio": [Path("a.wav")], "language": "en"},
            "--language stands beside --audio only, without --chat",
        ),
        ({"decoder_prompt": "x"}, "--decoder-prompt stands beside"),
        ({"prompts": ["a"], "decoder_prompt": "x"}, "--decoder-prompt stands beside"),
        (
            {"prompts": ["a"], "encoder_prompts": ["b"], "decoder_prompt": "x"},
            "--decoder-prompt stands beside",
        ),
        ({"images": [Path("a.png")]}, "--image stands beside --chat or --prompt"),
        ({"prompts": ["a"], "language": "en"}, "--language stands beside --audio"),
        ({"encoder_prompts": ["a"], "language": "en"}, "--language stands beside --audio"),
        (
            {"prompts": ["a"], "audio": [Path("a.wav")], "language": "en"},
            "--language stands beside --audio only",
        ),
    ],
)
def test_a_flag_with_nothing_to_stand_beside_is_an_error(
    flags: dict[str, Any], expected: str
) -> None:
    assert PromptFlags(**flags).given
    with pytest.raises(ValueError, match=expected):
        PromptFlags(**flags).requests()


def test_no_flag_is_no_flag() -> None:
    assert not PromptFlags().given
    assert not PromptFlags(prompts=[], chats=[], audio=[], encoder_prompts=[], images=[]).given
