"""Pocket TTS's decoder: text to speech, in the voice of a recording.

A frame of audio is a latent of 32 numbers, and one token here::

    prompt   | <voice> | ~ ~ ~ ~ ~ ~ ~ ~ | H e l l o . | <begin> |
                        frames of a voice                 a learned latent
    output   | frame | frame | ... | tail | tail | tail | end |

A flow head maps noise and a token's hidden state to the next frame, which is drawn in the same step
and embedded in the next. The noise of a greedy request is 0; otherwise its variance is the
temperature. A head with a single output predicts the end of speech, after which some more frames
follow (the tail), and a token without audio.

Source: Rouard et al., "Continuous Audio Language Models", 2025; transformers' ``pocket_tts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.pocket_tts.feature_extraction_pocket_tts import PocketTTSFeatureExtractor
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSFlowHead

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.files.json_file import read_json_object
from engine.inputs.multimodal_inputs import FeatureTaker, ItemSide, MultiModalPromptProcessor
from engine.inputs.prompt_processor import PromptContent, PromptSources
from engine.interface.prompts import ChatPrompt, Prompt, TextPrompt
from engine.layers import Linear, empty_parameter
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderModel, build_rotary
from engine.models.pocket_tts.codec import bits_of, latents_of, load_half
from engine.requests.encoder_input import Modality, MultiModalInput
from engine.sampling.sampler import FurtherDraws

_IGNORED = ("loss_weighting.", "latent_stats_num_updates")
_FALLBACK_LOGIT = -1e4
"""Logit of a token that is sampled only if no other is allowed."""


class VoiceTower(FeatureTaker):
    """Encodes a voice with the codec that the checkpoint's processor names."""

    feature_names = ("input_values",)

    def __init__(self, path: Path, codec: str, device: torch.device) -> None:
        self._codec = str(path / codec) if (path / codec).is_dir() else codec
        self._device = device
        self._extractor = PocketTTSFeatureExtractor.from_pretrained(path, local_files_only=True)
        self.sampling_rate = int(self._extractor.sampling_rate)
        self._network: Any = None

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`FeatureTaker.num_rows`."""
        mask = self._extracted(features)["padding_mask"]
        return int(self._extractor.get_num_frames(mask))

    def load(self, latent_dim: int) -> None:
        """Load the encoder; ``ValueError`` if it is missing or does not match."""
        codec = Checkpoint.open(self._codec)
        config: Any = codec.config
        if config.latent_dim != latent_dim:
            raise ValueError(
                f"the codec {self._codec} must have the model's latent_dim={latent_dim}, "
                f"got {config.latent_dim}"
            )
        self._network = load_half("encoder", codec, self._device)

    @torch.no_grad()
    def latents(self, features: Mapping[str, Tensor]) -> Tensor:
        """Map ``input_values`` ``(num_samples,)`` to latents ``(num_rows, latent_dim)``."""
        extracted = self._extracted(features).to(self._device)
        encoded = self._network.encode(extracted["input_values"], extracted["padding_mask"])
        num_rows = int(self._extractor.get_num_frames(extracted["padding_mask"]))
        return encoded.latents[0, :num_rows]

    def _extracted(self, features: Mapping[str, Tensor]) -> Any:
        """Return samples that end in a pause, ``(1, 1, num_samples)``, and their mask."""
        return self._extractor(features["input_values"].numpy(), self.sampling_rate)


class PocketTTS(DecoderModel, ItemSide):
    """A decoder over text and latents; see the module docstring and :data:`Builder`."""

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        config: Any = checkpoint.config
        decoder = replace(
            DecoderConfig.from_transformers(config),
            layer_norm=True,
            plain_mlp=("fc1", "fc2"),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            tie_word_embeddings=False,
        )
        super().__init__(decoder, [build_rotary(config, settings)], settings, has_head=False)
        self.vocab_size: int = config.vocab_size
        width, hidden = config.latent_dim, config.hidden_size
        self.num_codebooks: int = 1 + width
        options, rule = settings.tensor_options, SpeechEnd.of(checkpoint)
        self._frame_id, self._begin_id, self._end_id = rule.frame, rule.tail, rule.end
        self._threshold = float(_setting(checkpoint, "eos_threshold", -4.0))
        self.voice_projection = Linear(width, {"audio_prompt_proj": hidden}, **options)
        self.latent_projection = Linear(width, {"audio_latent_proj": hidden}, **options)
        self.end_head = Linear(hidden, {"eos_head": 1}, bias=True, **options)
        self.begin = empty_parameter(width, **options)
        options["dtype"] = torch.float32
        self.latent_mean, self.latent_std = (empty_parameter(width, **options) for _ in range(2))
        with torch.device("meta"):
            flow = PocketTTSFlowHead(config.flow_head_config)
        for parameter in flow.parameters():  # not buffers: frequencies stay in float32
            parameter.data = parameter.data.to(settings.dtype)
        self.flow = flow.to_empty(device=settings.device).requires_grad_(False)
        has_times = config.flow_head_config.flow_type == "lsd"
        self._num_steps = int(_setting(checkpoint, "num_flow_steps", 1)) if has_times else 0
        self.towers: dict[Modality, FeatureTaker] = {}
        processor = _processor_config(checkpoint).get("audio_tokenizer") or {}
        self._tower: VoiceTower | None = None
        if codec := processor.get("audio_tokenizer_name_or_path"):
            self._tower = VoiceTower(checkpoint.path, codec, settings.device)
            self.towers["audio"] = self._tower
            self.placeholders = {"audio": int(config.audio_prompt_token_id)}
        stored = checkpoint.weight_files
        self.ignored_weights = [name for name in stored if name.startswith(_IGNORED)]

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        yield from super().targets("model.")
        yield from self.voice_projection.targets("model.")
        yield from self.latent_projection.targets("model.")
        yield from self.end_head.targets("")
        yield "model.bos_latent", self.begin.data
        yield "latent_mean", self.latent_mean.data
        yield "latent_std", self.latent_std.data
        for name, tensor in self.flow.state_dict().items():
            yield f"flow_head.{name}", tensor

    def finish_loading(self, *, pack_weights: bool) -> None:
        """See :meth:`CausalModel.finish_loading`; also loads the voice encoder."""
        super().finish_loading(pack_weights=pack_weights)
        if self._tower is not None and self.begin.device.type != "meta":
            self._tower.load(self.num_codebooks - 1)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        begin = self.latent_projection(self.begin[None])
        return torch.where((input_ids == self._begin_id)[:, None], begin, super().embed(input_ids))

    def encode_multimodal(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`CausalModel.encode_multimodal`."""
        assert self._tower is not None
        latents = [self._tower.latents(each.features) for each in inputs]
        return [self.voice_projection(each.to(self.dtype)) for each in latents]

    def add_codes(self, embeds: Tensor, codes: Tensor) -> None:
        """See :meth:`CausalModel.add_codes`; a frame's embedding replaces its token's."""
        drawn = codes[:, 0] >= 0
        if bool(drawn.any()):
            latents = latents_of(codes[drawn, 1:])
            embeds[drawn] = self.latent_projection(latents.to(self.dtype))

    def drawn_rows(self, codes: Tensor) -> dict[str, Tensor]:
        """Return ``latents`` ``(num_tokens, latent_dim)``, 0 for tokens without one."""
        latents = latents_of(codes[:, 1:]) * self.latent_std + self.latent_mean
        return {"latents": latents.masked_fill(codes[:, :1] < 0, 0)}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the end head's margin over its threshold as a logit; see :class:`SpeechEnd`."""
        logits = hidden_states.new_full(
            (len(hidden_states), self.vocab_size), -torch.inf, dtype=torch.float32
        )
        logits[:, self._frame_id] = 0
        logits[:, self._end_id] = self.end_head(hidden_states)[:, 0].float() - self._threshold
        return logits

    def draw_codes(self, hidden_states: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """See :meth:`CausalModel.draw_codes`."""
        latents = draws.normal(self.num_codebooks - 1).to(hidden_states)
        if not self._num_steps:
            latents = self.flow(latents, hidden_states)
        for step in range(self._num_steps):  # Euler's method
            times = [latents.new_full((1,), at / self._num_steps) for at in (step, step + 1)]
            latents = latents + self.flow(latents, hidden_states, times) / self._num_steps
        return torch.cat((first[:, None], bits_of(latents)), dim=1)


@dataclass(frozen=True, slots=True)
class SpeechEnd:
    """Deterministic choice of tokens at the end of speech.

    Attributes:
        frame, tail, end: ids of a frame, of a frame after the end of speech, and of the last
            token, whose logit is above 0 if speech has ended.
        min_frames: minimum number of frames before the end.
        num_after: number of tail frames after the first one.
    """

    frame: int
    tail: int
    end: int
    min_frames: int
    num_after: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SpeechEnd:
        """Read a checkpoint's ids; the last token is padding, because no prompt contains it."""
        config: Any = checkpoint.config
        ids = (config.audio_latent_token_id, config.audio_bos_token_id, config.pad_token_id)
        return cls(*ids, int(_setting(checkpoint, "min_frames_before_eos", 6)))

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """See ``LogitsProcessor``."""
        num_tail, chosen = generated.count(self.tail), self.frame
        if num_tail:
            chosen = self.end if num_tail > self.num_after else self.tail
        elif len(generated) >= self.min_frames and bool(logits[self.end] > 0):
            chosen = self.tail
        logits.fill_(-torch.inf)
        logits[self.frame] = _FALLBACK_LOGIT
        logits[chosen] = 0


class PocketPrompts(MultiModalPromptProcessor):
    """Converts text to a message for the checkpoint's chat template; its audio is the voice."""

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._rule = SpeechEnd.of(sources.checkpoint)
        self.stop_token_ids = frozenset({self._rule.end})
        stated = _processor_config(sources.checkpoint)
        self._short = int(stated.get("short_text_max_words", 4))
        self._after_short = int(stated.get("frames_after_eos_short_text", 4))
        self._after = int(stated.get("frames_after_eos", 2))

    def as_message(self, prompt: Prompt) -> Prompt:
        """Convert text to a message, and require a single user message."""
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        if isinstance(prompt, TextPrompt):
            sounds = [{"type": name} for name, items in prompt.multi_modal_data.items() if items]
            said = [*sounds, {"type": "text", "text": prompt.prompt}]
            message = {"role": "user", "content": said}
            prompt = ChatPrompt((message,), multi_modal_data=prompt.multi_modal_data)
        prompt = super().as_message(prompt)
        roles = [each.get("role") for each in getattr(prompt, "messages", ({"role": "user"},))]
        if roles != ["user"]:
            raise ValueError(
                "a prompt must be one message of a user, of a text and perhaps a voice, got "
                f"messages of {roles}; instructions and ref_text are for other models"
            )
        return prompt

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """See :meth:`MultiModalPromptProcessor.process`."""
        content = super().process(prompt, cache_salt=cache_salt)
        num_after = self._after
        if self._tokenizer is not None:
            text: Any = self._tokenizer.decode(content.token_ids, skip_special_tokens=True)
            num_after = self._after_short if len(text.split()) <= self._short else self._after
        return replace(content, logits_processor=replace(self._rule, num_after=num_after))


def _processor_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    file = checkpoint.path / "processor_config.json"
    return read_json_object(file) if file.is_file() else {}


def _setting(checkpoint: Checkpoint, name: str, default: float) -> float:
    """Return a number from ``generation_config.json``, or transformers' ``default``."""
    value = getattr(checkpoint.generation_config, name, None)
    return default if value is None else value
