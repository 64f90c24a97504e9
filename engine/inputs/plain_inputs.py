"""Prompts of a decoder that reads nothing but text, token ids and embeddings."""

from __future__ import annotations

from engine.inputs.multimodal_data import refuse_items
from engine.inputs.prompt_processor import PromptContent, PromptProcessor, PromptSources
from engine.inputs.prompt_tokens import resolve_prompt
from engine.interface.prompts import Prompt
from engine.requests.content_spans import embeds_spans

__all__ = ["PlainPromptProcessor"]


class PlainPromptProcessor(PromptProcessor):
    """Makes token ids, or embeddings in their place.

    Args:
        sources: of the model.
    """

    def __init__(self, sources: PromptSources) -> None:
        self._tokenizer = sources.tokenizer
        self._limits = sources.limits

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """See :meth:`PromptProcessor.process`."""
        refuse_items(prompt)
        return self._resolve(prompt)

    def _resolve(self, prompt: Prompt) -> PromptContent:
        limits = self._limits
        token_ids, embeds = resolve_prompt(
            prompt,
            self._tokenizer,
            vocab_size=limits.vocab_size,
            hidden_size=limits.hidden_size,
            dtype=limits.dtype,
        )
        spans = () if embeds is None else embeds_spans(embeds, limits.block_size)
        return PromptContent(token_ids, spans, embeds=embeds)
