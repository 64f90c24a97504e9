"""The table of model families, including those that users add.

Names are known without importing torch and transformers; a family is imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.checkpoints.checkpoint import CheckpointPart
    from engine.models.family import ModelFamily
from engine.interface.log_fields import package_logger

logger = package_logger(__name__)

ENTRY_POINTS = "omni_pipeline.model_families"
"""Entry point group in which other packages declare families."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """A family whose components are given by name: ``module:name``, under ``engine``.

    Components are imported when the family is first used. See
    :class:`~engine.models.family.ModelFamily` for their meaning and for the other attributes.

    Attributes:
        decoder_config: for a plain decoder, which needs nothing else.
        is_base: True if others may build on this decoder; see :func:`decoder_family`.
        whole: ``model_type`` of the checkpoints of which it is a part; ``name`` names the part.
        stored: of a part, its config's name in the whole one, and the prefix of its weights' names.
        is_first: True if ``generation_config.json`` of the whole describes this part.
        outputs: names of the per-token tensors that its model emits.
        modalities: modalities of its prompts, if the checkpoint has the required processors.
    """

    name: str
    architectures: tuple[str, ...]
    build: str | None = None
    prompts: str | None = None
    generator: str | None = None
    decoder_config: str | None = None
    is_base: bool = False
    chat_template: str | None = None
    max_positions: str | None = None
    reads_text: bool = True
    speakers: str | None = None
    whole: str | None = None
    stored: tuple[str, str] = ("", "")
    is_first: bool = False
    outputs: tuple[str, ...] = ("hidden_states",)
    modalities: tuple[str, ...] = ("text",)

    @property
    def makes_sound(self) -> bool:
        """See :attr:`~engine.models.family.ModelFamily.makes_sound`."""
        return self.generator is not None

    @property
    def base_type(self) -> str | None:
        """See :attr:`~engine.models.family.ModelFamily.base_type`."""
        return self.name if self.is_base else None

    @property
    def part(self) -> CheckpointPart | None:
        """The part of a checkpoint that it is; None for a separate checkpoint."""
        from engine.checkpoints.checkpoint import CheckpointPart

        if self.whole is None:
            return None
        (architecture,) = self.architectures
        return CheckpointPart(self.name, self.whole, *self.stored, architecture, self.is_first)

    def speakers_in(self, folder: Path) -> tuple[str, ...] | None:
        """Return the voices in a checkpoint's folder; None for a model that does not speak."""
        return None if self.speakers is None else tuple(imported(self.speakers)(folder))

    def load(self) -> ModelFamily:
        """Import the family's components, and declare it."""
        from engine.models.decoders.decoder import decoder_family
        from engine.models.family import ModelFamily

        if self.decoder_config is not None:
            read_config = imported(self.decoder_config)
            return decoder_family(self.name, self.architectures, read_config, is_base=self.is_base)
        named = {name: getattr(self, name) for name in _COMPONENTS}
        declared = {name: imported(path) for name, path in named.items() if path is not None}
        declared |= {"reads_text": self.reads_text, "part": self.part}
        return ModelFamily(self.name, self.architectures, **declared)


_COMPONENTS = ("build", "prompts", "generator", "chat_template", "max_positions")


def imported(path: str) -> Any:
    """Import a component named by a row."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"engine.{module}"), name)


def _decoder(name: str, stem: str, *, is_base: bool = True) -> FamilyRow:
    # Gemma3Model is the multimodal model.
    headless = "Gemma3TextModel" if stem == "Gemma3" else f"{stem}Model"
    read_config = f"models.decoders.families:{name}_config"
    architectures = (f"{stem}ForCausalLM", headless)
    return FamilyRow(name, architectures, decoder_config=read_config, is_base=is_base)


_ITEMS = "inputs.multimodal_inputs:MultiModalPromptProcessor"
_ENCODER_DECODER = ("encoder_hidden_states", "hidden_states")
_VISION, _AUDIO = ("text", "image", "video"), ("text", "audio")
_OMNI = ("text", "image", "audio", "video")
_TABLE = (
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("ministral", "Ministral", is_base=False),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3"),
    _decoder("qwen3_moe", "Qwen3Moe"),
    _decoder("mixtral", "Mixtral"),
    _decoder("gemma2", "Gemma2", is_base=False),
    _decoder("gemma3", "Gemma3", is_base=False),
    FamilyRow("jamba", ("JambaForCausalLM", "JambaModel"), "models.hybrids.hybrid:build_jamba"),
    FamilyRow("bamba", ("BambaForCausalLM", "BambaModel"), "models.hybrids.hybrid:build_bamba"),
    FamilyRow(
        "qwen3_next",
        ("Qwen3NextForCausalLM", "Qwen3NextModel"),
        "models.hybrids.hybrid:build_qwen3_next",
    ),
    FamilyRow(
        "qwen3_5",
        ("Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        "models.hybrids.hybrid:build_qwen3_5",
    ),
    FamilyRow(
        "bart",
        ("BartForConditionalGeneration",),
        "models.seq2seq.families:build_bart",
        "inputs.encoder_decoder_inputs:EncoderDecoderPromptProcessor",
        outputs=_ENCODER_DECODER,
    ),
    FamilyRow(
        "t5",
        ("T5ForConditionalGeneration",),
        "models.seq2seq.families:build_t5",
        "models.seq2seq.families:T5_PROMPTS",
        max_positions="models.seq2seq.families:trained_length",
        outputs=_ENCODER_DECODER,
    ),
    FamilyRow(
        "whisper",
        ("WhisperForConditionalGeneration",),
        "models.whisper.whisper:build_whisper",
        "models.whisper.whisper:WHISPER_PROMPTS",
        max_positions="models.whisper.whisper:longest_text",
        outputs=_ENCODER_DECODER,
        modalities=("audio",),
    ),
    FamilyRow(
        "mllama",
        ("MllamaForConditionalGeneration",),
        "models.mllama.mllama:MllamaModel",
        "models.mllama.mllama:MLLAMA_PROMPTS",
        outputs=_ENCODER_DECODER,
        modalities=("text", "image"),
    ),
    FamilyRow(
        "llava",
        ("LlavaForConditionalGeneration",),
        "models.llava.llava:build_llava",
        _ITEMS,
        modalities=("text", "image"),
    ),
    FamilyRow(
        "qwen3_asr",
        ("Qwen3ASRForConditionalGeneration",),
        "models.qwen3_asr.qwen3_asr:build_qwen3_asr",
        "models.qwen3_asr.qwen3_asr:TranscriptionPrompts",
        modalities=_AUDIO,
    ),
    FamilyRow(
        "voxtral",
        ("VoxtralForConditionalGeneration",),
        "models.voxtral.voxtral:build_voxtral",
        "models.voxtral.voxtral:VoxtralPrompts",
        chat_template="models.voxtral.voxtral:CHAT_TEMPLATE",
        modalities=_AUDIO,
    ),
    FamilyRow(
        "gemma3_vision",
        ("Gemma3ForConditionalGeneration",),
        "models.gemma3.gemma3:build_gemma3",
        "models.gemma3.gemma3:WholeImagePrompts",
        modalities=("text", "image"),
    ),
    FamilyRow(
        "qwen2_5_vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        "models.qwen2_5_vl.qwen2_5_vl:build_qwen2_5_vl",
        _ITEMS,
        modalities=_VISION,
    ),
    FamilyRow(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "models.qwen3_vl.qwen3_vl:build_qwen3_vl",
        "models.qwen3_vl.qwen3_vl:DatedVideoPrompts",
        modalities=_VISION,
    ),
    FamilyRow(
        "qwen3_5_vision",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "models.qwen3_5.qwen3_5:build_qwen3_5",
        "models.qwen3_vl.qwen3_vl:DatedVideoPrompts",
        modalities=_VISION,
    ),
    FamilyRow(
        "thinker",
        ("Qwen2_5OmniThinkerForConditionalGeneration",),
        "models.qwen2_5_omni.thinker:build_qwen2_5_omni_thinker",
        _ITEMS,
        whole="qwen2_5_omni",
        stored=("thinker_config", "thinker."),
        is_first=True,
        outputs=("hidden_states", "position_ids", "token_embeds"),
        modalities=_OMNI,
    ),
    FamilyRow(
        "talker",
        ("Qwen2_5OmniTalkerForConditionalGeneration",),
        "models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
        "models.qwen2_5_omni.speakers:SpeechPromptProcessor",
        reads_text=False,  # the checkpoint's tokenizer is its thinker's
        speakers="models.qwen2_5_omni.speakers:load_speakers",
        whole="qwen2_5_omni",
        stored=("talker_config", "talker."),
        modalities=(),
    ),
    FamilyRow(
        "code2wav",
        ("Qwen2_5OmniToken2WavModel",),
        generator="models.qwen2_5_omni.code2wav:Code2Wav",
        speakers="models.qwen2_5_omni.speakers:load_speakers",
        whole="qwen2_5_omni",
        stored=("token2wav_config", "token2wav."),
        modalities=(),
    ),
    FamilyRow(
        "thinker",
        ("Qwen3OmniMoeThinkerForConditionalGeneration",),
        "models.qwen3_omni.thinker:build_qwen3_omni_thinker",
        _ITEMS,
        whole="qwen3_omni_moe",
        stored=("thinker_config", "thinker."),
        is_first=True,
        outputs=("hidden_states", "position_ids", "speech_rows", "token_ids"),
        modalities=_OMNI,
    ),
    FamilyRow(
        "talker",
        ("Qwen3OmniMoeTalkerForConditionalGeneration",),
        "models.qwen3_omni.talker:Qwen3OmniTalker",
        "models.qwen3_omni.speech_prompts:Qwen3SpeechPrompts",
        reads_text=False,  # as above
        speakers="models.qwen3_omni.speech_prompts:speakers_of",
        whole="qwen3_omni_moe",
        stored=("talker_config", "talker."),
        outputs=("codes", "hidden_states"),
        modalities=(),
    ),
    FamilyRow(
        "code2wav",
        ("Qwen3OmniMoeCode2Wav",),
        generator="models.qwen3_omni.code2wav:Qwen3Code2Wav",
        whole="qwen3_omni_moe",
        stored=("code2wav_config", "code2wav."),
        modalities=(),
    ),
    FamilyRow(
        "backbone",
        ("CsmForConditionalGeneration",),
        "models.csm.backbone:CsmBackbone",
        "models.csm.backbone:CsmPrompts",
        whole="csm",
        is_first=True,
        outputs=("codes", "hidden_states"),
        modalities=_AUDIO,
    ),
    FamilyRow(
        "mimi",
        ("MimiModel",),
        generator="models.csm.codec:MimiCodec",
        whole="csm",
        stored=("codec_config", "codec_model."),
        modalities=(),
    ),
    FamilyRow(
        "pocket_tts",
        ("PocketTTSForConditionalGeneration",),
        "models.pocket_tts.pocket_tts:PocketTTS",
        "models.pocket_tts.pocket_tts:PocketPrompts",
        outputs=("hidden_states", "latents"),
        modalities=_AUDIO,
    ),
    FamilyRow(
        "pocket_tts_audio_tokenizer",
        ("PocketTTSAudioTokenizerModel",),
        generator="models.pocket_tts.codec:PocketCodec",
        reads_text=False,
        modalities=(),
    ),
)


class FamilyRegistry:
    """Finds the family of an architecture, in the table, among added ones, and by entry points.

    Entry points are loaded when an unknown architecture is first requested.

    Attributes:
        rows: the table, by architecture.
    """

    def __init__(self, rows: Iterable[FamilyRow]) -> None:
        self.rows = {name: row for row in rows for name in row.architectures}
        self._added: dict[str, ModelFamily] = {}
        self._failures: list[str] | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """Error messages of entry points that failed to load so far."""
        return tuple(self._failures or ())

    def architectures(self, *, makes_sound: bool = False) -> tuple[str, ...]:
        """Return all known architectures that generate tokens, or audio."""
        return (
            *(name for name, row in self.rows.items() if row.makes_sound == makes_sound),
            *(name for name, f in self._added.items() if f.makes_sound == makes_sound),
        )

    def known_parts(self, whole: str) -> Mapping[str | None, FamilyRow | ModelFamily]:
        """Return the parts of a checkpoint that holds several models, given its ``model_type``."""
        known: dict[str | None, FamilyRow | ModelFamily] = {
            row.name: row for row in self.rows.values() if row.whole == whole
        }
        for family in self._added.values():
            if family.part is not None and family.part.whole == whole:
                known.setdefault(family.part.name, family)
        return known

    def may_grow(self) -> bool:
        """Return True if entry points may add families that are not known yet."""
        return self._failures is None and bool(entry_points(group=ENTRY_POINTS))

    def register(self, family: ModelFamily) -> None:
        """Add a family; adding the same one again has no effect.

        Raises:
            ValueError: an architecture, or the config's ``model_type``, belongs to another family.
        """
        from engine.models.family import ModelFamily

        if not isinstance(family, ModelFamily):
            raise ValueError(f"a model family is a ModelFamily, got {type(family).__name__}")
        for name in family.architectures:
            if self._added.get(name) is family:
                return
            if name in self.rows or name in self._added:
                owner = self._added.get(name) or self.rows[name]
                raise ValueError(
                    f"architecture {name!r} of model family {family.name!r} belongs to the family "
                    f"{owner.name!r} already; give it another name"
                )
        made = family.config_class
        if made is not None:
            from transformers import CONFIG_MAPPING, AutoConfig

            if made.model_type not in CONFIG_MAPPING:
                AutoConfig.register(made.model_type, made)
            elif (known := CONFIG_MAPPING[made.model_type]) is not made:
                raise ValueError(
                    f"model_type {made.model_type!r} of model family {family.name!r} belongs to "
                    f"{known.__module__}.{known.__name__} already; give it another name"
                )
        self._added |= dict.fromkeys(family.architectures, family)

    def find(self, architecture: str) -> ModelFamily | None:
        """Return the family of an architecture, or None."""
        if architecture in self.rows:
            return self.rows[architecture].load()
        if architecture not in self._added:
            self.load_entry_points()
        return self._added.get(architecture)

    def parts_of(self, config: Mapping[str, Any]) -> tuple[CheckpointPart, ...]:
        """Return the parts of a checkpoint with this ``config.json``; empty for a single model."""
        model_type = config.get("model_type")
        if not self.rows.keys() & set(config.get("architectures") or ()):
            self.load_entry_points()
        known = self.known_parts(str(model_type)).values()
        parts = (each.part for each in known)
        return tuple(part for part in parts if part is not None)

    def decoder_config_of(self, config: PreTrainedConfig) -> Callable[[PreTrainedConfig], Any]:
        """Return the function that reads the config of a plain decoder used by another family.

        Raises:
            ValueError: no family declares a base decoder of this ``model_type``.
        """
        self.load_entry_points()
        # Later entries win: the table's, then the family that was added first.
        candidates: list[FamilyRow | ModelFamily] = [*reversed(self._added.values())]
        candidates += self.rows.values()
        found = {each.base_type: each for each in candidates}
        found.pop(None, None)
        base = found.get(config.model_type)
        family = base.load() if isinstance(base, FamilyRow) else base
        if family is None or family.decoder_config is None:
            raise ValueError(
                f"the model is built on a decoder of type {config.model_type!r}; supported are "
                f"{', '.join(sorted(map(str, found)))}"
            )
        return family.decoder_config

    def load_entry_points(self) -> None:
        """Import the families of other packages once; :attr:`failures` lists those that failed."""
        if self._failures is not None:
            return
        self._failures = []
        for entry in entry_points(group=ENTRY_POINTS):
            try:
                self.register(entry.load())
            # This imports another package's code, which may raise any exception.
            except Exception as error:
                made_by = "an unknown distribution"
                if entry.dist is not None:
                    made_by = f"distribution {entry.dist.name}"
                place = f"entry point {entry.name} = {entry.value} of {made_by}"
                reason = f"{place} brings no model family: {error}"
                logger.warning("%s", reason)
                self._failures.append(reason)


FAMILIES = FamilyRegistry(_TABLE)
"""The registry of this process."""

register_model_family = FAMILIES.register
