"""Settings of an engine, and the limits of what one request may ask of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.prompts import TranscriptionOptions
from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import Settings


class StreamWindow(Settings):
    """How speech that comes in chunks is cut, in blocks of the model.

    A block is what the model's arithmetic works on at a time: 12 codes, or 0.24 s, in the published
    vocoder. A window is computed whole and its middle is kept. The first is short, so that
    sound comes early; each gives ``growth`` times the one before (here 2), until they are long
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
        growth: how many times as much a window gives as the one before. Speech that comes hardly
            faster than it is heard wants the least.
        left_blocks: what it sees before that; by default what the published model was trained on.
        right_blocks: what it sees after that; likewise.
    """

    first_blocks: int = Field(default=1, ge=1)
    chunk_blocks: int = Field(default=8, ge=1)
    growth: int = Field(default=2, ge=2)
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
            A vocoder without a flow refuses this, guidance, sway and seed.
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
        deterministic: the same bits whatever a request runs beside: one window at a time.
    """

    revision: str | None = None
    device: str = "auto"
    max_batch_size: int = Field(default=8, ge=1)
    deterministic: bool = False


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
        """Refuse parameters that ask for more."""
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


# One gibibyte of RGB, by three and by four: ``PIL.Image.MAX_IMAGE_PIXELS``.
_PILLOW_PIXELS = 2**30 // 4 // 3


class MediaLimits(Settings):
    """What media that requests show may take; the ``media_limits:`` block of ``engine:`` in YAML.

    Looked at before anything is decoded, as far as a file's header states it. A model may take
    less: its window, its longest prompt, its encoder cache.

    Attributes:
        max_file_bytes: of a file, or of what stands in its place.
        max_audio_s: seconds of a sound. A log-mel spectrogram of the default takes about 0.75 GB
            while it is made.
        max_image_pixels: width times height of an image. Pillow itself takes images for bombs that
            have more than can be set.
        max_video_s: seconds of a video.
        max_video_pixels: of all frames of a video that are looked at, in the file's own size.
    """

    max_file_bytes: int = Field(default=256 * 2**20, ge=1)
    max_audio_s: float = Field(default=1200.0, gt=0.0, allow_inf_nan=False)
    max_image_pixels: int = Field(default=32 * 2**20, ge=1, le=_PILLOW_PIXELS)
    max_video_s: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    max_video_pixels: int = Field(default=256 * 2**20, ge=1)


class DiskSettings(Settings):
    """A folder for blocks that the pool may evict; the ``disk:`` block of ``offload:`` in YAML.

    Attributes:
        path: of the folder, made if it is not there; ``~`` is the user's home. Several stages,
            replicas and processes may share it.
        bytes: of all files in it together, the least recently used are removed.
    """

    path: str = Field(min_length=1)
    bytes: int = Field(ge=2**20)


class OffloadSettings(Settings):
    """Where blocks are kept that the pool may evict; the ``offload:`` block of ``engine:`` in YAML.

    Attributes:
        host_bytes: of host memory, for a pool on a GPU: on a CPU, raise ``num_blocks`` instead.
        disk: a folder, which later runs find as this one left it.
    """

    host_bytes: int | None = Field(default=None, ge=1)
    disk: DiskSettings | None = None

    @model_validator(mode="after")
    def _names_a_place(self) -> Self:
        if self.host_bytes is None and self.disk is None:
            raise ValueError("offload needs host_bytes, or disk with path and bytes")
        return self


class EngineSettings(Settings):
    """How an engine runs its model, whichever model that is; the ``engine:`` block in YAML.

    Attributes:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that the checkpoint brings; off unless asked for.
        dtype: element type of weights, activations and cache; ``auto`` takes the checkpoint's on
            CUDA and float32 on a CPU. C kernels keep activations in float32 with bfloat16;
            float16 is slow on a CPU.
        quantization: round the decoder's matrices, as they are loaded, to 8 bits with a scale for
            each output, or to 4 bits with a scale and an offset for 32 weights.
        device: ``auto`` takes CUDA when there is one.
        attention_backend: ``auto`` takes triton on CUDA, native on a CPU (C kernels, compiled on
            first use, for norms and activations too), torch where those cannot run.
        deterministic: the same bits whatever a request runs beside, however its prompt is cut into
            chunks, cached or not; of decoders, on however many threads. They need the C kernels of
            a CPU; encoders and towers run one input at a time.
        tensor_parallel: processes among which the heads and MLPs of a decoder's layers are divided,
            and the pages of its keys and values; on CUDA each on a device of its own, from
            ``device`` on. Towers, samplers and caches are the first one's.
        enforce_eager: launch the kernels of every decode step one by one on CUDA, and replay no
            graphs of them. Graphs take some memory, and time when the engine starts.
        block_size: tokens per KV block.
        num_blocks: blocks in the pool, the null block included, or large pages in models whose
            layers keep different things; None sizes the pool for ``max_num_seqs`` requests of
            ``max_model_len``, within ``memory_fraction``.
        memory_fraction: share of the device's free memory for a pool whose ``num_blocks`` is None.
        max_model_len: longest sequence, prompt and output; None takes the checkpoint's.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of one step.
        max_num_encoder_tokens: rows that towers for images and the like, or an encoder-decoder's
            encoder, give in one step; a longer input runs alone. None sets no limit.
        encoder_cache_bytes: most that rows of images, sounds and videos may take of the pool, those
            in use included; None: they compete with KV blocks for all of it.
        preemption: what becomes of a request that has to make room: ``recompute`` forgets its
            state, ``swap`` moves it to host memory as long as there is room.
        num_swap_blocks: host blocks for ``swap``, the null block included; None: as the pool has.
        offload: where blocks are kept that the pool may evict, so that they come back as a hit.
        generation_config: ``auto`` takes defaults of sampling parameters, suppressed tokens, bad
            words and ends of sequences from the checkpoint's ``generation_config.json``; ``ignore``
            runs it as if it had no such file.
        media_limits: how much of a picture, a sound or a video is read.
        vad: whether an encoder of speech hears speech alone, found by the voice detector of the
            extra ``serve``, unless a prompt says otherwise: noise, music and silence give no text.
        transcription: how a speech model goes about recordings, unless a prompt says otherwise.
        enable_prefix_caching: reuse what earlier requests computed. Never changes what comes out.
        limits: what one request may ask for, at most.
        seed: of the engine's own generator, which seeds requests that bring no seed.
    """

    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    device: str = "auto"
    attention_backend: Literal["auto", "native", "torch", "triton", "xformers"] = "auto"
    deterministic: bool = False
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    enforce_eager: bool = False
    block_size: int = Field(default=16, ge=1, le=2**20)
    num_blocks: int | None = Field(default=None, ge=2)
    memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=16, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_num_encoder_tokens: int | None = Field(default=None, ge=1)
    encoder_cache_bytes: int | None = Field(default=None, ge=1)
    preemption: Literal["recompute", "swap"] = "recompute"
    num_swap_blocks: int | None = Field(default=None, ge=2)
    offload: OffloadSettings | None = None
    generation_config: Literal["auto", "ignore"] = "auto"
    media_limits: MediaLimits = MediaLimits()
    vad: bool = False
    transcription: TranscriptionOptions = TranscriptionOptions()
    enable_prefix_caching: bool = True
    limits: RequestLimits = RequestLimits()
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or running requests could not all "
                "decode one token in a step"
            )
        if self.num_swap_blocks is not None and self.preemption != "swap":
            raise ValueError("num_swap_blocks is for preemption: swap; set that, or leave it out")
        others = {
            "deterministic": self.deterministic,
            "preemption: swap": self.preemption == "swap",
            "offload": self.offload is not None,
        }
        if self.tensor_parallel > 1 and (
            refused := [key for key, is_set in others.items() if is_set]
        ):
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} does not go together with "
                f"{', '.join(refused)}; leave one of the two out"
            )
        if self.offload is not None and not self.enable_prefix_caching:
            raise ValueError(
                "offload keeps blocks of the prefix cache, which enable_prefix_caching: false "
                "turns off; leave one of the two out"
            )
        return self


class EngineConfig(EngineSettings):
    """An engine's model and settings.

    Attributes:
        model: folder or hub id of a Hugging Face checkpoint, or ``seeded:<name>`` for a small one
            that is built on first use.
        part: which model of a checkpoint that holds several, by its name there.
    """

    model: str = Field(min_length=1)
    part: str | None = None
