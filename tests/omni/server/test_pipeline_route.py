"""Any pipeline accepts a line of requests.jsonl and returns a line of outputs.jsonl."""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load, save

from omni import EmbedsPrompt, OmniRequest, TextPrompt
from tests.support.encoder_decoder_requests import SAMPLING_RATE, tone
from tests.support.http_call import call
from tests.support.live_server import LiveServer
from tests.support.tables import rows

IMAGE = {"type": "image_url", "image_url": "x.png"}


@pytest.fixture(scope="module")
def running(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["encode_then_generate", "omni_speech", "transcribe_then_summarize"]) as server:
        yield server


def post(server: LiveServer, name: str, body: Any) -> tuple[int, bytes]:
    status, _, reported = call(f"{server.url}/v1/pipelines/{name}", json.dumps(body).encode())
    return status, reported


def line_of(server: LiveServer, name: str, body: Any) -> Any:
    status, content = post(server, name, body)
    assert status == 200, content
    return json.loads(content)


def sound() -> str:
    file = io.BytesIO()
    soundfile.write(file, tone(0.5), SAMPLING_RATE, format="WAV")
    return "data:audio/wav;base64," + b64encode(file.getvalue()).decode()


def test_every_final_stage_answers_with_its_outputs(running: LiveServer):
    body = {"request_id": "mine\n", "prompt": "Once upon a time", "sampling": {"max_tokens": 5}}
    line = line_of(running, "encode_then_generate", body)
    assert line["request_id"] == "mine\n" and line["error"] is None
    request = OmniRequest(TextPrompt("Once upon a time"), sampling={"generator": {"max_tokens": 5}})
    (expected,) = running.omni("encode_then_generate").generate([request])
    assert line["stages"]["generator"]["text"] == expected.stages["generator"].text
    assert line["stages"]["generator"]["finish_reason"] == "length"
    for name, tensor in expected.stages["encoder"].tensors.items():
        found = load(b64decode(line["stages"]["encoder"]["tensors"][name]))
        torch.testing.assert_close(found, {name: tensor}, atol=1e-5, rtol=0)


def test_embeds_are_sent_as_a_file_in_base64(running: LiveServer):
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    stages = running.omni("encode_then_generate").pipeline.stages
    rows = rows[:, : stages["encoder"].hidden_size]
    body = {"prompt_embeds": b64encode(save({"rows": rows})).decode()}
    line = line_of(running, "encode_then_generate", body)
    (expected,) = running.omni("encode_then_generate").generate([EmbedsPrompt(rows)])
    assert line["stages"]["generator"]["text"] == expected.stages["generator"].text


def test_a_recording_is_transcribed(running: LiveServer):
    body = {"audio": [{"file": sound(), "language": "en"}]}
    line = line_of(running, "transcribe_then_summarize", body)
    assert set(line["stages"]) == {"transcriber", "summarizer"}


def test_an_invalid_input_of_a_later_stage_is_a_client_error(checkpoint_cache: object):
    """A thinker accepts any text; its talker needs a turn of the assistant."""
    with LiveServer(["qwen3_omni_seeded"]) as server:
        status, content = post(server, "qwen3_omni_seeded", {"prompt": "Hello"})
    error = json.loads(content)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "no assistant's turn to speak" in error["message"]


def test_a_stream_has_deltas_of_every_stage_and_ends_with_the_whole(running: LiveServer):
    body = {
        "prompt": [
            {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Hm?"}]}
        ],
        "audio": [sound()],
        "speaker": "Ethan",
        "sampling": {"thinker": {"max_tokens": 12}, "talker": {"max_tokens": 32}},
    }
    status, content = post(running, "omni_speech", {**body, "stream": True})
    assert status == 200
    *events, done = content.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    *news, last = (json.loads(event.removeprefix("data: ")) for event in events)
    text = "".join(each["stages"].get("thinker", {}).get("delta", "") for each in news)
    pieces = [each["stages"].get("code2wav", {}).get("audio_delta", "") for each in news]
    samples = np.frombuffer(b"".join(map(b64decode, pieces)), "<i2")
    assert text == last["stages"]["thinker"]["text"]
    whole, rate = soundfile.read(
        io.BytesIO(b64decode(last["stages"]["code2wav"]["audio"])), dtype="int16"
    )
    assert rate == 24_000 and samples.tolist() == whole.tolist()
    assert len([piece for piece in pieces if piece]) > 1
    assert line_of(running, "omni_speech", body)["stages"]["thinker"]["text"] == text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    rows("""
{} |  | exactly one of prompt
{"prompt": "x", "prompts": "y"} | prompts | did you mean 'prompt'?
{"prompt": 3} | prompt | should be text or a list of chat messages
{"prompt": "x", "speaker": "nobody"} | speaker | none of the stages
{"prompt": "x", "sampling": {"generator": {"top_p": 3}}} | sampling.generator.top_p | 1
{"prompt": "x", "sampling": {"max_toks": 3}} | sampling.max_toks | max_tokens
{"prompt": "x", "sampling": {"n": 999}} | sampling.n | n is 999
{"prompt": "x", "sampling": {"generator": {"n": 999}}} | sampling.generator.n | 999
{"prompt_embeds": "/etc/passwd"} | prompt_embeds | safetensors file in base64
{"images": ["/etc/passwd"]} | images | reads no files of its own
{"images": ["file:///etc/passwd"]} | images | reads no files of its own
{"audio": ["../a.wav"]} | audio | reads no files of its own
{"audio": ["data:audio/wav;base64,%%"]} | audio | not valid base64
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x.png"}]}]} |  | \
reads no files of its own
{"prompt_embeds": "eHh4eHh4eHh4"} | prompt_embeds | safetensors
"""),
)
def test_a_mistake_is_reported_with_its_key(
    running: LiveServer, body: str, param: str, message: str
):
    status, content = post(running, "encode_then_generate", json.loads(body))
    error = json.loads(content)["error"]
    assert status == 400 and message in error["message"], error
    assert error["param"] == (param or None)


@pytest.mark.parametrize("name", ["nobody", "..%2f..%2fetc", "a%00b", "%0d%0aX-Evil:%201"])
def test_an_unknown_pipeline_is_not_found(running: LiveServer, name: str):
    status, content = post(running, name, {"prompt": "x"})
    assert status == 404 and json.loads(content)["error"]["message"]
