"""The talker: maps a thinker's rows to codes, with one rendition per answer and voice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniTalkerForConditionalGeneration,
)

from training.spoken_sums.module_training import ModuleTraining

_HIDDEN, _OFF = 0.25, 0.4
_OTHER_STATES = 3  # one reply in so many
_ROW_NOISE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A thinker's prompt and reply, as the talker's input.

    Attributes:
        answer: the text to speak.
        prompt_rows: ``(n, width)``, hidden states plus embeddings; for sound hidden states only.
        reply_rows: ``(k, width)`` of all the reply's tokens except the last, which ends it.
        reply_embeds: the embeddings in them.
    """

    answer: str
    prompt_rows: Tensor
    reply_rows: Tensor
    reply_embeds: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Renditions:
    """The codes of the answers, and the special rows that go with them.

    Attributes:
        codes: by answer and voice.
        voice_rows: the thinker's embedding that opens a reply, ``(width,)`` by voice.
        end_row: the embedding after a reply's last row, ``(width,)``.
        pad_row: the embedding of all later positions, ``(width,)``.
        similar: ``(codes, n)`` int64, for each code the n most similar ones.
    """

    codes: Mapping[tuple[str, str], Tensor]
    voice_rows: Mapping[str, Tensor]
    end_row: Tensor
    pad_row: Tensor
    similar: Tensor


@dataclass(frozen=True, slots=True)
class TalkerBudget:
    """Steps and hyperparameters of the training.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        batch: replies per step.
        replies: total number of the thinker's replies in the training data.
        half: if true, compute products in bfloat16.
        seed: for weights and batches.
    """

    steps: int
    rate: float = 4e-3
    batch: int = 16
    replies: int = 2400
    half: bool = True
    seed: int = 0


def make_talker(config: Any, seed: int) -> Any:
    """Return the initialized network."""
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    network = Qwen2_5OmniTalkerForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.4)
        network.model.embed_tokens.weight.normal_(0, 0.5)
    return network


def train_talker(
    config: Any,
    replies: Sequence[Reply],
    renditions: Renditions,
    budget: TalkerBudget,
    file: Path,
) -> None:
    """Train on replies in both voices; answers are drawn uniformly."""
    network = make_talker(config, budget.seed)
    training = ModuleTraining(network, file, budget.steps, budget.rate)
    by_answer: dict[str, list[Reply]] = {}
    for reply in replies:
        by_answer.setdefault(reply.answer, []).append(reply)
    states = torch.cat([reply.reply_rows - reply.reply_embeds for reply in replies])
    answers, voices = sorted(by_answer), sorted(renditions.voice_rows)

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(budget.seed + step)

        def draw(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        inputs, targets = [], []
        for _ in range(budget.batch):
            rows = by_answer[answers[draw(len(answers))]]
            reply, voice = rows[draw(len(rows))], voices[draw(len(voices))]
            codes = renditions.codes[reply.answer, voice]
            heard = _mistaken(codes, renditions.similar, network.codec_mask_token, generator)
            read = (
                _with_other_states(reply, states, generator) if draw(_OTHER_STATES) == 0 else reply
            )
            rows_in = rows_beside(network, read, renditions, voice, heard)
            noise = torch.randn(rows_in.shape, generator=generator)
            inputs.append(rows_in + _ROW_NOISE * noise)
            end = torch.tensor([network.codec_eos_token])
            targets.append(torch.cat([codes, end]))
        half = torch.autocast("cpu", torch.bfloat16, enabled=budget.half)
        with half, sdpa_kernel(SDPBackend.MATH):
            logits = _logits(network, inputs, [len(target) for target in targets])
        wanted = torch.cat(targets)
        right = (logits.argmax(-1) == wanted).float().mean().item()
        losses = cross_entropy(logits.float(), wanted, reduction="none")
        # Most codes follow from the previous one; the first of a word do not, so they weigh more.
        doubt = 1 - (-losses.detach()).exp()
        return (losses * doubt).mean(), {"right": right}

    training.run(loss_of)


def codes_said(
    network: Any,
    reply: Reply,
    renditions: Renditions,
    voice: str,
    most: int = 160,
) -> Tensor:
    """Generate greedily, ``(codes,)`` int64; stop at pad or end, never sample bos."""
    said: list[int] = []
    ends = {network.codec_eos_token, network.codec_pad_token}
    cache = None
    with torch.no_grad():
        rows = rows_beside(network, reply, renditions, voice, torch.tensor(said, dtype=torch.long))
        while len(said) < most:
            hidden = network.thinker_to_talker_proj(
                rows[None] if cache is None else rows[None, -1:]
            )
            output = network.model(inputs_embeds=hidden, use_cache=True, past_key_values=cache)
            cache = output.past_key_values
            logits = network.codec_head(output.last_hidden_state[0, -1])
            logits[network.codec_bos_token] = -torch.inf
            code = int(logits.argmax())
            if code in ends:
                break
            said.append(code)
            rows = rows_beside(network, reply, renditions, voice, torch.tensor(said))
    return torch.tensor(said, dtype=torch.long)


def _with_other_states(reply: Reply, states: Tensor, generator: torch.Generator) -> Reply:
    """Combine the reply's embeddings with hidden states of random other words.

    The codes must follow from the embeddings, which are fixed: hidden states keep changing while
    the thinker is trained.
    """
    drawn = torch.randint(len(states), (len(reply.reply_embeds),), generator=generator)
    return replace(reply, reply_rows=reply.reply_embeds + states[drawn])


def _mistaken(codes: Tensor, similar: Tensor, mask: int, generator: torch.Generator) -> Tensor:
    """Corrupt codes: replace some by similar ones or, in every fourth reply, mask some.

    With always correct codes the talker learns mainly from the previous code and little from the
    text, and one slip leads into another word.
    """
    chance, share = torch.rand(2, generator=generator).tolist()
    drawn = torch.rand(len(codes), generator=generator)
    if chance < _HIDDEN:
        return codes.masked_fill(drawn < share, mask)
    row = torch.randint(similar.shape[1], (len(codes),), generator=generator)
    return torch.where(drawn < _OFF * share, similar[codes, row], codes)


def rows_beside(
    network: Any,
    reply: Reply,
    renditions: Renditions,
    voice: str,
    codes: Tensor,
) -> Tensor:
    """Return inputs ``(n + 2 + codes, width)`` in the layout of the family's ``generate``."""
    following = torch.cat([reply.reply_rows, renditions.end_row[None]])
    missing = len(codes) + 1 - len(following)
    if missing > 0:
        following = torch.cat([following, renditions.pad_row.expand(missing, -1)])
    beside = torch.cat([renditions.voice_rows[voice][None], following[: len(codes) + 1]])
    special = torch.tensor([network.codec_pad_token, network.codec_bos_token])
    embedded = network.model.embed_tokens(torch.cat([special, codes]))
    return torch.cat([reply.prompt_rows, embedded + beside])


def _logits(network: Any, inputs: Sequence[Tensor], counts: list[int]) -> Tensor:
    """Return the logits of the last ``counts`` rows of each input, concatenated."""
    longest = max(map(len, inputs))
    padded = [torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows))) for rows in inputs]
    hidden = network.thinker_to_talker_proj(torch.stack(padded))
    output = network.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    picked = [
        row[len(rows) - count : len(rows)]
        for row, rows, count in zip(output, inputs, counts, strict=True)
    ]
    logits: Tensor = network.codec_head(torch.cat(picked))
    return logits
