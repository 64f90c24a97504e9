"""The table of model families, and whatever users add to it.

Names are known without torch and transformers; a family is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.checkpoints.checkpoint import CheckpointPart
    from engine.models.family import ModelFamily
from engine.interface.log_fields import package_logger

logger = package_logger(__name__)

ENTRY_POINTS = "omni_pipeline.model_families"
"""Group of the entry points by which other packages bring families."""


class FamilyRow(NamedTuple):
    """Where a family is declared; its module is imported when the family is first used.

    Attributes:
        module: under ``engine.models``.
        whole: ``model_type`` of the checkpoints that it is a part of.
        base_type: see :attr:`~engine.models.family.ModelFamily.base_type`.
        outputs: names of the per-token tensors that its model emits.
        modalities: what its prompts are made of, where its checkpoint has what reads them.
    """

    module: str
    architectures: tuple[str, ...]
    attribute: str = "FAMILY"
    whole: str | None = None
    makes_sound: bool = False
    base_type: str | None = None
    outputs: tuple[str, ...] = ("hidden_states",)
    modalities: tuple[str, ...] = ("text",)

    @property
    def part(self) -> str | None:
        """By which users ask for this model of the whole."""
        return self.attribute.lower() if self.whole else None

    def load(self) -> ModelFamily:
        """Import the declaration."""
        from engine.models.family import ModelFamily

        family = getattr(importlib.import_module(f"engine.models.{self.module}"), self.attribute)
        assert isinstance(family, ModelFamily)
        return family


def _decoder(attribute: str, name: str, *, is_base: bool = True) -> FamilyRow:
    # Gemma3Model is the one that sees images.
    headless = "Gemma3TextModel" if name == "Gemma3" else f"{name}Model"
    architectures = (f"{name}ForCausalLM", headless)
    base = attribute.lower() if is_base else None
    return FamilyRow("decoders.families", architectures, attribute, base_type=base)


_OMNI, _OMNI_3 = "qwen2_5_omni", "qwen3_omni_moe"
_TWO_SIDES = ("encoder_hidden_states", "hidden_states")
_SEES, _HEARS = ("text", "image", "video"), ("text", "audio")
_TABLE = (
    _decoder("LLAMA", "Llama"),
    _decoder("MISTRAL", "Mistral"),
    _decoder("MINISTRAL", "Ministral", is_base=False),
    _decoder("QWEN2", "Qwen2"),
    _decoder("QWEN3", "Qwen3"),
    _decoder("QWEN3_MOE", "Qwen3Moe"),
    _decoder("MIXTRAL", "Mixtral"),
    _decoder("GEMMA2", "Gemma2", is_base=False),
    _decoder("GEMMA3", "Gemma3", is_base=False),
    FamilyRow("hybrids.hybrid", ("JambaForCausalLM", "JambaModel"), "JAMBA"),
    FamilyRow("hybrids.hybrid", ("BambaForCausalLM", "BambaModel"), "BAMBA"),
    FamilyRow("hybrids.hybrid", ("Qwen3NextForCausalLM", "Qwen3NextModel"), "QWEN3_NEXT"),
    FamilyRow(
        "hybrids.hybrid",
        ("Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        "QWEN3_5",
    ),
    FamilyRow("seq2seq.families", ("BartForConditionalGeneration",), "BART", outputs=_TWO_SIDES),
    FamilyRow("seq2seq.families", ("T5ForConditionalGeneration",), "T5", outputs=_TWO_SIDES),
    FamilyRow(
        "whisper.whisper",
        ("WhisperForConditionalGeneration",),
        outputs=_TWO_SIDES,
        modalities=("audio",),
    ),
    FamilyRow(
        "mllama.mllama",
        ("MllamaForConditionalGeneration",),
        outputs=_TWO_SIDES,
        modalities=("text", "image"),
    ),
    FamilyRow("llava.llava", ("LlavaForConditionalGeneration",), modalities=("text", "image")),
    FamilyRow("qwen3_asr.qwen3_asr", ("Qwen3ASRForConditionalGeneration",), modalities=_HEARS),
    FamilyRow("voxtral.voxtral", ("VoxtralForConditionalGeneration",), modalities=_HEARS),
    FamilyRow("gemma3.gemma3", ("Gemma3ForConditionalGeneration",), modalities=("text", "image")),
    FamilyRow("qwen2_5_vl.qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), modalities=_SEES),
    FamilyRow(
        "qwen3_vl.qwen3_vl",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        modalities=_SEES,
    ),
    FamilyRow(
        "qwen3_5.qwen3_5",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        modalities=_SEES,
    ),
    FamilyRow(
        f"{_OMNI}.family",
        ("Qwen2_5OmniThinkerForConditionalGeneration",),
        "THINKER",
        _OMNI,
        outputs=("hidden_states", "position_ids", "token_embeds"),
        modalities=("text", "image", "audio", "video"),
    ),
    FamilyRow(
        f"{_OMNI}.family",
        ("Qwen2_5OmniTalkerForConditionalGeneration",),
        "TALKER",
        _OMNI,
        modalities=(),
    ),
    FamilyRow(
        f"{_OMNI}.family", ("Qwen2_5OmniToken2WavModel",), "CODE2WAV", _OMNI, True, modalities=()
    ),
    FamilyRow(
        "qwen3_omni.family",
        ("Qwen3OmniMoeThinkerForConditionalGeneration",),
        "THINKER",
        _OMNI_3,
        outputs=("hidden_states", "position_ids", "speech_rows", "token_ids"),
        modalities=("text", "image", "audio", "video"),
    ),
    FamilyRow(
        "qwen3_omni.family",
        ("Qwen3OmniMoeTalkerForConditionalGeneration",),
        "TALKER",
        _OMNI_3,
        outputs=("codes", "hidden_states"),
        modalities=(),
    ),
    FamilyRow(
        "qwen3_omni.family", ("Qwen3OmniMoeCode2Wav",), "CODE2WAV", _OMNI_3, True, modalities=()
    ),
    FamilyRow(
        "csm.family",
        ("CsmForConditionalGeneration",),
        "BACKBONE",
        "csm",
        outputs=("codes", "hidden_states"),
        modalities=_HEARS,
    ),
    FamilyRow("csm.family", ("MimiModel",), "MIMI", "csm", True, modalities=()),
    FamilyRow(
        "pocket_tts.family",
        ("PocketTTSForConditionalGeneration",),
        "POCKET_TTS",
        outputs=("hidden_states", "latents"),
        modalities=_HEARS,
    ),
    FamilyRow(
        "pocket_tts.family",
        ("PocketTTSAudioTokenizerModel",),
        "POCKET_TTS_CODEC",
        makes_sound=True,
        modalities=(),
    ),
)


class FamilyRegistry:
    """Finds the family of an architecture.

    Families come from the table, from :meth:`register`, and from entry points. The latter are
    loaded when an architecture that is not known yet is first asked for.
    """

    def __init__(self, rows: Iterable[FamilyRow]) -> None:
        self._rows = {name: row for row in rows for name in row.architectures}
        self._added: dict[str, ModelFamily] = {}
        self._failures: list[str] | None = None

    @property
    def rows(self) -> Mapping[str, FamilyRow]:
        """The table, by architecture."""
        return self._rows

    @property
    def failures(self) -> tuple[str, ...]:
        """Why entry points brought no family, as far as they have been loaded."""
        return tuple(self._failures or ())

    def architectures(self, *, makes_sound: bool = False) -> tuple[str, ...]:
        """Names of all that is known and makes tokens, or sound."""
        return (
            *(name for name, row in self._rows.items() if row.makes_sound == makes_sound),
            *(name for name, f in self._added.items() if f.makes_sound == makes_sound),
        )

    def known_parts(self, whole: str) -> Mapping[str | None, FamilyRow | ModelFamily]:
        """By name, the models of a checkpoint that holds several, by its ``model_type``."""
        known: dict[str | None, FamilyRow | ModelFamily] = {
            row.part: row for row in self._rows.values() if row.whole == whole
        }
        for family in self._added.values():
            if family.part is not None and family.part.whole == whole:
                known.setdefault(family.part.name, family)
        return known

    def may_grow(self) -> bool:
        """Whether entry points may bring families that are not known yet."""
        return self._failures is None and bool(entry_points(group=ENTRY_POINTS))

    def register(self, family: ModelFamily) -> None:
        """Add a family; one that was added before is left as it is.

        Raises:
            ValueError: an architecture, or the ``model_type`` of its config, is that of another.
        """
        from engine.models.family import ModelFamily

        if not isinstance(family, ModelFamily):
            raise ValueError(f"a model family is a ModelFamily, got {type(family).__name__}")
        for name in family.architectures:
            if self._added.get(name) is family:
                return
            if name in self._rows or name in self._added:
                owner = self._added.get(name) or self._rows[name].load()
                raise ValueError(
                    f"architecture {name!r} of model family {family.name!r} belongs to the family "
                    f"{owner.name!r} already; give it another name"
                )
        _teach_config(family)
        self._added |= dict.fromkeys(family.architectures, family)

    def find(self, architecture: str) -> ModelFamily | None:
        """The family of an architecture; None if there is none."""
        if architecture in self._rows:
            return self._rows[architecture].load()
        if architecture not in self._added:
            self.load_entry_points()
        return self._added.get(architecture)

    def parts_of(self, config: Mapping[str, Any]) -> tuple[CheckpointPart, ...]:
        """The models of a checkpoint with this ``config.json``; none if it is one model."""
        model_type = config.get("model_type")
        if not self._rows.keys() & set(config.get("architectures") or ()):
            self.load_entry_points()
        known = self.known_parts(str(model_type)).values()
        families = [each.load() if isinstance(each, FamilyRow) else each for each in known]
        return tuple(family.part for family in families if family.part is not None)

    def decoder_config_of(self, config: PreTrainedConfig) -> Callable[[PreTrainedConfig], Any]:
        """What reads the config of a plain decoder, which other families may build on.

        Raises:
            ValueError: no family declares a decoder of this ``model_type`` to build on.
        """
        self.load_entry_points()
        # Of several the table's, then the one that was added first.
        candidates: list[FamilyRow | ModelFamily] = [*reversed(self._added.values())]
        candidates += self._rows.values()
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
        """Import what other packages bring, once; :attr:`failures` has what could not be."""
        if self._failures is not None:
            return
        self._failures = []
        for entry in entry_points(group=ENTRY_POINTS):
            try:
                self.register(entry.load())
            # A package's own code is imported here, which may raise whatever it likes.
            except Exception as error:
                reason = f"{_origin(entry)} brings no model family: {error}"
                logger.warning("%s", reason)
                self._failures.append(reason)


def _origin(entry: EntryPoint) -> str:
    package = "an unknown distribution" if entry.dist is None else f"distribution {entry.dist.name}"
    return f"entry point {entry.name} = {entry.value} of {package}"


def _teach_config(family: ModelFamily) -> None:
    """Tell transformers of a family's ``model_type``."""
    made = family.config_class
    if made is None:
        return
    from transformers import CONFIG_MAPPING, AutoConfig

    if made.model_type not in CONFIG_MAPPING:
        AutoConfig.register(made.model_type, made)
    elif (known := CONFIG_MAPPING[made.model_type]) is not made:
        raise ValueError(
            f"model_type {made.model_type!r} of model family {family.name!r} belongs to "
            f"{known.__module__}.{known.__name__} already; give it another name"
        )


FAMILIES = FamilyRegistry(_TABLE)
"""What this process knows."""

register_model_family = FAMILIES.register
