"""A sound and a picture as files, and a served pipeline's answers to them in Python."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from PIL import Image

from omni import OmniRequest
from omni.requests.request import OmniOutput
from tests.support.encoder_decoder_requests import SAMPLING_RATE, tone
from tests.support.live_server import LiveServer


def sound(kind: str = "wav", seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds), SAMPLING_RATE, format=kind.upper())
    return file.getvalue()


def picture() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def in_python(server: LiveServer, name: str, request: OmniRequest) -> OmniOutput:
    (output,) = server.omni(name).generate([request])
    assert output.error is None, output.error
    return output
