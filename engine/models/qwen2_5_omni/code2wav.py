"""Qwen2.5-Omni's vocoder: codec tokens to a spectrogram by a flow (DiT), to audio by BigVGAN.

The networks are transformers'. Our changes preserve their arithmetic: noise comes from a request's
own seed, requests of equal length run in one batch, a voice is encoded once instead of in every
pass, and attention skips the blocks that its mask would have hidden."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import lcm, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniSnakeBeta,
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
    RungeKutta4ODESolver,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.interface.config import GenerationParams
from engine.models.base import CodeChunk, GeneratorModel, ModelSettings
from engine.models.checked_loading import LoadTargets, config_errors, load_checked
from engine.models.encoder_module import make_unplaced, place
from engine.models.qwen2_5_omni.speakers import SPEAKERS_FILE, Speaker, find_speaker, load_speakers
from engine.native import NativeBuildError, NativeKernels, load_kernels

_RATIO, _TAPS = 2, 12


class NativeSnake(nn.Module):
    """Upsampling by two, snake activation and downsampling in one pass over memory; inference only.

    Args:
        original: transformers' module; values derived from its parameters are computed now.
    """

    def __init__(
        self, original: Qwen2_5OmniAntiAliasedActivation1d, kernels: NativeKernels
    ) -> None:
        super().__init__()
        self._kernels = kernels
        snake = original.act
        filters = (original.upsample.filter, original.downsample.filter)
        up, down = (each.detach().flatten().contiguous() for each in filters)
        self.up, self.down = nn.Buffer(up, persistent=False), nn.Buffer(down, persistent=False)
        with torch.no_grad():
            # Parameters, because they replace the checkpoint's and count as its weights.
            self.rates = nn.Parameter(snake.alpha.exp(), requires_grad=False)
            scales = 1.0 / (snake.beta.exp() + snake.no_div_by_zero)
            self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Map ``(B, channels, n)`` to the same shape."""
        return self._kernels.snake(
            samples.contiguous(), self.up, self.down, self.rates, self.scales
        )


def use_native_snakes(network: nn.Module) -> None:
    """Replace every snake of a network in float32 on a CPU by the C kernel.

    Without a compiler, and for other kinds of snakes, transformers' own modules stay.
    """
    try:
        kernels = load_kernels()
    except NativeBuildError:
        return  # logged once by load_kernels
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d) and _fits(child):
                setattr(module, name, NativeSnake(child, kernels))


def _fits(snake: Qwen2_5OmniAntiAliasedActivation1d) -> bool:
    up, down = snake.upsample, snake.downsample
    return (
        type(snake.act) is Qwen2_5OmniSnakeBeta
        and (up.ratio, up.kernel_size) == (_RATIO, _TAPS)
        and (down.stride, down.kernel_size) == (_RATIO, _TAPS)
        and {snake.act.alpha.dtype, up.filter.dtype} == {torch.float32}
        and snake.act.alpha.device.type == "cpu"
    )


NEIGHBOUR_ATTENTION = "omni_neighbour_blocks"
"""Name by which transformers' configs select :func:`neighbour_attention`."""

NEIGHBOURS = (-1, 0, 1)
"""Offsets of the blocks that a block may see."""

_SELF = (NEIGHBOURS.index(0),)
# On a CPU, laying out a block's keys takes about as long as scoring them once more.
_COST_OF_CUTS = 2
# All layers and passes over one length share masks; streams have few different lengths.
_MAX_CACHED_MASKS = 32


def neighbour_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Compute masked attention between neighbouring blocks in time linear in the length.

    The sequence is cut into blocks, the last of which may be short. Each is a row of a batch::

        query   [ block 0 ]   [ block 1 ]   [ block 2 ]
        keys    [ - | 0 | 1 ] [ 0 | 1 | 2 ] [ 1 | 2 | - ]     if both neighbours are seen

    For few blocks, computing all scores with a mask is cheaper.

    Args:
        query: ``(B, heads, n, head_dim)``.
        attention_mask: ``(3,)`` bool on the CPU, true if a block sees that one of ``NEIGHBOURS``;
            it always sees itself.

    Returns:
        ``(B, n, heads, head_dim)``, and None for the weights, as transformers expects.
    """
    block_size: int = module.config.block_size  # type: ignore[union-attr, assignment]
    seen = tuple(place for place, sees in enumerate(attention_mask.tolist()) if sees)
    length = query.shape[2]
    num_blocks = -(-length // block_size)
    if num_blocks > _COST_OF_CUTS * len(seen):
        return _by_blocks((query, key, value), block_size, seen), None
    mask = None if num_blocks == 1 else _seen_pairs(length, block_size, seen, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2), None


def _by_blocks(
    tensors: tuple[Tensor, Tensor, Tensor], block_size: int, seen: tuple[int, ...]
) -> Tensor:
    """Attend to seen blocks only: query, key and value to ``(B, n, heads, head_dim)``."""
    query, key, value = (each.transpose(1, 2) for each in tensors)
    batch, length = query.shape[:2]
    mask = None
    if length % block_size or seen != _SELF:
        mask = _existing_keys(batch, length, block_size, seen, query.device)
    blocks = F.scaled_dot_product_attention(
        _cut(query, block_size, _SELF).transpose(1, 2),
        _cut(key, block_size, seen).transpose(1, 2),
        _cut(value, block_size, seen).transpose(1, 2),
        attn_mask=mask,
    )
    attended = blocks.transpose(1, 2).reshape(batch, -1, *query.shape[2:])
    return attended[:, :length]


def _cut(rows: Tensor, block_size: int, seen: tuple[int, ...]) -> Tensor:
    """Gather seen blocks: ``(B, n, ...)`` to ``(B * blocks, len(seen) * block_size, ...)``.

    Zeros are used before the first block and after the last row.
    """
    fill = -rows.shape[1] % block_size
    around = 0 if seen == _SELF else block_size
    if around or fill:
        rows = F.pad(rows, (0, 0) * (rows.ndim - 2) + (around, fill + around))
    blocks: Tensor = rows.unflatten(1, (-1, block_size))
    if around:
        num_blocks = blocks.shape[1] - 2
        blocks = torch.cat([blocks[:, place : place + num_blocks] for place in seen], dim=2)
    return blocks.flatten(0, 1)


@lru_cache(_MAX_CACHED_MASKS)
def _seen_pairs(
    length: int, block_size: int, seen: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the mask of the keys that each query sees, ``(length, length)``."""
    blocks = torch.arange(length, device=device) // block_size
    distances = torch.tensor([NEIGHBOURS[place] for place in seen], device=device)
    return torch.isin(blocks - blocks[:, None], distances)


@lru_cache(_MAX_CACHED_MASKS)
def _existing_keys(
    batch: int, length: int, block_size: int, seen: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the mask of cut keys inside the sequence, ``(batch * blocks, 1, 1, keys)``."""
    rows = torch.ones(batch, length, dtype=torch.bool, device=device)
    return _cut(rows, block_size, seen)[:, None, None]


AttentionInterface.register(NEIGHBOUR_ATTENTION, neighbour_attention)


# Samples per second of this family, which its configs do not contain. The published model generates
# 480 samples per codec token, and its codec has 50 tokens a second.
_SAMPLING_RATE = 24_000
# Below this scale, transformers skips the unconditional pass.
_NO_GUIDANCE = 1e-5


class Code2Wav(GeneratorModel):
    """The vocoder of a checkpoint, in float32; see :class:`GeneratorModel`.

    Args:
        checkpoint: opened at its part ``code2wav``.

    Attributes:
        frames_per_code: spectrogram rows per code.

    Raises:
        ValueError: the weights do not match the config, or voices are missing or do not match.
    """

    sampling_rate = _SAMPLING_RATE

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        dit: Any = checkpoint.config.dit_config
        bigvgan: Any = checkpoint.config.bigvgan_config
        rates, sizes = tuple(bigvgan.upsample_rates), tuple(bigvgan.upsample_kernel_sizes)
        with config_errors(checkpoint):
            # Each upsampling must multiply the length exactly by its rate, to align codes.
            if any((size - rate) % 2 for rate, size in zip(rates, sizes, strict=True)):
                raise ValueError(
                    f"bigvgan_config: upsample_kernel_sizes {sizes} and upsample_rates {rates} "
                    "must differ by even numbers"
                )
        self.device = device
        self.num_codes = dit.num_embeds + 1
        self.max_codes = dit.max_position_embeddings // dit.repeats
        self.codes_per_block = lcm(dit.block_size, dit.repeats) // dit.repeats
        self.frames_per_code = dit.repeats
        self.samples_per_code = dit.repeats * prod(bigvgan.upsample_rates)
        self.mel_dim = dit.mel_dim
        dit._attn_implementation = NEIGHBOUR_ATTENTION

        made = cache(lambda: _Networks(checkpoint.config))  # slower than loading the weights
        networks = load_checked(
            checkpoint,
            device,
            lambda where: made().placed(
                ModelSettings(torch.float32, where, dit.block_size, self.max_codes)
            ),
            lambda networks: LoadTargets(networks.state_dict()),
        )
        self.dit = networks.code2wav_dit_model
        self.bigvgan = networks.code2wav_bigvgan_model
        use_native_snakes(self.bigvgan)
        embedding: nn.Module = self.dit.input_embed
        self._voices = _Voices(self.dit.input_embed.spk_encoder)
        embedding.spk_encoder = self._voices
        # Outputs that depend only on codes or their number are equal in all evaluations of a pass.
        self._pass_caches = _PassCache(self.dit.text_embed), _PassCache(self.dit.rotary_embed)
        flow: nn.Module = self.dit
        flow.text_embed, flow.rotary_embed = self._pass_caches
        self._voices_file = checkpoint.path / SPEAKERS_FILE
        self._speakers = load_speakers(checkpoint.path)
        self.speakers = tuple(self._speakers)
        for speaker in self._speakers.values():
            self.check_speaker(speaker)

    def choose_speaker(self, name: str | None) -> str:
        """See :meth:`GeneratorModel.choose_speaker`."""
        return find_speaker(self._speakers, name).name

    def check_speaker(self, speaker: Speaker) -> None:
        """Raise ``ValueError`` if a voice does not match this model."""
        dit = self.dit.config
        found = speaker.conditioning.shape[-1], speaker.reference_mel.shape[-1]
        if found != (dit.enc_emb_dim, dit.mel_dim):
            raise ValueError(
                f"speaker {speaker.name!r} of {self._voices_file} has a conditioning and a "
                f"reference_mel of widths {found}; the model takes {(dit.enc_emb_dim, dit.mel_dim)}"
            )

    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Tensor, Sequence[None]]:
        """See :meth:`GeneratorModel.generate`; nothing is kept from chunk to chunk."""
        noise, frames = [], self.frames_per_code
        for chunk in chunks:
            start, stop = chunk.start * frames, (chunk.start + len(chunk.codes)) * frames
            noise.append(initial_noise(params.seed, start, stop, self.mel_dim))
        codes = torch.stack([chunk.codes for chunk in chunks])
        speakers = [find_speaker(self._speakers, chunk.speaker) for chunk in chunks]
        samples: Tensor = self(codes, torch.stack(noise), speakers, params)
        return samples, [None] * len(chunks)

    # Not inference_mode, so that users may process the samples further without restrictions.
    @torch.no_grad()
    def forward(
        self, codes: Tensor, noise: Tensor, speakers: Sequence[Speaker], params: GenerationParams
    ) -> Tensor:
        """Generate audio.

        Args:
            codes: ``(B, n)`` int64.
            noise: ``(B, n * frames_per_code, mel_dim)``, see :func:`initial_noise`.

        Returns:
            ``(B, n * samples_per_code)`` float32 on the CPU, in -1 to 1.
        """
        codes, noise = codes.to(self.device), noise.to(self.device)
        mel = self._flow(codes, noise, speakers, params)
        samples: Tensor = self.bigvgan(mel.transpose(1, 2))
        return samples.reshape(codes.shape[0], -1)

    def _flow(
        self, codes: Tensor, noise: Tensor, speakers: Sequence[Speaker], params: GenerationParams
    ) -> Tensor:
        """Integrate noise to spectrograms ``(B, frames, mel_dim)``, as transformers' ``sample``."""
        scale = params.guidance_scale
        guided = scale >= _NO_GUIDANCE
        self._voices.choose(speakers, with_silence=guided)
        conditioning = torch.cat([speaker.conditioning for speaker in speakers]).to(self.device)
        conditions = {
            "quantized_code": codes,
            "speaker_embedding": conditioning[:, None].expand(-1, noise.shape[1], -1),
            # Unused: _Voices has already encoded the voices.
            "condition_vector": conditioning,
        }

        def velocity(time: Tensor, frames: Tensor) -> Tensor:
            made: Tensor = self.dit(
                hidden_states=frames, time_step=time, apply_cfg=guided, **conditions
            )
            if not guided:
                return made
            conditioned, free = made.chunk(2)
            return conditioned + (conditioned - free) * scale

        solver = RungeKutta4ODESolver(function=velocity, initial_value=noise)
        try:
            mel: Tensor = solver.integrate(flow_times(params, self.device))[-1]
        finally:
            for each in self._pass_caches:
                each.clear()
        return mel


class _Networks(nn.Module):
    """Both networks, under their checkpoint names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.code2wav_dit_model = make_unplaced(_NeighbourDiT, config.dit_config)
        self.code2wav_bigvgan_model = make_unplaced(
            Qwen2_5OmniToken2WavBigVGANModel, config.bigvgan_config
        )

    def placed(self, settings: ModelSettings) -> _Networks:
        """Allocate both networks on the settings' device, which may be ``meta``."""
        place(self.code2wav_dit_model, settings)
        place(self.code2wav_bigvgan_model, settings)
        return self


class _NeighbourDiT(Qwen2_5OmniToken2WavDiTModel):
    """The DiT, whose layers select neighbouring blocks instead of a mask over all pairs."""

    def _create_block_diff(self, hidden_states: Tensor) -> Tensor:
        # A layer compares these offsets with its look-ahead and look-back, which gives the mask.
        return torch.tensor(NEIGHBOURS)


class _PassCache(nn.Module):
    """Caches a module that transformers runs again, on equal tensors, in every evaluation.

    Within a pass, its output must depend only on the options that are passed by name.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._made: dict[tuple[tuple[str, Any], ...], Any] = {}

    def clear(self) -> None:
        """Clear the cache at the end of a pass."""
        self._made = {}

    def forward(self, *tensors: Tensor, **options: Any) -> Any:
        """Return the module's output for the pass's tensors and these options."""
        key = tuple(options.items())
        if key not in self._made:
            self._made[key] = self.module(*tensors, **options)
        return self._made[key]


class _Voices(nn.Module):
    """Caching replacement of the voice encoder, which transformers runs again in every pass.

    Args:
        encoder: ``(B, T, mel_dim)`` to ``(B, enc_dim)``.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self._known: dict[str, tuple[Tensor, Tensor]] = {}
        self._chosen: Tensor | None = None

    def choose(self, speakers: Sequence[Speaker], *, with_silence: bool) -> None:
        """Set the voice of each row; with silence, the unconditional rows of guidance follow."""
        voices, silences = zip(*map(self._encode, speakers), strict=True)
        self._chosen = torch.cat([*voices, *silences] if with_silence else voices)

    def forward(self, condition_vector: Tensor) -> Tensor:
        """Return the chosen voices, ``(B, enc_dim)``."""
        if self._chosen is None or len(self._chosen) != len(condition_vector):
            raise RuntimeError("voices must be chosen for the batch that runs")
        return self._chosen

    def _encode(self, speaker: Speaker) -> tuple[Tensor, Tensor]:
        """Encode a voice, and silence of equal length for the unconditional pass of guidance."""
        if speaker.name not in self._known:
            mel = speaker.reference_mel.to(next(self.encoder.parameters()).device)
            voice, silence = self.encoder(torch.cat([mel, torch.zeros_like(mel)])).split(1)
            self._known[speaker.name] = (voice, silence)
        return self._known[speaker.name]


def initial_noise(seed: int, start: int, stop: int, mel_dim: int) -> Tensor:
    """Draw rows ``start`` to ``stop`` of the initial noise of a spectrogram.

    It equals that of transformers after ``torch.manual_seed(seed)`` on a CPU, and is always drawn
    on the CPU, so that a seed gives the same result on any device. A frame's noise does not depend
    on the window for which it is drawn, because torch draws 16 numbers at a time and ``mel_dim`` is
    a multiple of 16 in published models.

    Returns:
        ``(stop - start, mel_dim)`` float32.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(stop, mel_dim, generator=generator)[start:]


def flow_times(params: GenerationParams, device: torch.device) -> Tensor:
    """Return ``(num_steps,)`` times from 0 to 1, with F5-TTS's sway sampling (arXiv 2410.06885)."""
    times = torch.linspace(0, 1, params.num_steps, device=device)
    if params.sway_coefficient is None:
        return times
    return times + params.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
