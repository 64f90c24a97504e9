"""What lies beside ``config.json`` in a checkpoint: looked at before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from engine.checkpoints.config_file import describe
from engine.files.json_file import file_inside, read_json_object
from engine.interface.sampling_params import checkpoint_defaults

__all__ = ["check_files", "load_generation_config"]

_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

# The most that numbers of processors may be: what is made of them grows with these.
_MOST: Mapping[str, int] = {
    "feature_size": 1024,
    "n_fft": 2**16,
    "hop_length": 2**16,
    "chunk_length": 24 * 3600,
    "sampling_rate": 2**20,
    "height": 2**14,
    "width": 2**14,
    "shortest_edge": 2**28,  # of some processors a number of pixels
    "longest_edge": 2**28,
    "min_pixels": 2**28,
    "max_pixels": 2**28,
    "patch_size": 2**10,
    "temporal_patch_size": 2**6,
    "merge_size": 2**6,
    "max_image_tiles": 2**10,
}
# Of an image's channels.
_CHANNEL_KEYS = ("image_mean", "image_std")
_MOST_CHANNELS = 4
_FACTOR_KEYS = ("rescale_factor", "padding_value", "dither", "max_ratio")
_NAME_KEYS = (
    *("image_processor_type", "feature_extractor_type", "video_processor_type"),
    *("processor_class", "tokenizer_class", "padding_side", "language", "task"),
)
_FLAG_KEYS = ("add_prefix_space", "clean_up_tokenization_spaces", "add_bos_token", "add_eos_token")
_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
# A size may be one number for both sides.
_SIDES = ("size", "crop_size")

_ID_KEYS = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "no_timestamps_token_id")
_ID_LIST_KEYS = ("suppress_tokens", "begin_suppress_tokens")
_ID_TABLE_KEYS = ("lang_to_id", "task_to_id")


def check_files(folder: Path, patterns: Collection[str]) -> None:
    """See to it that the files of a checkpoint are files, lie in it, and ask for nothing absurd.

    Args:
        folder: of the checkpoint.
        patterns: of the names of files that are read from it.

    Raises:
        ValueError: one is no file or lies elsewhere, or the file of a processor or tokenizer is no
            JSON or holds a value that cannot be; names file and key.
    """
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir() and any(fnmatch(entry.name, pattern) for pattern in patterns):
            file_inside(folder, entry.name)
    for file in (folder / name for name in _PROCESSORS):
        if file.is_file():
            _check_processor(str(file), read_json_object(file))
    if (folder / _TOKENIZER).is_file():
        _check_tokenizer(str(folder / _TOKENIZER), read_json_object(folder / _TOKENIZER))


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Make transformers' config of ``generation_config.json``; None where there is none.

    Raises:
        ValueError: it is no JSON, or transformers or we cannot use a value of it; names the file.
    """
    file = folder / _GENERATION
    if not file.is_file():
        return None
    content = read_json_object(file)
    for key, value in content.items():
        if value is not None and not _is_possible(key, value):
            raise ValueError(f"{file}: {key} cannot be {value!r}: it must be {_wanted(key)}")
    try:
        checkpoint_defaults(content)
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    # Values of a wrong kind make transformers raise whatever it stumbles over.
    except Exception as error:
        raise ValueError(f"{file} cannot be used: {describe(error)}") from error


def _is_possible(key: str, value: Any) -> bool:
    if key in _ID_KEYS:
        return _is_id(value)
    if key == "eos_token_id":
        return _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))
    if key in _ID_LIST_KEYS:
        return isinstance(value, list) and all(map(_is_id, value))
    if key in _ID_TABLE_KEYS:
        return isinstance(value, dict) and all(map(_is_id, value.values()))
    if key == "forced_decoder_ids":
        return isinstance(value, list) and all(map(_is_forced, value))
    if key == "bad_words_ids":
        return isinstance(value, list) and all(map(_is_word, value))
    return True


def _wanted(key: str) -> str:
    if key in _ID_TABLE_KEYS:
        return "an object whose values are token ids"
    if key == "forced_decoder_ids":
        return "a list of pairs, each of a position and a token id"
    if key == "bad_words_ids":
        return "a list of lists of token ids"
    return "a token id" if key in _ID_KEYS else "a list of token ids"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def _is_word(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_forced(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_id(value[0])
        and (value[1] is None or _is_id(value[1]))
    )


def _check_processor(where: str, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        place = f"{where}: {key}"
        if value is None:
            continue
        if key in _MOST:
            _check_number(place, value, _MOST[key])
        elif key in _CHANNEL_KEYS:
            _check_channels(place, value)
        elif key in _FACTOR_KEYS and not _is_number(value):
            raise ValueError(f"{place} must be a number, got {value!r}")
        elif key in _NAME_KEYS and not isinstance(value, str):
            raise ValueError(f"{place} must be a name, got {value!r}")
        elif key in _SIDES and not isinstance(value, dict):
            _check_number(place, value, _MOST["height"])
        elif isinstance(value, dict):
            _check_processor(place, value)


def _check_tokenizer(where: str, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if value is None:
            continue
        if key in _NAME_KEYS and not isinstance(value, str):
            raise ValueError(f"{where}: {key} must be a name, got {value!r}")
        if key == "model_max_length" and not _is_number(value):
            raise ValueError(f"{where}: {key} must be a number, got {value!r}")
        if key in _FLAG_KEYS and not isinstance(value, bool):
            raise ValueError(f"{where}: {key} must be true or false, got {value!r}")
        if key in _TOKEN_KEYS and not _is_token(value):
            raise ValueError(f"{where}: {key} must be a token, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and text != ""


def _check_channels(where: str, value: Any) -> None:
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= _MOST_CHANNELS or not all(map(_is_number, numbers)):
        raise ValueError(
            f"{where} must be a number, or a list of one for each channel, got {value!r}"
        )


def _check_number(where: str, value: Any, most: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= most:
        raise ValueError(f"{where} must be an integer of 1 to {most}, got {value!r}")
