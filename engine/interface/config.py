"""Settings of an engine, and the limits of a single request."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.prompts import TranscriptionOptions
from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import Settings


class StreamWindow(Settings):
    """Windows that speech arriving in chunks is cut into, in blocks of the model.

    A block is the unit of the model's arithmetic: 12 codes, or 0.24 s, in the published vocoder. A
    window is computed whole and its middle is kept. The first is short, so that sound starts early;
    each keeps ``growth`` times as much as the one before (here 2), until windows are long enough to
    cost little more than the whole::

        codes    ────────────────────────────────────────────────────►
        window 1 │ first │ right │
        window 2 │ left  │   2 x first   │ right │
        window 3         │     left      │           4 x first           │ right │
        ...                                                    up to chunk_blocks

    A window can run once its codes, those at its right and one more have arrived; if other
    utterances are about to reach a window of equal length, it waits a few steps for them. It costs
    ``(left + kept + right) / kept`` of the whole's work. If codes arrive hardly faster than they
    are played, set ``chunk_blocks`` no larger than ``first_blocks``, or there is a gap before each
    longer window. A model that keeps a state between chunks needs no sides.

    Attributes:
        first_blocks: blocks that the first window keeps.
        chunk_blocks: maximum blocks that a window keeps.
        growth: factor by which a window keeps more than the one before. Use the minimum if codes
            arrive hardly faster than they are played.
        left_blocks: blocks of context before the kept ones; the default is the published model's
            context in training.
        right_blocks: blocks of context after the kept ones; likewise.
    """

    first_blocks: int = Field(default=1, ge=1)
    chunk_blocks: int = Field(default=8, ge=1)
    growth: int = Field(default=2, ge=2)
    left_blocks: int = Field(default=2, ge=0)
    right_blocks: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def _check_first_blocks(self) -> Self:
        if self.first_blocks > self.chunk_blocks:
            raise ValueError(
                f"first_blocks ({self.first_blocks}) must not be larger than chunk_blocks "
                f"({self.chunk_blocks})"
            )
        return self


class GenerationParams(Settings):
    """Parameters of sound generation; the ``generation:`` block in YAML. Defaults: transformers'.

    Attributes:
        num_steps: points in time of the flow, both ends included; each but the last is four passes.
            A vocoder without a flow refuses this, guidance, sway and seed.
        guidance_scale: classifier-free guidance by voice and codes; 0 halves the passes.
        sway_coefficient: bends the points towards the start (below 0) or the end; None leaves
            them even. Beyond the bounds time would run backwards.
        seed: seed of the noise that every request's flow starts from: equal codes give equal sound.
        window: windows of speech that arrives in chunks.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    num_steps: int = Field(default=10, ge=2)
    guidance_scale: float = Field(default=0.5, ge=0.0)
    # t + s * (cos(pi t / 2) - 1 + t) grows on 0 to 1 for -1 <= s <= 2 / (pi - 2) = 1.7519...
    sway_coefficient: float | None = Field(default=-1.0, ge=-1.0, le=1.75)
    seed: int = Field(default=0, ge=0, lt=2**63)
    window: StreamWindow = StreamWindow()


class GeneratorSettings(Settings):
    """Settings of a generator; the ``engine:`` block in YAML.

    The model computes in float32 on every device: in half precision its flow drifts.

    Attributes:
        revision: branch, tag or commit of a hub id.
        device: ``auto`` uses CUDA if available.
        max_batch_size: maximum requests of equal length, or windows of them, in one pass.
        deterministic: the same bits regardless of other requests: one window at a time.
        quantization: hold the matrices of linear layers in 8 or 4 bits; convolutions stay float32.
    """

    revision: str | None = None
    device: str = "auto"
    max_batch_size: int = Field(default=8, ge=1)
    deterministic: bool = False
    quantization: Literal["int8", "int4"] | None = None


class GeneratorConfig(GeneratorSettings):
    """A generator's model and settings.

    Attributes:
        model: folder or hub id of a Hugging Face checkpoint, or ``seeded:<name>``.
        part: name of the model in a checkpoint that holds several.
        generation: parameters of sound generation.
    """

    model: str = Field(min_length=1)
    part: str | None = None
    generation: GenerationParams = GenerationParams()


_OR_RAISE = "or raise engine.limits"


class RequestLimits(Settings):
    """Limits of one request; ``limits:`` in an ``engine:`` block of YAML.

    Each is checked before the work that it bounds, and its error names the setting. Limits of the
    model need no setting: token ids, embedding rows and placeholders are bounded by
    ``max_model_len``, lists of token ids by the size of the vocabulary.

    Attributes:
        max_prompt_chars: maximum characters of a prompt's text, or of rendered chat messages, for
            the tokenizer to read. None allows as many as ``max_model_len`` of the tokenizer's
            longest tokens have, but at least 65,536 and at most 4,194,304 (a tokenizer uses some
            230 bytes of memory for each).
        max_completions: maximum ``n`` of the sampling parameters.
        max_logprobs: maximum ``logprobs`` of the sampling parameters.
        max_stop_strings: maximum number of strings in ``stop``.
        max_stop_chars: maximum characters of all stop strings together; text is held back and
            compared with them token by token.
        max_items: maximum images, sounds and videos of a prompt, all together.
        tokenizer_seconds: maximum CPU seconds of a checkpoint's tokenizer for one prompt, if it
            splits text by patterns other than the published ones, which may never terminate.
        template_seconds: maximum CPU seconds of a checkpoint's chat template for one prompt.
            Templates come with checkpoints and are programs that may never terminate.
        template_bytes: maximum bytes of memory of the process in which templates run.
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
        """Refuse parameters beyond the limits; ``PlacedError``."""
        if params.n > self.max_completions:
            raise PlacedError(
                ("n",),
                f"n is {params.n}, but at most {self.max_completions} completions are made of a "
                f"prompt; ask for fewer {_OR_RAISE}.max_completions",
            )
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise PlacedError(
                ("logprobs",),
                f"logprobs is {params.logprobs}, but at most {self.max_logprobs} tokens are "
                f"reported; ask for fewer {_OR_RAISE}.max_logprobs",
            )
        if len(params.stop) > self.max_stop_strings:
            raise PlacedError(
                ("stop",),
                f"stop has {len(params.stop)} strings, but at most {self.max_stop_strings} are "
                f"looked for; give fewer {_OR_RAISE}.max_stop_strings",
            )
        num_chars = sum(map(len, params.stop))
        if num_chars > self.max_stop_chars:
            raise PlacedError(
                ("stop",),
                f"the stop strings have {num_chars} characters, but at most "
                f"{self.max_stop_chars} are looked for; shorten them {_OR_RAISE}.max_stop_chars",
            )

    def check_items(self, num_items: int) -> None:
        """Refuse a prompt with too many images, sounds and videos; ``ValueError``."""
        if num_items > self.max_items:
            raise ValueError(
                f"the prompt shows {num_items} images, sounds and videos, but at most "
                f"{self.max_items} are taken; show fewer {_OR_RAISE}.max_items"
            )


# ``PIL.Image.MAX_IMAGE_PIXELS``: one gibibyte, divided by four and by three.
_PILLOW_PIXELS = 2**30 // 4 // 3


class MediaLimits(Settings):
    """Limits of media in requests; the ``media_limits:`` block of ``engine:`` in YAML.

    Checked before anything is decoded, as far as a file's header allows. A model may accept less:
    its window, its longest prompt, its encoder cache.

    Attributes:
        max_file_bytes: maximum bytes of a file, or of the content given instead.
        max_audio_s: maximum seconds of a sound. A log-mel spectrogram of the default length takes
            about 0.75 GB while it is computed.
        max_image_pixels: maximum width times height of an image. The bound of this setting is
            Pillow's own, beyond which it warns of decompression bombs.
        max_video_s: maximum seconds of a video.
        max_video_pixels: maximum pixels of all sampled frames of a video, in the file's own size.
    """

    max_file_bytes: int = Field(default=256 * 2**20, ge=1)
    max_audio_s: float = Field(default=1200.0, gt=0.0, allow_inf_nan=False)
    max_image_pixels: int = Field(default=32 * 2**20, ge=1, le=_PILLOW_PIXELS)
    max_video_s: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    max_video_pixels: int = Field(default=256 * 2**20, ge=1)


class DiskSettings(Settings):
    """A folder for blocks that the pool may evict; the ``disk:`` block of ``offload:`` in YAML.

    Attributes:
        path: path of the folder, created if missing; ``~`` is the user's home. Several stages,
            replicas and processes may share it.
        bytes: maximum size of all its files together; the least recently used are removed.
    """

    path: str = Field(min_length=1)
    bytes: int = Field(ge=2**20)


class OffloadSettings(Settings):
    """Storage for blocks that the pool may evict; the ``offload:`` block of ``engine:`` in YAML.

    Attributes:
        host_bytes: host memory in bytes, for a pool on a GPU; on a CPU, raise ``num_blocks``.
        disk: a folder, which persists for later runs.
    """

    host_bytes: int | None = Field(default=None, ge=1)
    disk: DiskSettings | None = None

    @model_validator(mode="after")
    def _check_storage(self) -> Self:
        if self.host_bytes is None and self.disk is None:
            raise ValueError("offload needs host_bytes, or disk with path and bytes")
        return self


class EngineSettings(Settings):
    """Settings common to the engines of all models; the ``engine:`` block in YAML.

    Attributes:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code shipped with the checkpoint; off by default.
        dtype: element type of weights, activations and cache; ``auto`` uses the checkpoint's on
            CUDA and float32 on a CPU. C kernels keep activations in float32 with bfloat16;
            float16 is slow on a CPU.
        quantization: round the decoder's matrices on loading to 8 bits with a scale per output, or
            to 4 bits with a scale and an offset per 32 weights.
        encoder_quantization: likewise for the matrices of towers of images, sounds and videos, and
            of an encoder-decoder's encoder.
        device: ``auto`` uses CUDA if available.
        attention_backend: ``auto`` uses triton on CUDA, native on a CPU (C kernels, compiled on
            first use, also for norms and activations), torch where those cannot run.
        deterministic: the same bits regardless of other requests, of how the prompt is cut into
            chunks and of cache hits; for decoders also of the number of threads. Decoders need the
            C kernels of a CPU; encoders and towers run one input at a time.
        tensor_parallel: number of processes that share the heads and MLPs of a decoder's layers and
            the pages of its keys and values; on CUDA each uses a separate device, from ``device``
            on. Towers, samplers and caches belong to the first process.
        enforce_eager: launch the kernels of every decode step one by one on CUDA instead of
            replaying graphs. Graphs take some memory, and time at startup.
        block_size: tokens per KV block.
        num_blocks: blocks in the pool, including the null block, or large pages in models whose
            layers keep different state; None sizes the pool for ``max_num_seqs`` requests of
            ``max_model_len``, within ``memory_fraction``.
        memory_fraction: share of the device's free memory for a pool whose ``num_blocks`` is None.
        max_model_len: maximum length of a sequence, prompt and output; None uses the checkpoint's.
        max_num_seqs: maximum requests that run at once.
        max_num_batched_tokens: token budget of one step.
        max_num_encoder_tokens: maximum rows that towers of images, sounds and videos, or an
            encoder-decoder's encoder, compute per step; a longer input runs alone. None: no limit.
        encoder_cache_bytes: maximum bytes of the pool for rows of images, sounds and videos,
            including those in use; None: they compete with KV blocks for all of it.
        preemption: handling of a preempted request: ``recompute`` drops its state, ``swap`` moves
            it to host memory as long as there is room.
        num_swap_blocks: host blocks for ``swap``, including the null block; None: as in the pool.
        offload: storage for blocks that the pool may evict, from which they return as a hit.
        generation_config: ``auto`` reads defaults of sampling parameters, suppressed tokens, bad
            words and ends of sequences from the checkpoint's ``generation_config.json``; ``ignore``
            runs it as if it had no such file.
        media_limits: limits of images, sounds and videos.
        vad: true if a speech encoder receives only speech, found by the voice detector of the
            extra ``serve``, unless a prompt overrides it: noise, music and silence give no text.
        transcription: options of a speech model for recordings, unless a prompt overrides them.
        enable_prefix_caching: reuse results of earlier requests. Never changes an output.
        limits: limits of one request.
        seed: seed of the engine's own generator, which seeds requests without a seed.
    """

    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    encoder_quantization: Literal["int8", "int4"] | None = None
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
    def _check_combinations(self) -> Self:
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
        part: name of the model in a checkpoint that holds several.
    """

    model: str = Field(min_length=1)
    part: str | None = None
