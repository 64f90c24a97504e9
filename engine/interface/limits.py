"""What one request may ask for, at most."""

from __future__ import annotations

from pydantic import Field

from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import Settings

__all__ = ["RequestLimits"]

_MEND = "or raise engine.limits"


class RequestLimits(Settings):
    """What one request may ask for, at most; ``limits:`` in an ``engine:`` block of YAML.

    Each is checked before the work that it bounds, and its error names the setting. What follows
    from the model needs no setting: token ids, rows of embeddings and placeholders are at most as
    many as ``max_model_len``, lists of token ids as long as the vocabulary.

    Attributes:
        max_prompt_chars: characters of a prompt's text, or of what a chat template makes of
            messages, which the tokenizer then reads. None takes as many as ``max_model_len`` of
            the tokenizer's longest tokens have, but no fewer than 65,536 and no more than
            4,194,304 (a tokenizer takes some 230 bytes of memory for each).
        max_completions: ``n`` of the sampling parameters.
        max_logprobs: ``logprobs`` of the sampling parameters.
        max_stop_strings: how many ``stop`` may have.
        max_stop_chars: how many characters they may have together; text is held back and compared
            with them token by token.
        max_items: images, sounds and videos of a prompt, all together.
        tokenizer_seconds: of CPU time that a checkpoint's tokenizer may take for one prompt, if it
            cuts text by patterns that are none of the published ones: they need not end.
        template_seconds: of CPU time that a checkpoint's chat template may take for one prompt.
            Templates come with checkpoints, and are programs that need not end.
        template_bytes: of memory that the process in which templates run may take.
    """

    max_prompt_chars: int | None = Field(default=None, ge=1)
    max_completions: int = Field(default=128, ge=1)
    max_logprobs: int = Field(default=128, ge=0)
    max_stop_strings: int = Field(default=32, ge=0)
    max_stop_chars: int = Field(default=1024, ge=0)
    max_items: int = Field(default=256, ge=0)
    tokenizer_seconds: float = Field(default=30.0, gt=0.0, le=3600.0)
    template_seconds: float = Field(default=5.0, gt=0.0, le=3600.0)
    template_bytes: int = Field(default=2**29, ge=2**27)

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse parameters that ask for more.

        Raises:
            PlacedError: says of which field, and how to raise the limit.
        """
        if params.n > self.max_completions:
            raise PlacedError(
                ("n",),
                f"n is {params.n}, but at most {self.max_completions} completions are made of a "
                f"prompt; ask for fewer {_MEND}.max_completions",
            )
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise PlacedError(
                ("logprobs",),
                f"logprobs is {params.logprobs}, but at most {self.max_logprobs} tokens are "
                f"reported; ask for fewer {_MEND}.max_logprobs",
            )
        if len(params.stop) > self.max_stop_strings:
            raise PlacedError(
                ("stop",),
                f"stop has {len(params.stop)} strings, but at most {self.max_stop_strings} are "
                f"looked for; give fewer {_MEND}.max_stop_strings",
            )
        num_chars = sum(map(len, params.stop))
        if num_chars > self.max_stop_chars:
            raise PlacedError(
                ("stop",),
                f"the stop strings have {num_chars} characters, but at most "
                f"{self.max_stop_chars} are looked for; shorten them {_MEND}.max_stop_chars",
            )

    def check_items(self, num_items: int) -> None:
        """Refuse a prompt that shows more images and the like; ``ValueError``."""
        if num_items > self.max_items:
            raise ValueError(
                f"the prompt shows {num_items} images, sounds and videos, but at most "
                f"{self.max_items} are taken; show fewer {_MEND}.max_items"
            )
