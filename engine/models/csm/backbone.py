"""CSM: speech from text and from reference recordings.

A frame of audio consists of one code per codebook, and is one token here::

    prompt   | <bos> [0] H i <eos> | ~ ~ ~ ~ ~ ~ | <audio_eos> | <bos> [0] N o <eos> |
               earlier text          its frames    all codes 0   text to speak
    output   | frame | frame | ... | all codes 0

The embedding of a frame, in the prompt or generated, is the sum of its codes' embeddings. The first
code is sampled like a token, and the depth decoder draws the others in the same step. No single
code ends the speech, but a frame with zeros in all codebooks except the last. Such a frame is
replaced by the padding token, which is never audio.

Source: Schalkwyk et al., "Crossing the uncanny valley of conversational voice", Sesame 2025;
transformers' ``csm``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.inputs.multimodal_inputs import FeatureTaker, ItemSide, MultiModalPromptProcessor
from engine.inputs.prompt_processor import PromptSources
from engine.interface.prompts import ChatPrompt, Prompt, TextPrompt
from engine.interface.sampling_params import SamplingParams
from engine.layers import Linear, empty_parameter
from engine.models.base import ModelSettings
from engine.models.csm.codec import MimiEncoder, names_of_half
from engine.models.decoders.code_predictor import CodePredictor
from engine.models.decoders.decoder import DecoderModel, build_rotary
from engine.models.decoders.families import llama_config
from engine.requests.encoder_input import Modality, MultiModalInput
from engine.sampling.sampler import FurtherDraws

_CODES = "backbone_model.embed_tokens.embed_audio_tokens.weight"
_DEPTH_CODES = "depth_decoder.model.embed_tokens.weight"


class DepthDecoder(CodePredictor):
    """Draws a frame's further codes; see :class:`CodePredictor`.

    Args:
        embedding: ``(num_codebooks, codes, width)``.
        num_sounds: number of audio codes; codes from here on are never drawn.
    """

    def __init__(
        self, config: Any, embedding: nn.Parameter, num_sounds: int, settings: ModelSettings
    ) -> None:
        decoder = replace(llama_config(config), tie_word_embeddings=False)
        short = replace(settings, max_model_len=config.num_codebooks + 1)
        further, options = config.num_codebooks - 1, settings.tensor_options
        super().__init__(decoder, build_rotary(config, short), further, settings)
        width, hidden = config.backbone_hidden_size, config.hidden_size
        self.projection = Linear(width, {"inputs_embeds_projector": hidden}, **options)
        self.embedding, self._num_sounds = embedding, num_sounds
        self.heads = empty_parameter(further, hidden, config.vocab_size, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """See :meth:`CodePredictor.targets`; does not include the embedding."""
        yield from super().targets(prefix)
        yield from self.projection.targets(f"{prefix}model.")
        yield f"{prefix}codebooks_head.weight", self.heads.data

    def enter(self, rows: Tensor) -> Tensor:
        """See :meth:`CodePredictor.enter`."""
        projected: Tensor = self.projection(rows.flatten(0, 1))
        return projected.view(*rows.shape[:2], -1)

    def embed_code(self, codes: Tensor, codebook: int) -> Tensor:
        """See :meth:`CodePredictor.embed_code`."""
        return self.embedding[codebook, codes]

    def logits(self, rows: Tensor, codebook: int) -> Tensor:
        """See :meth:`CodePredictor.logits`."""
        logits = rows @ self.heads[codebook - 1]
        logits[:, self._num_sounds :] = -torch.inf
        return logits


class CsmBackbone(DecoderModel, ItemSide):
    """A decoder over text and frames of audio; see the module docstring and :data:`Builder`."""

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        config: Any = checkpoint.config
        # The config's tie refers to codes; text has a separate matrix.
        decoder = replace(llama_config(config), tie_word_embeddings=False)
        rotary = build_rotary(config, settings)
        text = config.text_vocab_size
        super().__init__(decoder, [rotary], settings, num_embeddings=text)
        depth = config.depth_decoder_config
        self.num_codebooks: int = config.num_codebooks
        if self.num_codebooks != depth.num_codebooks or config.vocab_size != depth.vocab_size:
            raise ValueError(
                f"the config has {config.num_codebooks} codebooks of {config.vocab_size} codes, "
                f"its depth_decoder_config {depth.num_codebooks} of {depth.vocab_size}"
            )
        self._end_code, self._end_id = config.codebook_eos_token_id, config.codebook_pad_token_id
        self._sound_end_id: int = config.audio_eos_token_id
        shape = (self.num_codebooks, config.vocab_size, config.hidden_size)
        tables = [
            empty_parameter(*shape, **settings.tensor_options)
            for _ in range(1 if config.tie_codebooks_embeddings else 2)
        ]
        self.code_embedding = tables[0]
        num_sounds = config.codec_config.codebook_size
        self.depth_decoder = DepthDecoder(depth, tables[-1], num_sounds, settings)
        self.tower = MimiEncoder(config.codec_config, self.num_codebooks, settings)
        self.towers: dict[Modality, FeatureTaker] = {"audio": self.tower}
        self.placeholders = {"audio": int(config.audio_token_id)}
        self.code_sampling = _depth_sampling(checkpoint)
        stored = checkpoint.weight_files
        self._tables = {_CODES: tables[0], _DEPTH_CODES: tables[-1]}
        if config.tie_codebooks_embeddings and not self._tables.keys() <= stored.keys():
            # Files usually contain only the second.
            self._tables.pop(_DEPTH_CODES if _CODES in stored else _CODES)
        self.ignored_weights = names_of_half("decoder", stored, "codec_model.")

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        for name, target in super().targets("backbone_model."):
            yield name.replace("backbone_model.embed_tokens", "embed_text_tokens"), target
        yield from self.depth_decoder.targets("depth_decoder.")
        yield from self.tower.targets("codec_model.")
        for name, table in self._tables.items():
            yield name, table.data.flatten(0, 1)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        embeds = super().embed(input_ids)
        end = self.code_embedding[:, self._end_code].sum(dim=0)
        return torch.where((input_ids == self._sound_end_id)[:, None], end, embeds)

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Map frames ``(n, num_codebooks)`` to embeddings ``(n, hidden_size)``."""
        codebooks = torch.arange(self.num_codebooks, device=codes.device)
        return self.code_embedding[codebooks, codes].sum(dim=1)

    def encode_multimodal(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`CausalModel.encode_multimodal`."""
        return [self.embed_frames(self.tower(each.features["input_values"])) for each in inputs]

    def add_codes(self, embeds: Tensor, codes: Tensor) -> None:
        """See :meth:`CausalModel.add_codes`; a frame's embedding replaces its token's."""
        drawn = codes[:, 0] >= 0
        if bool(drawn.any()):
            embeds[drawn] = self.embed_frames(codes[drawn])

    def draw_codes(self, hidden_states: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """See :meth:`CausalModel.draw_codes`."""
        embeds = self.code_embedding[0, first]
        further = self.depth_decoder(hidden_states, embeds, draws)
        codes = torch.cat((first[:, None], further), dim=1)
        is_end = (codes[:, :-1] == self._end_code).all(dim=1)
        codes[is_end, 0] = self._end_id
        return codes


def _depth_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """Read the sampling of further codes: ``depth_decoder_...`` in ``generation_config.json``."""
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 50}  # the defaults of transformers
    for name in ("temperature", "top_k", "top_p"):
        value = getattr(checkpoint.generation_config, f"depth_decoder_{name}", None)
        if value is not None:
            params[name] = value
    return SamplingParams(**params)


class CsmPrompts(MultiModalPromptProcessor):
    """Maps roles to the model's speaker numbers: a ``user`` and plain text are speaker 0.

    Messages with text and audio are the previous context; the last one is to be spoken.
    """

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        config: Any = sources.checkpoint.config
        end = config.codebook_pad_token_id
        self.stop_token_ids = frozenset({end})
        # Codes that are not audio: the codec's codebooks are smaller than the model's.
        codes = range(config.codec_config.codebook_size, config.vocab_size)
        self.suppress_token_ids = tuple(code for code in codes if code != end)

    def as_message(self, prompt: Prompt) -> Prompt:
        """Convert text to a message and roles to speaker numbers; reject audio in the last one."""
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        if isinstance(prompt, TextPrompt) and not re.match(r"\[\d+\]", prompt.prompt):
            message = {"role": "0", "content": [{"type": "text", "text": prompt.prompt}]}
            prompt = ChatPrompt((message,), multi_modal_data=prompt.multi_modal_data)
        prompt = super().as_message(prompt)
        if not isinstance(prompt, ChatPrompt) or not prompt.messages:
            return prompt
        messages = tuple(dict(each) | {"role": _number(each)} for each in prompt.messages)
        last = messages[-1].get("content")
        if isinstance(last, list) and any(part.get("type") == "audio" for part in last):
            raise ValueError(
                "the last message is to be said and has no sound: give a recording with its words, "
                "as an earlier message, as ref_audio and ref_text, or as a voice's audio and text"
            )
        return replace(prompt, messages=messages)


def _number(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    if role != "user" and not role.isdigit():
        raise ValueError(
            "the role of a message must be user or the number of who speaks, such as '0', got "
            f"{role!r}"
        )
    return "0" if role == "user" else role
