"""Conversations as a thinker's token ids, with a mask of the tokens to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from training.spoken_sums.conversations import Turn
from training.spoken_sums.tokenizer import HEARD_WORDS, NOISE, SYSTEM_PROMPT


@dataclass(slots=True)
class Rendered:
    """One conversation.

    Attributes:
        token_ids: of the whole conversation.
        learnt: for each token, true if the model learns to generate it.
        sounds: for each spoken turn, the start and number of its rows.
    """

    token_ids: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)
    sounds: list[tuple[int, int]] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], *, learnt: bool = False) -> None:
        """Append tokens."""
        self.token_ids += token_ids
        self.learnt += [learnt] * len(token_ids)


class Renderer:
    """Renders conversations like the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        vocabulary = tokenizer.get_vocab()
        self.audio_id = vocabulary["<|AUDIO|>"]
        self.noise_id = vocabulary[NOISE]
        self._heard = {word: vocabulary[f"Ġ{word}"] for word in HEARD_WORDS}
        self.all_heard_ids = [*self._heard.values(), self.noise_id]
        self._begin = self.ids("<|audio_bos|>")
        self._end = self.ids("<|audio_eos|>")

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids."""
        if text not in self._known:
            if len(self._known) > 200_000:
                self._known.clear()
            self._known[text] = self.tokenizer(text)["input_ids"]
        return self._known[text]

    def heard_ids(self, words: str) -> list[int]:
        """Return the tower's targets: a token per word; runs of others are one :data:`NOISE`."""
        heard: list[int] = []
        for word in words.split():
            token_id = self._heard.get(word, self.noise_id)
            if token_id != self.noise_id or not heard or heard[-1] != self.noise_id:
                heard.append(token_id)
        return heard

    def render(self, turns: Sequence[Turn], sounds: Sequence[int | None]) -> Rendered:
        """Render a conversation.

        Args:
            turns: its turns.
            sounds: number of sound rows of each turn's question; None if it is typed.
        """
        out = Rendered()
        out.add(self.ids(f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"))
        for turn, rows in zip(turns, sounds, strict=True):
            out.add(self.ids("<|im_start|>user\n"))
            if rows is None:
                out.add(self.ids(turn.typed))
            else:
                out.add(self._begin)
                out.sounds.append((len(out.token_ids), rows))
                out.add([self.audio_id] * rows)
                out.add(self._end)
            out.add(self.ids("<|im_end|>\n<|im_start|>assistant\n"))
            out.add([*self.ids(turn.reply), *self.ids("<|im_end|>")], learnt=True)
            out.add(self.ids("\n"))
        return out
