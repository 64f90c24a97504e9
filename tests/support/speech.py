"""Speech prompts: made up, cut into chunks, or computed by transformers' thinker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5OmniForConditionalGeneration

from engine import SpeechPrompt

WIDTH = 64
"""The width of a row for the seeded talker."""

_ROWS_OF_FAMILY = 80


def made_up(
    family: int, num_prompt: int, num_reply: int, *, places: bool = False, speaker: str = "Chelsie"
) -> SpeechPrompt:
    """Return rows of noise. Those of one family agree in the shared prompt rows, and in replies."""
    generator = torch.Generator().manual_seed(family)
    prompt = torch.randn(_ROWS_OF_FAMILY, WIDTH, generator=generator)[:num_prompt]
    reply = torch.randn(_ROWS_OF_FAMILY, WIDTH, generator=generator)[:num_reply]
    table = None
    if places:
        time = [0, 1, 2, 2, 2, 2]
        height, width = [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]
        table = torch.tensor([time, height, width])
        rest = torch.arange(max(0, num_prompt - 6)) + 4
        table = torch.cat([table, rest.expand(3, -1)], dim=1)[:, :num_prompt]
    return SpeechPrompt(prompt, reply, table, speaker)


def cut(prompt: SpeechPrompt, sizes: Sequence[int]) -> list[SpeechPrompt]:
    """Cut a prompt into chunks of ``sizes`` reply rows each, in turns; the first may have none."""
    chunks: list[SpeechPrompt] = []
    num_cut = number = 0
    while not chunks or not chunks[-1].is_last:
        size = sizes[number % len(sizes)]
        is_first = not chunks
        reply = prompt.reply_rows[num_cut : num_cut + size]
        num_cut += size
        number += 1
        chunks.append(
            SpeechPrompt(
                prompt.prompt_rows if is_first else prompt.prompt_rows[:0],
                reply,
                prompt.positions if is_first else None,
                prompt.speaker,
                is_last=num_cut >= prompt.reply_rows.shape[0],
                prompt_ids=prompt.prompt_ids if is_first else (),
            )
        )
    return chunks


@torch.inference_mode()
def spoken(
    model: Qwen2_5OmniForConditionalGeneration,
    inputs: Mapping[str, Tensor],
    text_ids: Sequence[int],
    speaker: str = "Chelsie",
) -> SpeechPrompt:
    """Return the inputs of transformers' talker from its thinker, computed in one pass."""
    prompt_ids = inputs["input_ids"]
    num_prompt = prompt_ids.shape[1]
    ids = torch.cat([prompt_ids, torch.tensor([list(text_ids[:-1])], dtype=torch.int64)], dim=1)
    items = {
        name.removeprefix("thinker_"): value
        for name, value in inputs.items()
        if name not in ("input_ids", "attention_mask")
    }
    thinker: Any = model.thinker
    thinker.rope_deltas = None  # of an earlier call
    output = thinker(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        output_hidden_states=True,
        use_cache=False,
        **items,
    )
    embeds = output.hidden_states[0][0].clone()
    config = model.config.thinker_config
    shown = (config.image_token_index, config.audio_token_index, config.video_token_index)
    embeds[:num_prompt][torch.isin(prompt_ids[0], torch.tensor(shown))] = 0
    rows = embeds + output.hidden_states[-1][0]
    mask = inputs.get("feature_attention_mask")
    places, _ = model.talker.get_rope_index(
        prompt_ids,
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(prompt_ids),
        False,
        None if mask is None else mask.sum(dim=1),
        inputs.get("video_second_per_grid"),
    )
    return SpeechPrompt(rows[:num_prompt], rows[num_prompt:], places[:, 0].long(), speaker)
