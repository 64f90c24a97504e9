"""A talker learns from rows laid out as the engine lays them out."""

import torch

from engine.requests.encoder_input import StreamedRows
from training.spoken_sums.mouth_sizes import TALKER
from training.spoken_sums.sizes import omni_config
from training.spoken_sums.talker import Renditions, Reply, codes_said, make_talker, rows_beside
from training.spoken_sums.tokenizer import build_tokenizer

WIDTH = 256


def _reply(generator):
    def rows(count):
        return torch.randn(count, WIDTH, generator=generator)

    reply = Reply("three", rows(5), rows(3), rows(3))
    voices = {"slt": rows(1)[0], "rms": rows(1)[0]}
    return reply, Renditions({}, voices, rows(1)[0], rows(1)[0], torch.zeros(1, 1))


def _network():
    return make_talker(omni_config(build_tokenizer()).talker_config, 0)


def test_rows_are_where_a_speech_prompt_has_them():
    network = _network()
    reply, renditions = _reply(torch.Generator().manual_seed(0))
    codes = torch.tensor([3, 9, 27, 81, 5, 6])

    made = rows_beside(network, reply, renditions, "rms", codes)

    # As engine/models/qwen2_5_omni/speakers.py: start, reply, end, then pad for ever.
    start = torch.cat([reply.prompt_rows, renditions.voice_rows["rms"][None], reply.reply_rows])
    streamed = StreamedRows(start, num_replaced=5)
    streamed.extend(renditions.end_row[None])
    streamed.complete(renditions.pad_row)
    mask, pad, bos = (TALKER[f"tts_codec_{name}_token_id"] for name in ("mask", "pad", "start"))
    with torch.no_grad():
        expected = network.model.embed_tokens(torch.tensor([*[mask] * 5, pad, bos, *codes]))
    streamed.apply(expected, 0)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_what_is_said_step_by_step_is_what_the_whole_sequence_predicts():
    network = _network()
    reply, renditions = _reply(torch.Generator().manual_seed(1))

    said = codes_said(network, reply, renditions, "slt", most=12)

    with torch.no_grad():
        rows = rows_beside(network, reply, renditions, "slt", said)
        hidden = network.thinker_to_talker_proj(rows[None])
        output = network.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        logits = network.codec_head(output[0])
        logits[:, network.codec_bos_token] = -torch.inf
    predicted = logits.argmax(-1)[len(reply.prompt_rows) + 1 :][: len(said)]
    assert len(said) > 0
    assert predicted.tolist() == said.tolist()
