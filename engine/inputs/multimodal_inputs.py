"""Images and the like of a prompt, as features, in the places that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_inputs import features_hash
from engine.inputs.feature_makers import FeatureMaker, load_feature_makers
from engine.inputs.multimodal_data import items_of
from engine.interface.prompts import Prompt, VideoFeatures
from engine.models.multimodal import MultiModalModel
from engine.requests.multimodal_input import Modality, MultiModalInput
from engine.requests.prompt_positions import PromptPositions
from engine.resources.byte_sizes import format_bytes

__all__ = ["ExpandedPrompt", "MultiModalInputProcessor"]


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt in which every item has as many placeholders as rows.

    Attributes:
        token_ids: the whole prompt.
        items: in the order of their places.
        positions: where tokens lie on several axes; None where places are indices.
    """

    token_ids: list[int]
    items: tuple[MultiModalInput, ...]
    positions: PromptPositions | None


class MultiModalInputProcessor:
    """Expands placeholders, and makes what the model's towers take.

    Args:
        model: knows its placeholders, and how many rows an item gives.
        makers: of features, for every modality that the model takes.
        max_item_tokens: most rows of one item, for which the encoder cache has room.
        row_bytes: of one of them.
        tokenizer: of the checkpoint, or None; names placeholders in messages.
    """

    def __init__(
        self,
        model: MultiModalModel,
        makers: Mapping[Modality, FeatureMaker],
        *,
        max_item_tokens: int,
        row_bytes: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._model = model
        self._makers = makers
        self._max_item_tokens = max_item_tokens
        self._row_bytes = row_bytes
        self._tokenizer = tokenizer

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        model: MultiModalModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        cache_bytes: int,
        row_bytes: int,
    ) -> MultiModalInputProcessor:
        """Load the processors that a checkpoint brings; one that it lacks is told when needed."""
        return cls(
            model,
            load_feature_makers(checkpoint.path, model),
            max_item_tokens=cache_bytes // row_bytes,
            row_bytes=row_bytes,
            tokenizer=tokenizer,
        )

    def process(
        self, token_ids: Sequence[int], prompt: Prompt, *, cache_salt: str | None = None
    ) -> ExpandedPrompt:
        """Put each item that a prompt shows in the place of its placeholder.

        Args:
            token_ids: of the prompt, with one placeholder for each item.
            prompt: the same before it was made into ids; shows the items.
            cache_salt: part of the items' hashes: items are shared only within one salt.

        Raises:
            ValueError: there are more items than placeholders or fewer, or an item cannot be
                read, processed, or held in the encoder cache.
        """
        items = items_of(prompt, tuple(self._makers))
        for modality, given in items.items():
            self._check_count(modality, token_ids, len(given))
        modality_of = {token_id: name for name, token_id in self._model.placeholders.items()}
        remaining = {modality: iter(enumerate(given)) for modality, given in items.items()}
        expanded: list[int] = []
        inputs: list[MultiModalInput] = []
        for token_id in token_ids:
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
        table = self._model.position_ids(expanded, inputs)
        return ExpandedPrompt(
            expanded, tuple(inputs), None if table is None else PromptPositions.of(table)
        )

    def _check_count(self, modality: Modality, token_ids: Sequence[int], num_items: int) -> None:
        placeholder = self._model.placeholders[modality]
        num_places = sum(token_id == placeholder for token_id in token_ids)
        if num_places != num_items:
            mend = (
                f"give one {modality} for each placeholder"
                if num_places > num_items
                else f"write a placeholder where each {modality} belongs, or, in chat messages, a "
                f"part of type {modality}"
            )
            raise ValueError(
                f"the prompt has {num_places} {modality} placeholders ({self._named(placeholder)}),"
                f" but {num_items} {modality} items were given; {mend}"
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
        entry = self._input(modality, item, offset, cache_salt)
        if not isinstance(item, VideoFeatures) or item.audio is None:
            return [self._model.placeholders[modality]] * entry.length, (entry,)
        way = self._model.audio_in_video
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

    def _input(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> MultiModalInput:
        features = self._makers[modality].make(item)
        length = self._model.num_rows(modality, features)
        if length > self._max_item_tokens:
            needed = format_bytes(length * self._row_bytes)
            raise ValueError(
                f"{length} rows take {needed} of the encoder cache, which has room "
                f"for {self._max_item_tokens} rows; raise encoder_cache_bytes"
            )
        digest = features_hash(features, length, cache_salt)
        return MultiModalInput(modality, offset, length, digest, features)
