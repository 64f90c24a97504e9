"""Latency of barge-in at ``/v1/realtime``: the end of an answer that a user interrupts.

    python -m benchmarks.barge_in --rounds 20 --clients 1 5

Every client requests a long spoken answer and, as soon as its first audio arrives, speaks in chunks
of 20 ms in real time, beginning with a loud sample. Milliseconds from that sample until::

    speech_started   the server reports speech
    last sound       the last chunk of the answer's audio arrives; 0 if none does after that sample
    cancelled        the server reports the end of the answer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.request
from base64 import b64encode
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.served import Served

RATE = 24_000
PIECE = RATE // 50
LONG = {
    "thinker": {"ignore_eos": True, "max_tokens": 200},
    "talker": {"ignore_eos": True, "max_tokens": 400},
}
KINDS = ("speech_started", "last sound", "cancelled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="answers that each client ends")
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    print("| clients | until | p50 | p90 | most |\n|---|---|---|---|---|")
    with Served("spoken_sums") as served:
        speech = spoken_words(served.url)
        for clients in args.clients:
            measured = asyncio.run(all_clients(served.url, speech, clients, args.rounds))
            for kind in KINDS:
                times = [each[kind] * 1000 for each in measured]
                p50, p90 = np.percentile(times, [50, 90])
                print(f"| {clients} | {kind} | {p50:.0f} | {p90:.0f} | {max(times):.0f} |")


def spoken_words(url: str) -> bytes:
    """Synthesize words without leading silence, in 24,000 samples of 16 bits per second."""
    body = {"model": "spoken_sums", "voice": "alloy", "input": "twelve plus thirty"}
    asked = urllib.request.Request(
        f"{url}/v1/audio/speech",
        json.dumps(body | {"response_format": "pcm"}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        samples = np.frombuffer(answer.read(), "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > 1000)
    return samples[loud[0] :].tobytes()


async def all_clients(url: str, speech: bytes, clients: int, rounds: int) -> list[dict[str, float]]:
    """Run all clients; return the measurements of each of their rounds, in seconds."""
    asked = (one_client(url, speech, rounds) for _ in range(clients))
    return [each for one in await asyncio.gather(*asked) for each in one]


async def one_client(url: str, speech: bytes, rounds: int) -> list[dict[str, float]]:
    """Request spoken answers, and interrupt each."""
    address = f"{url.replace('http', 'ws')}/v1/realtime?model=spoken_sums"
    measured = []
    for _ in range(rounds):
        async with connect(address, max_size=None) as socket:
            await say(socket, "session.update", session={"type": "realtime", "stages": LONG})
            part = {"type": "input_text", "text": "twelve plus thirty"}
            item = {"type": "message", "role": "user", "content": [part]}
            await say(socket, "conversation.item.create", item=item)
            await say(socket, "response.create")
            await heard(socket, "response.output_audio.delta")
            begun = time.monotonic()
            speaking = asyncio.create_task(speak(socket, speech))
            measured.append(await ended(socket, begun))
            speaking.cancel()
    return measured


async def ended(socket: ClientConnection, begun: float) -> dict[str, float]:
    """Wait for the measured events; return their times in seconds since the speech began."""
    times = {"last sound": 0.0}
    while True:
        event = json.loads(await socket.recv())
        now = time.monotonic() - begun
        match event["type"]:
            case "input_audio_buffer.speech_started":
                times["speech_started"] = now
            case "response.output_audio.delta":
                times["last sound"] = now
            case "response.done":
                if event["response"]["status"] != "cancelled":
                    raise RuntimeError("the answer ended by itself; it must be longer")
                return times | {"cancelled": now}
            case "error":
                raise RuntimeError(event["error"]["message"])


async def speak(socket: ClientConnection, speech: bytes) -> None:
    """Send audio in real time."""
    begun = time.monotonic()
    for number, place in enumerate(range(0, len(speech), 2 * PIECE)):
        piece = b64encode(speech[place : place + 2 * PIECE]).decode()
        await asyncio.sleep(begun + number * PIECE / RATE - time.monotonic())
        await say(socket, "input_audio_buffer.append", audio=piece)


async def say(socket: ClientConnection, kind: str, **content: Any) -> None:
    """Send an event."""
    await socket.send(json.dumps({"type": kind, **content}))


async def heard(socket: ClientConnection, kind: str) -> None:
    """Wait for an event."""
    while (event := json.loads(await socket.recv()))["type"] != kind:
        if event["type"] == "error":
            raise RuntimeError(event["error"]["message"])


if __name__ == "__main__":
    main()
