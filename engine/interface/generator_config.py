"""What a user may set about an engine that turns codec tokens into sound."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, model_validator

from engine.interface.settings import Settings

__all__ = ["GenerationParams", "GeneratorConfig", "GeneratorSettings", "StreamWindow"]


class StreamWindow(Settings):
    """How speech that comes in chunks is cut, in blocks of the model.

    A block is what the model's arithmetic works on at a time: 12 codes, or 0.24 s, in the published
    vocoder. A window is computed whole and its middle is kept. The first is short, so that
    sound comes early; each gives as much as all before it and the first, until they are long
    enough to cost little more than the whole::

        codes    ────────────────────────────────────────────────────►
        window 1 │ first │ right │
        window 2 │ left  │   2 x first   │ right │
        window 3         │     left      │           4 x first           │ right │
        ...                                                    up to chunk_blocks

    A window can run as soon as its codes, those at its right and one more are there; where other
    utterances are about to come to one as long, it waits for them for a few steps. It costs ``(left
    + kept + right) / kept`` of the whole's work. Speech whose codes come hardly faster than they
    are heard wants ``chunk_blocks`` no larger than ``first_blocks``, or there is a gap before each
    longer window. A model that keeps a state from chunk to chunk needs no sides.

    Attributes:
        first_blocks: what the first window gives.
        chunk_blocks: what a window gives at most.
        left_blocks: what it sees before that; by default what the published model was trained on.
        right_blocks: what it sees after that; likewise.
    """

    first_blocks: int = Field(default=1, ge=1)
    chunk_blocks: int = Field(default=8, ge=1)
    left_blocks: int = Field(default=2, ge=0)
    right_blocks: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def _first_is_no_longer_than_others(self) -> Self:
        if self.first_blocks > self.chunk_blocks:
            raise ValueError(
                f"first_blocks ({self.first_blocks}) must not be larger than chunk_blocks "
                f"({self.chunk_blocks})"
            )
        return self


class GenerationParams(Settings):
    """How sound is made; the ``generation:`` block in YAML. Defaults are transformers' own.

    Attributes:
        num_steps: points in time of the flow, both ends included; each but the last is four passes.
        guidance_scale: how far to go beyond what voice and codes suggest; 0 halves the passes.
        sway_coefficient: bends the points towards the start (below 0) or the end; None leaves
            them even. Beyond the bounds time would run backwards.
        seed: of the noise that every request's flow starts from: equal codes give equal sound.
        window: how speech that comes in chunks is cut.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_steps: int = Field(default=10, ge=2)
    guidance_scale: float = Field(default=0.5, ge=0.0)
    # t + s * (cos(pi t / 2) - 1 + t) grows on 0 to 1 for -1 <= s <= 2 / (pi - 2) = 1.7519...
    sway_coefficient: float | None = Field(default=-1.0, ge=-1.0, le=1.75)
    seed: int = Field(default=0, ge=0, lt=2**63)
    window: StreamWindow = StreamWindow()


class GeneratorSettings(Settings):
    """How a generator runs its model; the ``engine:`` block in YAML.

    The model computes in float32 wherever it runs: in half precision its flow drifts.

    Attributes:
        revision: branch, tag or commit of a hub id.
        device: ``auto`` takes CUDA when there is one.
        max_batch_size: requests of equal length, or windows of them, that run in one pass.
    """

    revision: str | None = None
    device: str = "auto"
    max_batch_size: int = Field(default=8, ge=1)


class GeneratorConfig(GeneratorSettings):
    """A generator's model and settings.

    Attributes:
        model: folder or hub id of a Hugging Face checkpoint, or ``seeded:<name>``.
        part: which model of a checkpoint that holds several, by its name there.
        generation: how sound is made.
    """

    model: str = Field(min_length=1)
    part: str | None = None
    generation: GenerationParams = GenerationParams()
