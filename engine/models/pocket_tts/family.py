"""The two checkpoints of Pocket TTS, each of which a stage of its own runs.

What a model needs is imported when it is built.
"""

from __future__ import annotations

from engine.models.family import ModelFamily, deferred

POCKET_TTS = ModelFamily(
    "pocket_tts",
    ("PocketTTSForConditionalGeneration",),
    build=deferred("engine.models.pocket_tts.pocket_tts:PocketTTS"),
    prompts=deferred("engine.models.pocket_tts.pocket_tts:PocketPrompts"),
)
POCKET_TTS_CODEC = ModelFamily(
    "pocket_tts_audio_tokenizer",
    ("PocketTTSAudioTokenizerModel",),
    generator=deferred("engine.models.pocket_tts.codec:PocketCodec"),
    reads_text=False,
)
