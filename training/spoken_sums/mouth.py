"""Talker training data from all parts, and the checkpoint of all parts."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.checkpoint import SPEAKERS, write_checkpoint
from training.spoken_sums.codes import learn_codebook
from training.spoken_sums.dit import voices_of
from training.spoken_sums.questions import load_questions
from training.spoken_sums.replies import draw_typed, draw_with_sound, replies_of
from training.spoken_sums.sizes import omni_config
from training.spoken_sums.speech import answers_spoken
from training.spoken_sums.talker import Renditions, TalkerBudget, train_talker
from training.spoken_sums.thinker import embedding_of

_NUM_SIMILAR = 6
_SPOKEN = 1 / 3
"""Share of the replies that answer a spoken question."""


def renditions_of(
    folder: Path,
    thinker: Qwen2_5OmniThinkerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> Renditions:
    """Return both voices' answers in codes, and the thinker's embeddings that go with them.

    Args:
        folder: the training folder; the codebook is learnt if it is missing.
        thinker: its embeddings are read.
        tokenizer: the thinker's.
    """
    speeches = answers_spoken(folder)
    codebook = learn_codebook([speech.mel for speech in speeches], folder / "codebook.pt")
    embeddings, ids = embedding_of(thinker).detach(), tokenizer.get_vocab()
    return Renditions(
        {
            (speech.utterance.text, speech.utterance.voice): codebook.encode(speech.mel)
            for speech in speeches
        },
        {voice: embeddings[ids[token]] for voice, token in SPEAKERS.values()},
        embeddings[ids["<tts_eos>"]],
        embeddings[ids["<tts_pad>"]],
        codebook.similar(_NUM_SIMILAR),
    )


def train_mouth_talker(
    folder: Path,
    thinker: Qwen2_5OmniThinkerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    budget: TalkerBudget,
) -> None:
    """Train the talker on a thinker's rows; its state is ``talker.pt`` in the folder.

    Args:
        folder: the training folder.
        thinker: the trained thinker.
        tokenizer: the thinker's.
        budget: steps, and number of replies.
    """
    draw = random.Random(budget.seed)
    torch.manual_seed(budget.seed)
    num_spoken = round(_SPOKEN * budget.replies)
    talks = list(draw_typed(budget.replies - num_spoken, draw))
    talks += islice(draw_with_sound(load_questions(folder / "questions"), draw), num_spoken)
    train_talker(
        omni_config(tokenizer).talker_config,
        replies_of(thinker, tokenizer, talks),
        renditions_of(folder, thinker, tokenizer),
        budget,
        folder / "talker.pt",
    )


def write_trained(
    folder: Path,
    checkpoint: Path,
    thinker: Qwen2_5OmniThinkerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Write the checkpoint from the states in a training folder."""

    def trained(name: str) -> Any:
        return torch.load(folder / f"{name}.pt", weights_only=True)["module"]

    parts = {"thinker": thinker.state_dict()}
    parts |= {name: trained(name) for name in ("talker", "dit", "bigvgan")}
    write_checkpoint(checkpoint, parts, voices_of(answers_spoken(folder)), tokenizer)
