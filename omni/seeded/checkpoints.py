"""Small checkpoints with seeded random weights, in the real Hugging Face layout.

They make pipelines runnable and testable offline: ``config.json``, safetensors weights, a
trained tokenizer and a chat template, all built in memory in about a second. The texts generated
by such a model are word salad, but they depend on the whole input, as tests of caching need.
Stage configs name them ``seeded:<name>``; see :func:`resolve_model`. The builders are imported
only to build a checkpoint, which takes seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.files.disk_cache import DiskCache, cache_root

SEEDED_PREFIX = "seeded:"

SEEDED_WINDOW = 16
"""Window of sliding layers, in tokens, including the token itself: several fit a short prompt."""

_WINDOW = {"sliding_window": SEEDED_WINDOW}

# Large enough for compute to outweigh a step's fixed cost, small enough to build instantly.
_MEDIUM: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 1536,
}


class SeededModel:
    """Builder of one of the models: ``module:function`` in this package, and its arguments.

    ``known_fields`` are those of its ``config.json`` that are known before it is built.
    """

    def __init__(self, place: str, known_fields: Mapping[str, Any], **settings: Any) -> None:
        self._place, self._settings = place, settings
        self.known_fields = known_fields

    def builder(self) -> Callable[..., Path]:
        """Import and return the function."""
        module, _, function = self._place.partition(":")
        return getattr(import_module(f"omni.seeded.{module}"), function)

    def __call__(self, directory: str | Path) -> Path:
        """Write the checkpoint; return its folder."""
        return self.builder()(directory, **self._settings)


def _decoder(architecture: str, **settings: Any) -> SeededModel:
    says = {"model_type": architecture}
    return SeededModel(
        "language_models:build_causal_lm", says, architecture=architecture, **settings
    )


SEEDED_MODELS: dict[str, SeededModel] = {
    "qwen2": _decoder("qwen2"),
    "qwen2-untied": _decoder("qwen2", tie_word_embeddings=False, seed=1),
    "qwen2-headless": _decoder("qwen2", with_head=False, seed=2),
    "qwen2-medium": _decoder("qwen2", **_MEDIUM),
    "qwen3": _decoder("qwen3"),
    "qwen3_moe": _decoder("qwen3_moe", tie_word_embeddings=False),
    "mixtral": _decoder("mixtral", tie_word_embeddings=False),
    "llama": _decoder("llama"),
    "llama-untied": _decoder("llama", tie_word_embeddings=False, seed=1),
    "llama-medium": _decoder("llama", **_MEDIUM),
    "mistral": _decoder("mistral", tie_word_embeddings=False),
    "mistral-sliding": _decoder("mistral", tie_word_embeddings=False, **_WINDOW),
    "qwen2-sliding": _decoder("qwen2", use_sliding_window=True, max_window_layers=1, **_WINDOW),
    "ministral": _decoder("ministral", tie_word_embeddings=False),
    "gemma2": _decoder("gemma2"),
    "gemma3": _decoder("gemma3_text", num_hidden_layers=3),
    "jamba": _decoder("jamba", tie_word_embeddings=False, num_hidden_layers=4),
    "bamba": _decoder("bamba", tie_word_embeddings=False, num_hidden_layers=4),
    "qwen3_next": _decoder("qwen3_next", tie_word_embeddings=False, num_hidden_layers=4),
    "qwen3_5": _decoder("qwen3_5_text", tie_word_embeddings=False, num_hidden_layers=4),
    "qwen3_5_moe": _decoder("qwen3_5_moe_text", tie_word_embeddings=False, num_hidden_layers=4),
    "bart": SeededModel("language_models:build_bart", {"model_type": "bart"}),
    "t5": SeededModel("language_models:build_t5", {"model_type": "t5"}),
    "t5-gated": SeededModel("language_models:build_t5", {"model_type": "t5"}, gated=True),
    "whisper": SeededModel("language_models:build_whisper", {"model_type": "whisper"}),
    "mllama": SeededModel("language_models:build_mllama", {"model_type": "mllama"}),
    "llava": SeededModel("language_models:build_llava", {"model_type": "llava"}),
    "gemma3_vision": SeededModel("language_models:build_gemma3_vision", {"model_type": "gemma3"}),
    "qwen3_asr": SeededModel("language_models:build_qwen3_asr", {"model_type": "qwen3_asr"}),
    "voxtral": SeededModel("language_models:build_voxtral", {"model_type": "voxtral"}),
    "qwen2_5_vl": SeededModel("language_models:build_qwen2_5_vl", {"model_type": "qwen2_5_vl"}),
    "qwen3_5_vision": SeededModel("language_models:build_qwen3_5", {"model_type": "qwen3_5"}),
    "qwen3_vl": SeededModel("language_models:build_qwen3_vl", {"model_type": "qwen3_vl"}),
    "qwen2_5_omni": SeededModel("omni:build_qwen2_5_omni", {"model_type": "qwen2_5_omni"}),
    "qwen3_omni": SeededModel("omni:build_qwen3_omni", {"model_type": "qwen3_omni_moe"}),
    "csm": SeededModel("speech:build_csm", {"model_type": "csm"}),
    "pocket_tts": SeededModel("speech:build_pocket_tts", {"model_type": "pocket_tts"}),
    "pocket_tts_codec": SeededModel(
        "speech:build_pocket_codec",
        {
            "model_type": "pocket_tts_audio_tokenizer",
            "architectures": ["PocketTTSAudioTokenizerModel"],
        },
    ),
    "bert": SeededModel(
        "language_models:build_text_encoder", {"model_type": "bert", "architectures": ["BertModel"]}
    ),
}
"""Models of ``seeded:<name>``, by name; called with a directory, each writes a checkpoint there."""


def resolve_model(reference: str, cache_dir: str | Path | None = None) -> str:
    """Resolve ``seeded:<name>`` to a folder, built on first use; return other names unchanged.

    Folders are kept under ``cache_dir``, by default ``$OMNI_CACHE_DIR`` or
    ``~/.cache/omni-pipeline``, in ``seeded/<name>-<version>``. The version changes with the code
    of this package and with transformers, so that no old layout is ever used. A folder that is
    damaged, or that another user could have changed, is rebuilt; concurrent calls from several
    processes are safe. See :class:`~engine.files.disk_cache.DiskCache`.

    Raises:
        ValueError: no seeded model has that name, or the cache cannot be used.
    """
    if not reference.startswith(SEEDED_PREFIX):
        return reference
    name = reference.removeprefix(SEEDED_PREFIX)
    build = SEEDED_MODELS.get(name)
    if build is None:
        known = ", ".join(SEEDED_PREFIX + known_name for known_name in SEEDED_MODELS)
        raise ValueError(f"unknown seeded model {reference!r}; known are {known}")
    return str(seeded_folder(name, build, cache_dir))


def seeded_folder(
    name: str, build: Callable[[Path], object], cache_dir: str | Path | None = None
) -> Path:
    """Return the folder of a seeded model, built on first use; see :func:`resolve_model`."""
    root = cache_root() if cache_dir is None else Path(cache_dir)
    return DiskCache(root / "seeded").entry(f"{name}-{_version()}", build)


def _version() -> str:
    content = b"".join(source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(content + version("transformers").encode()).hexdigest()[:12]
