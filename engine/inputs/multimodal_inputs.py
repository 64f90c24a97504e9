"""Images and the like of a prompt, as features, in the places that they take.

A video in step with its own sound: rows of both in the order in which they are seen and heard.

::

    prompt      | a | <video> |  z  |
    expanded    | a | begin | v v v | ~ ~ ~ | v v v | ~ ~ ~ | ~ ~ | end | z |
    seconds             |<--- 0 to 2 -->|<--- 2 to 4 -->| 4 to

Each chunk of two seconds has the rows of the video (v) that are shown in it, then those of the
sound (~) that are heard in it. So the two items come in pieces, and each tower still runs once.

Source: Xu et al., arXiv:2503.20215, section 2.2, and its processor in transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from torch import Tensor

from engine.inputs.encoder_inputs import features_hash
from engine.inputs.feature_makers import FeatureTaker, MissingFeatureMaker, load_feature_makers
from engine.inputs.prompt_processor import (
    PlainPromptProcessor,
    PromptContent,
    PromptSources,
    items_of,
)
from engine.inputs.prompt_tokens import check_item
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    VideoFeatures,
)
from engine.requests.encoder_input import Modality, MultiModalInput, PromptPositions, item_spans
from prefix_cache import ContentSpan

__all__ = ["AudioInVideo", "MultiModalPromptProcessor"]


@dataclass(frozen=True, slots=True)
class AudioInVideo:
    """How a model takes a video with its sound.

    Attributes:
        places_per_chunk: how far in time, in the places of rows, a chunk reaches.
    """

    begin_id: int
    end_id: int
    places_per_chunk: int

    def __post_init__(self) -> None:
        if self.places_per_chunk < 1:
            raise ValueError(
                f"a chunk of video and sound must have a place, got {self.places_per_chunk}"
            )

    def interleave(
        self, video: MultiModalInput, sound: MultiModalInput, times: tuple[Tensor, Tensor]
    ) -> tuple[MultiModalInput, ...]:
        """Cut a video and its sound in pieces, in the order of their places.

        Args:
            video: the whole video, at the position of its placeholder.
            times: of each one's rows, in places from its beginning, never falling. They are the
                model's own, so that a row is in the chunk of its place. (At a few odd
                frame rates, such as 2/49 s to a grid, transformers' processor rounds otherwise
                than its model, and a grid on the border of two chunks goes into the other.)

        Returns:
            The pieces, from the position after that of :attr:`begin_id` on without a gap.
        """
        # All of it keys each of its blocks: where a row lies depends on how both are cut.
        digest = hashlib.sha256(video.content_hash + sound.content_hash).digest()
        length = video.length + sound.length + 2
        whole = ContentSpan("video with sound", video.offset, length, digest)
        offset = video.offset + 1
        pieces: list[MultiModalInput] = []
        chunks = (self._chunks(rows) for rows in times)
        for chunk in zip_longest(*chunks):
            for item, rows in zip((video, sound), chunk, strict=True):
                if rows is not None:
                    pieces.append(item.piece(rows, offset, whole))
                    offset += pieces[-1].length
        return tuple(pieces)

    def _chunks(self, times: Tensor) -> Iterator[range]:
        """Rows of one chunk after the other, as transformers cuts them.

        A row that comes late by several chunks begins only the next one.
        """
        first, limit = 0, self.places_per_chunk
        for row, time in enumerate(times.tolist()):
            if time >= limit:
                yield range(first, row)
                first = row
                limit += self.places_per_chunk
        yield range(first, len(times))


class ItemSide(Protocol):
    """What has to be known of a model that is shown images and the like, before it runs."""

    @property
    def placeholders(self) -> Mapping[Modality, int]:
        """Ids of the tokens that stand for them in prompts."""

    @property
    def towers(self) -> Mapping[Modality, FeatureTaker]:
        """What makes their rows."""

    @property
    def audio_in_video(self) -> AudioInVideo | None:
        """How the model takes a video with its own sound; None if it does not."""

    def position_ids(
        self, prompt_ids: Sequence[int], multimodal_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """Places of a prompt's tokens, ``(axes, tokens)``; None where they are indices."""


class MultiModalPromptProcessor(PlainPromptProcessor):
    """Expands placeholders, and makes what the model's towers take.

    Args:
        sources: of a model that is an :class:`ItemSide`. A processor of features that the
            checkpoint lacks is reported when it is needed.
    """

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._model: ItemSide = sources.model
        checkpoint = sources.checkpoint
        self._makers = load_feature_makers(
            checkpoint.path,
            self._model.towers,
            sources.media_limits,
            trust_remote_code=checkpoint.trust_remote_code,
        )
        self.modalities += tuple(
            modality
            for modality, maker in self._makers.items()
            if not isinstance(maker, MissingFeatureMaker)
        )
        self._row_bytes = sources.limits.hidden_size * sources.limits.dtype.itemsize
        self._cache_bytes = sources.encoder_cache_bytes

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Put each item that a prompt shows in the place of its placeholder.

        A sound or an image alone is a user's message that holds nothing else.

        Raises:
            ValueError: see :meth:`PromptProcessor.process`; there are more items than
                placeholders or fewer, or an item cannot be held in the encoder cache.
        """
        prompt = self._as_message(prompt)
        content = self._resolve(prompt)
        if content.embeds is not None:
            return content
        items = items_of(prompt, tuple(self._makers))
        self._limits.requests.check_items(sum(map(len, items.values())))
        for modality, given in items.items():
            self._check_count(modality, content.token_ids, len(given))
        modality_of = {token_id: name for name, token_id in self._model.placeholders.items()}
        remaining = {modality: iter(enumerate(given)) for modality, given in items.items()}
        expanded: list[int] = []
        inputs: list[MultiModalInput] = []
        for token_id in content.token_ids:
            if token_id not in modality_of:
                expanded.append(token_id)
                continue
            modality = modality_of[token_id]
            number, item = next(remaining[modality])
            try:
                ids, entries = self._expand(modality, item, len(expanded), cache_salt)
            except ValueError as error:
                raise ValueError(f"{modality} {number}: {error}") from error
            inputs += entries
            expanded += ids
            # Before the next one is read.
            self._limits.check_length(len(expanded))
        table = self._model.position_ids(expanded, inputs)
        return PromptContent(
            expanded,
            item_spans(inputs),
            multimodal_inputs=tuple(inputs),
            positions=None if table is None else PromptPositions.of(table),
        )

    def _as_message(self, prompt: Prompt) -> Prompt:
        lone = prompt
        if isinstance(prompt, ExplicitEncoderDecoderPrompt) and prompt.decoder_prompt is None:
            lone = prompt.encoder_prompt
        if not isinstance(lone, AudioPrompt | ImagePrompt):
            return prompt
        modality: Modality = "audio" if isinstance(lone, AudioPrompt) else "image"
        if modality not in self._makers:
            raise ValueError(f"this model takes no {modality}; it takes {', '.join(self._makers)}")
        message = {"role": "user", "content": [{"type": modality}]}
        item = lone if isinstance(lone, AudioPrompt) else lone.image
        return ChatPrompt((message,), multi_modal_data={modality: [item]})

    def _check_count(self, modality: Modality, token_ids: Sequence[int], num_items: int) -> None:
        placeholder = self._model.placeholders[modality]
        num_places = sum(token_id == placeholder for token_id in token_ids)
        if num_places != num_items:
            fix = (
                f"give one {modality} for each placeholder"
                if num_places > num_items
                else f"write a placeholder where each {modality} belongs, or, in chat messages, a "
                f"part of type {modality}"
            )
            raise ValueError(
                f"the prompt has {num_places} {modality} placeholders ({self._named(placeholder)}),"
                f" but {num_items} {modality} items were given; {fix}"
            )

    def _named(self, placeholder: int) -> str:
        """A placeholder as it is written, where the checkpoint has a tokenizer."""
        if self._tokenizer is None:
            return f"token {placeholder}"
        return f"{self._tokenizer.convert_ids_to_tokens(placeholder)}, token {placeholder}"

    def _expand(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> tuple[list[int], tuple[MultiModalInput, ...]]:
        """What comes in the place of a placeholder: token ids, and whose rows replace them."""
        way = self._model.audio_in_video
        item = self._makers[modality].read(item, hears=way is not None, check_rows=self._check_rows)
        entry = self._input(modality, item, offset, cache_salt)
        if not isinstance(item, VideoFeatures) or item.audio is None:
            return [self._model.placeholders[modality]] * entry.length, (entry,)
        if way is None:
            raise ValueError("this model takes no video with its own sound; leave out its audio")
        try:
            sound = self._input("audio", item.audio, offset, cache_salt)
        except ValueError as error:
            raise ValueError(f"its audio: {error}") from error
        towers = self._model.towers
        video_times, sound_times = (
            towers[each.modality].places(each.features)[0] for each in (entry, sound)
        )
        pieces = way.interleave(entry, sound, (video_times, sound_times))
        ids = [way.begin_id]
        for piece in pieces:
            ids += [self._model.placeholders[piece.modality]] * piece.length
        return [*ids, way.end_id], pieces

    def _check_rows(self, num_rows: int) -> None:
        check_item(num_rows, self._row_bytes, self._cache_bytes)
        self._limits.check_length(num_rows)

    def _input(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> MultiModalInput:
        features = self._makers[modality].make(item)
        length = self._model.towers[modality].num_rows(features)
        check_item(length, self._row_bytes, self._cache_bytes)
        digest = features_hash(features, length, cache_salt)
        return MultiModalInput(modality, offset, length, digest, features)
