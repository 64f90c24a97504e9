"""The thinker for training: transformers' modules, batched over padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from training.spoken_sums.sizes import omni_config


def build_thinker(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """Return a thinker with random weights from torch's seed."""
    config: Any = omni_config(tokenizer).thinker_config
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")):
            parameter.data.mul_(0.5)
        if "conv" in name and parameter.ndim == 3:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    # Fixed, so that tower and decoder can be trained separately and in parallel.
    embedding = model.model.language_model.embed_tokens.weight
    nn.init.normal_(embedding, std=0.5, generator=torch.Generator().manual_seed(0))
    embedding.requires_grad_(False)
    return model


def embedding_of(model: Qwen2_5OmniThinkerForConditionalGeneration) -> Tensor:
    """Return the word embeddings, ``(vocabulary, width)``."""
    weight: Tensor = model.model.language_model.embed_tokens.weight
    return weight


def num_rows(frames: int) -> int:
    """Return the number of rows that the tower outputs for a sound."""
    return ((frames - 1) // 2 + 1) // 2


def silence_row(model: Qwen2_5OmniThinkerForConditionalGeneration) -> Tensor:
    """Return the tower's row for silence: the embedding of the padding token, ``(width,)``."""
    return embedding_of(model)[model.model.language_model.padding_idx].detach()


def text_hidden(
    model: Qwen2_5OmniThinkerForConditionalGeneration, embeds: Tensor, positions: Tensor
) -> Tensor:
    """Compute hidden states ``(rows, tokens, width)``; padding is at the end, where it is unseen.

    Equals the modules' own forward, in bfloat16 and with fewer and larger products: otherwise the
    attention and rotary kernels take most of the time on a CPU.
    """
    decoder = model.model.language_model
    hidden = embeds.float()
    cos, sin = decoder.rotary_emb(hidden, positions.expand(3, *positions.shape))
    half = cos.shape[-1] // 2
    cos = cos.unsqueeze(1).bfloat16()
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1).unsqueeze(1).bfloat16()
    tokens = hidden.shape[1]
    mask = torch.full((tokens, tokens), -1e9, dtype=torch.bfloat16).triu(1)
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        mixed = functional.linear(
            _norm(layer.input_layernorm, hidden),
            torch.cat([part.weight for part in parts]).bfloat16(),
            torch.cat([part.bias for part in parts]).bfloat16(),
        ).unflatten(-1, (3, -1, 2 * half))
        turned, values = mixed[:, :, :2].permute(2, 0, 3, 1, 4), mixed[:, :, 2].transpose(1, 2)
        queries, keys = (turned * cos + turned.roll(half, -1) * sin).unbind(0)
        scores = queries @ keys.transpose(-1, -2) * attention.scaling + mask
        seen = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        hidden = hidden + functional.linear(seen, attention.o_proj.weight.bfloat16())
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16()
        gate, up = functional.linear(_norm(layer.post_attention_layernorm, hidden), both).chunk(
            2, -1
        )
        inner = functional.silu(gate) * up
        hidden = hidden + functional.linear(inner, mlp.down_proj.weight.bfloat16())
    return _norm(decoder.norm, hidden)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    weight = norm.weight
    return functional.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon).bfloat16()


def mean_loss(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    hidden: Tensor,
    token_ids: Tensor,
    learnt: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of learnt tokens, and which of them are predicted correctly."""
    wanted = learnt[:, 1:]
    logits = functional.linear(hidden[:, :-1][wanted].float(), model.lm_head.weight)
    targets = token_ids[:, 1:][wanted]
    return functional.cross_entropy(logits, targets), logits.argmax(-1) == targets


def tower_rows(
    model: Qwen2_5OmniThinkerForConditionalGeneration, features: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run the audio tower on sounds that fit its window.

    Args:
        model: contains the tower.
        features: of each sound, ``(bands, frames)``.

    Returns:
        Rows ``(sounds, max rows, width)`` and the number per sound; the rest is padding.

    Raises:
        ValueError: a sound is longer than the tower's window.
    """
    tower = model.model.audio_tower
    frames = torch.tensor([each.shape[1] for each in features])
    if int(frames.max()) > 2 * tower.n_window:
        raise ValueError(f"sounds of at most {2 * tower.n_window} frames, got {int(frames.max())}")
    padded = pad_sequence([each.T for each in features], batch_first=True).transpose(1, 2)
    is_frame = (torch.arange(padded.shape[2]) < frames.unsqueeze(1)).unsqueeze(1)
    hidden = functional.gelu(tower.conv1(padded)) * is_frame
    hidden = functional.gelu(tower.conv2(hidden)).transpose(1, 2)
    halves = (frames - 1) // 2 + 1
    hidden = hidden + tower.positional_embedding.positional_embedding[: hidden.shape[1]]
    hides = torch.where(torch.arange(hidden.shape[1]) < halves.unsqueeze(1), 0.0, -1e9)
    mask = hides[:, None, None, :].to(hidden.dtype)
    for layer in tower.layers:
        hidden = hidden + _attend(layer.self_attn, layer.self_attn_layer_norm(hidden), mask)
        hidden = hidden + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(hidden))))
    if hidden.shape[1] % 2:
        hidden = functional.pad(hidden, (0, 0, 0, 1))
    pooled = hidden.unflatten(1, (-1, 2)).mean(2)
    rows: Tensor = tower.proj(tower.ln_post(pooled))
    return rows, halves // 2


def _attend(attention: Any, hidden: Tensor, mask: Tensor) -> Tensor:
    def heads(projection: nn.Module) -> Tensor:
        split: Tensor = projection(hidden).unflatten(-1, (attention.num_heads, -1))
        return split.transpose(1, 2)

    queries, keys, values = map(heads, (attention.q_proj, attention.k_proj, attention.v_proj))
    scores = queries @ keys.transpose(-1, -2) * attention.scaling + mask
    seen: Tensor = attention.out_proj((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))
    return seen
