"""Loads transformers configs after checking a checkpoint's JSON files, by rules per quantity.

The valid values of a field depend on its kind of quantity, which is derived from the words in its
name, for all model families. Transformers checks the types in its configs. This module rejects what
transformers accepts: names that make it run code or build huge lists, sizes that are 0, negative or
larger than any machine, and factors that are not numbers. Sizes are compared with the weights when
the weights are checked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils.logging import set_tqdm_hook

from engine.files.json_file import file_inside, read_json_object
from engine.interface.placed_error import described
from engine.interface.sampling_params import checkpoint_defaults

# The same torch functions as in transformers, whose module takes a second to import.
_TORCH_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}


def check_activation(where: str, name: str) -> None:
    """Raise ``ValueError`` if transformers has no such activation; ``where`` names the field."""
    if name in _TORCH_ACTIVATIONS:
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ValueError(f"{where} must be one of {', '.join(ACT2FN)}, got {name!r}")


def activation_of(name: str) -> nn.Module:
    """Create the activation with a name of transformers; ``ValueError`` if there is none."""
    check_activation("activation", name)
    if name in _TORCH_ACTIVATIONS:
        return _TORCH_ACTIVATIONS[name]()
    from transformers.activations import ACT2FN

    return ACT2FN[name]


_LOGGERS = (
    logging.getLogger("transformers.configuration_utils"),
    logging.getLogger("transformers.modeling_rope_utils"),
)
# The config of a part may name tokens of another part's larger vocabulary. Sections of three axes
# are supported by transformers' models, but not by its config check.
_HARMLESS = ("within the vocabulary", "{'mrope_section'}")


@contextmanager
def quiet_config_log() -> Iterator[None]:
    """Drop harmless transformers warnings about configs; all others pass."""
    for logger in _LOGGERS:
        logger.addFilter(_is_relevant)
    try:
        yield
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    return not any(each in str(record.msg) for each in _HARMLESS)


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers within the context.

    Transformers' own switch also toggles the download bars of the hub, and does not remember their
    state. This replaces the hook that creates its bars, and restores it afterwards.
    """
    previous = set_tqdm_hook(lambda make, args, kwargs: make(*args, **kwargs | {"disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(previous)


Check: TypeAlias = Callable[[Any], bool]
Kinds: TypeAlias = tuple[tuple[re.Pattern[str], str, Check], ...]
"""Rules per kind of quantity: pattern of field names, description of valid values, and check."""


def _kind(names: str, wanted: str, check: Check) -> tuple[re.Pattern[str], str, Check]:
    return re.compile(names), wanted, check


def _integer(names: str, minimum: int, maximum: int) -> tuple[re.Pattern[str], str, Check]:
    """Make a rule for integers and (nested) lists of integers."""

    def check(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return (bool(value) or minimum == 0) and all(map(check, value))
        return _is_integer(value) and minimum <= value <= maximum

    return _kind(names, f"an integer of {minimum} to {maximum}", check)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return _is_integer(value) and abs(value) < 2**31


def _list_of(check: Check, lengths: range = range(2**31)) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) in lengths and all(map(check, value))
    )


def _one_or_list_of(check: Check, lengths: range = range(2**31)) -> Check:
    return lambda value: check(value) or _list_of(check, lengths)(value)


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and text != ""


def _is_forced_id(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _is_id(value[0]) and (value[1] is None or _is_id(value[1]))


def _is_dtype(value: Any) -> bool:
    # For composed models, an object with a dtype per part.
    for each in value.values() if isinstance(value, dict) else [value]:
        name = each.removeprefix("torch.") if isinstance(each, str) else ""
        found = getattr(torch, name, None)
        is_float = isinstance(found, torch.dtype) and found.is_floating_point
        if each is not None and name != "auto" and not is_float:
            return False
    return True


def _at_most(maximum: int) -> Check:
    return lambda value: not isinstance(value, int | float) or -maximum <= value <= maximum


_MAX_INT = 2**31 - 1
# Maximum spectrogram rows per code, or samples per row: no audio model has more.
_MAX_RATIO = 64
_NAMES = _kind(r".*_(type|class|side)|language|task", "a name", _is_text)

# Keys of config.json. Lists of layers and labels are built before any check of a field.
_FILE_KEYS: Kinds = (
    _kind("model_type", "a name", _is_text),
    _kind("architectures", "a list of names", _list_of(_is_text)),
    _kind("id2label|label2id", "an object", lambda value: isinstance(value, dict)),
    _kind("(torch_)?dtype", "a type of torch's for numbers", _is_dtype),
    _kind("num_labels", f"at most {2**20}", _at_most(2**20)),
    _kind("depth|.*layers", "at most 4096", _at_most(4096)),
    _kind(
        "configuration_files",
        "left out: another file that takes this one's place is not supported",
        lambda value: False,
    ),
)
# Fields of transformers configs.
_FIELDS: Kinds = (
    _integer(r"repeats|upsample_rates|ff_mult|mamba_expand|spatial_merge_size", 1, _MAX_RATIO),
    # Each distance has a column in a table.
    _integer("relative_attention_max_distance", 1, 2**16),
    _integer(
        r"(image|audio|video|tts|vision)_(\w+_)?token_(id|index)|.*_(offset|indexes|indices)"
        r"|(num_global|max_window|look_\w+|cross_attention)_layers|(position_id|tokens)_per_\w+",
        0,
        _MAX_INT,
    ),
    _kind(r".*_softcapping", "a number above 0", lambda value: 0 < value < math.inf),
    _kind(r".*norm_eps(ilon)?", "a number of at least 0 and below 1", lambda value: 0 <= value < 1),
)
_COUNT_NAMES = (
    r"(num|n|d|mamba|enc)_.*|depth|dim|.*_(sizes?|dim|heads|layers|channels?|ratios|dilations"
    r"|positions|embeddings|buckets|tiles|scalar|period|window|chunk)"
)
_ACTIVATIONS = re.compile(
    r"hidden_act(ivation)?|activation_function|activation|projector_hidden_act"
)
# The outputs of processors grow with these numbers.
_PROCESSOR: Kinds = (
    _NAMES,
    _integer("feature_size", 1, 1024),
    _integer("temporal_patch_size|merge_size", 1, 2**6),
    _integer("patch_size|max_image_tiles", 1, 2**10),
    _integer("height|width", 1, 2**14),
    _integer("n_fft|hop_length", 1, 2**16),
    _integer("chunk_length", 1, 24 * 3600),
    _integer("sampling_rate", 1, 2**20),
    _integer(r".*_(edge|pixels)", 1, 2**28),  # an edge is a number of pixels in some processors
    _kind(
        "image_(mean|std)",
        "a number, or a list of one for each channel",
        _one_or_list_of(_is_number, range(1, 5)),
    ),
    _kind(r".*_(factor|value|ratio)|dither", "a number", _is_number),
)
_BOTH_SIDES = _integer("(crop_)?size", 1, 2**14)
_TOKENIZER: Kinds = (
    _NAMES,
    _kind("model_max_length", "a number", _is_number),
    _kind(
        "add_(prefix_space|bos_token|eos_token)|clean_up_tokenization_spaces",
        "true or false",
        lambda value: isinstance(value, bool),
    ),
    _kind("(bos|eos|unk|pad|sep|cls|mask)_token", "a token", _is_token),
)
_GENERATION: Kinds = (
    _kind("(bos|pad|decoder_start|no_timestamps)_token_id", "a token id", _is_id),
    _kind("eos_token_id", "a list of token ids", _one_or_list_of(_is_id)),
    _kind("(begin_)?suppress_tokens", "a list of token ids", _list_of(_is_id)),
    _kind(
        "(lang|task)_to_id",
        "an object whose values are token ids",
        lambda value: isinstance(value, dict) and all(map(_is_id, value.values())),
    ),
    _kind(
        "forced_decoder_ids",
        "a list of pairs, each of a position and a token id",
        _list_of(_is_forced_id),
    ),
    _kind(
        "bad_words_ids",
        "a list of lists of token ids",
        _list_of(_list_of(_is_id, range(1, 2**31))),
    ),
)
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_TOKENIZER_FILE = "tokenizer_config.json"


def check_files(folder: Path, patterns: Collection[str]) -> None:
    """Check that a checkpoint's files are regular, inside its folder, and have sensible values.

    Args:
        patterns: name patterns of the files that are read from it.

    Raises:
        ValueError: one is no file or is stored elsewhere, or the file of a processor or tokenizer
            is no JSON or has an invalid value; names file and key.
    """
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir() and any(fnmatch(entry.name, pattern) for pattern in patterns):
            file_inside(folder, entry.name)
    for file in (folder / name for name in _PROCESSORS):
        if file.is_file():
            for path, key, value in _entries(read_json_object(file)):
                _check(f"{file}: {path}", key, value, _PROCESSOR)
                # A size may be a single number for both sides.
                if not isinstance(value, dict):
                    _check(f"{file}: {path}", key, value, (_BOTH_SIDES,))
    file = folder / _TOKENIZER_FILE
    if file.is_file():
        for key, value in read_json_object(file).items():
            _check(f"{file}: ", key, value, _TOKENIZER)


def check_generation(file: Path, content: Mapping[str, Any]) -> None:
    """Check the ids of a ``generation_config.json``."""
    for key, value in content.items():
        _check(f"{file}: ", key, value, _GENERATION)


def check_content(file: Path, content: Mapping[str, Any]) -> None:
    """Check the content of a ``config.json`` before a config is built from it.

    Rejects what makes transformers run code, read other files or build huge lists.
    """
    for path, key, value in _entries(content):
        if key in _reserved_names():
            raise ValueError(
                f"{file}: {path}{key} is the name of a method of transformers' configs"
            )
        _check(f"{file}: {path}", key, value, _FILE_KEYS)


def check_config(config: PreTrainedConfig) -> None:
    """Check the fields of a config and its nested configs.

    Fields of classes outside transformers are not checked.
    """
    for path, part in _parts(config):
        if not type(part).__module__.startswith("transformers."):
            continue
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value is not None:
                _check_field(path, field, value)


def _check_field(path: str, field: dataclasses.Field[Any], value: Any) -> None:
    name, default = field.name, field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if _ACTIVATIONS.fullmatch(name):
        check_activation(f"{path}{name}", value)
    elif value == default and type(value) is type(default):
        return
    elif any(names.fullmatch(name) for names, _, _ in _FIELDS):
        _check(path, name, value, _FIELDS)
    # The default of the class determines which fields are integers, and which may be 0.
    elif value != "auto" and not isinstance(value, bool) and (low := _minimum(default)) is not None:
        # A list of layers contains their indices, from 0.
        is_indices = isinstance(value, list) and name.endswith("layers")
        _check(path, name, value, (_integer(_COUNT_NAMES, 0 if is_indices else low, _MAX_INT),))


def _minimum(default: Any) -> int | None:
    """Return the minimum of a count, given the default of its class; None if it is no count."""
    if isinstance(default, list | tuple):
        each = [_minimum(inner) for inner in default]
        known = [minimum for minimum in each if minimum is not None]
        return min(known, default=0) if len(known) == len(each) else None
    if default is None or default == "auto" or default is dataclasses.MISSING:
        return 1
    return max(0, min(1, default)) if _is_integer(default) else None


def _parts(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    yield path, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part, f"{path}{name}.")


def _entries(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield every key of an object and its nested objects, preceded by its path."""
    for key, value in content.items():
        yield path, key, value
        if isinstance(value, dict):
            yield from _entries(value, f"{path}{key}.")


@cache
def _reserved_names() -> frozenset[str]:
    """Return names that would shadow a method of a config, or a table of its class."""
    names = {name for name in dir(PreTrainedConfig) if callable(getattr(PreTrainedConfig, name))}
    return frozenset(names | {"attribute_map", "sub_configs", "sub_configs_defaults"})


def _check(path: str, key: str, value: Any, kinds: Kinds) -> None:
    for names, wanted, check in kinds:
        if value is not None and names.fullmatch(key):
            if not check(value):
                raise ValueError(f"{path}{key} must be {wanted}, got {value!r}")
            return


CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint.

    Raises:
        ValueError: it does not exist, is no JSON that :func:`read_json_object` accepts, or has an
            invalid key; names the file and the key.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {CONFIG_FILE}")
    content = read_json_object(file)
    check_content(file, content)
    return content


def load_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Load a transformers config from a ``config.json`` that was checked before.

    Args:
        trust_remote_code: if true, it may run Python code from the checkpoint.

    Raises:
        ValueError: transformers does not support it, or a value is invalid; names the file.
    """
    options = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    load = partial(AutoConfig.from_pretrained, folder, **options)
    return _checked_config(folder / CONFIG_FILE, load)


def make_config(file: Path, content: Mapping[str, Any]) -> PreTrainedConfig:
    """Build a config from the metadata of another kind of file, like :func:`load_config`."""
    check_content(file, content)
    values = dict(content)
    model_type = values.pop("model_type")
    return _checked_config(file, lambda: AutoConfig.for_model(model_type, **values))


def _checked_config(file: Path, load: Callable[[], PreTrainedConfig]) -> PreTrainedConfig:
    try:
        with quiet_config_log():
            config = load()
        # The file's value could name code to fetch from the hub.
        config._attn_implementation = None
        config._experts_implementation = None
        check_config(config)
        return config
    # Values of a wrong kind make transformers' classes raise arbitrary errors.
    except Exception as error:
        raise ValueError(f"{file} cannot be used: {describe(error)}") from error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Load the ``generation_config.json`` of a checkpoint; None if there is none.

    Raises:
        ValueError: it is no JSON, or has a value that is not supported; names the file.
    """
    file = folder / _GENERATION_FILE
    if not file.is_file():
        return None
    content = read_json_object(file)
    check_generation(file, content)
    try:
        checkpoint_defaults(content)
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    # Values of a wrong kind make transformers raise arbitrary errors.
    except Exception as error:
        raise ValueError(f"{file} cannot be used: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return an error's message, with its type unless the message is self-contained."""
    return str(error) if isinstance(error, OSError | ValueError) else described(error)
