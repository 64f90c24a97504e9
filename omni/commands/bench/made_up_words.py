"""Texts of about so many tokens, for a tokenizer that nobody has seen."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["TokenLengths", "made_up_text"]

_COMMON = """
about above after again air all along also always animal another answer any around ask away back
because before began below between big book both boy call came can car carry change city close
come could country cut day different does down each earth eat end enough even every example eye
face family far father feet few find first follow food form found four from girl give good great
group grow hand hard have head hear help here high home house idea important keep kind know land
large last later learn leave left letter life light line list listen little live long look made
make many mean men might mile more most mother mountain move much must name near need never new
next night now number off often old once one only open other our out over own page paper part
people picture place plant play point press read really right river run said same saw say school
sea second see seem sentence set she should show side small some something sometimes song soon
sound spell stand start state still stop story study such take talk tell than that them then there
these thing think this those thought three through time together took tree try turn under until
use very walk want watch water way well went were what when where which while white who why will
with without word work world would write year
"""
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """How many tokens texts of such words take, on the other side.

    Attributes:
        per_word: tokens of a word.
        around: tokens of a prompt of no words, such as those of a chat template.
    """

    per_word: float = 1.0
    around: float = 0.0

    @classmethod
    def measured(cls, shorter: tuple[int, int], longer: tuple[int, int]) -> TokenLengths:
        """Find them from two prompts, each given as its words and its tokens.

        Raises:
            ValueError: the longer one does not have more tokens.
        """
        (fewer_words, fewer_tokens), (more_words, more_tokens) = shorter, longer
        if more_tokens <= fewer_tokens:
            raise ValueError(
                f"{more_words} words are said to be {more_tokens} tokens, no more than "
                f"{fewer_words} words, {fewer_tokens}: prompts of a length cannot be made up"
            )
        per_word = (more_tokens - fewer_tokens) / (more_words - fewer_words)
        return cls(per_word, max(0.0, fewer_tokens - per_word * fewer_words))

    def num_words(self, num_tokens: int, *, around: bool = False) -> int:
        """How many words make about so many tokens: at least one, of no tokens none.

        Args:
            num_tokens: that are wanted.
            around: whether they are to hold what stands around the words too.
        """
        if num_tokens <= 0:
            return 0
        return max(1, round((num_tokens - (self.around if around else 0.0)) / self.per_word))


def made_up_text(num_words: int, *seeds: object) -> str:
    """A text of common words, the same for the same seeds, and no other's beginning."""
    chance = random.Random(" ".join(map(str, seeds)))
    return " ".join(chance.choices(_WORDS, k=num_words))
