"""What is spoken to the frameworks for voice."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture(scope="session")
def speech(url: str) -> bytes:
    """A question between silences, in 24,000 samples of 16 bits a second."""
    said = openai.OpenAI().audio.speech.create(
        model="spoken_sums", voice="alloy", input="twelve plus thirty", response_format="pcm"
    )
    return bytes(24_000) + said.content + bytes(72_000)
