"""A kind of stage with a separate tokenizer for its tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from stages import ModelReference, Stage, StageConfig, register_stage_kind
from stages.stage import OneOrMore
from tests.support.fake_stage import FakeStage

TOKENIZING = "tokenizing"
"""Its name in YAML once this module is imported."""


@register_stage_kind
class TokenizingConfig(StageConfig):
    """A config as a user would write it.

    Attributes:
        lexicon: the checkpoint with the tokenizer.
    """

    kind: Literal["tokenizing"]
    lexicon: ModelReference
    final_output: Annotated[tuple[Literal["text"], ...], OneOrMore] = ()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.lexicon)
        return read

    def build_stage(self, name: str) -> Stage:
        return Tokenizing(name, self)


class Tokenizing(FakeStage):
    """Names the tokens of its text."""

    def __init__(self, name: str, config: TokenizingConfig) -> None:
        super().__init__(name, final=bool(config.final_output))
        self._tokenizer = config.load_tokenizer()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer
