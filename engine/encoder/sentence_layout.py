"""Reads the layout of a sentence-transformers checkpoint, which turns a text into one vector.

::

    modules.json                  which modules, in order:
      ""             Transformer    sentence_bert_config.json: longest input, lower case
      "1_Pooling"    Pooling        config.json: from one row per token to one
      "2_Dense"      Dense          config.json, model.safetensors: a projection; optional
      "3_Normalize"  Normalize      to length 1

It contains no code: a module of another type is refused, never imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.files.json_file import file_inside, read_json, read_json_object
from engine.resources.device import on_device, require_finite

Pooling: TypeAlias = Literal["auto", "mean", "cls", "last", "pooler"]
"""``mean`` of all rows, the first (``cls``), the ``last``, or the checkpoint's own ``pooler``;
``auto`` is the pooler if the checkpoint has one, else the mean."""

_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    # In fp32: a bf16 sum of hundreds of rows loses their differences.
    "mean": lambda rows: rows.float().mean(dim=0).to(rows.dtype),
    "cls": lambda rows: rows[0].clone(),
    "last": lambda rows: rows[-1].clone(),
}


def resolve_pooling(pooling: Pooling, pooler: nn.Module | None) -> Pooling:
    """Resolve ``auto``; ``ValueError`` for an unknown pooling, or ``pooler`` without a pooler."""
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"unknown pooling {pooling!r}; known are {known}")
    if pooling == "pooler" and pooler is None:
        raise ValueError(
            "pooling 'pooler' needs a checkpoint with pooler weights that work on its hidden "
            "states; this one has none: take 'mean', 'cls' or 'last'"
        )
    if pooling == "auto":
        return "mean" if pooler is None else "pooler"
    return pooling


def pool(pooling: Pooling, rows: Tensor, pooler: nn.Module | None) -> Tensor:
    """Pool the rows of one input.

    Args:
        rows: ``(n, hidden)`` on the CPU.
        pooler: ``(1, n, hidden) -> (1, D)``, on any device.

    Returns:
        ``(D,)`` on the CPU.

    Raises:
        ValueError: the result is not finite.
    """
    if pooling == "pooler":
        assert pooler is not None
        device = next(pooler.parameters()).device
        with on_device(device):
            pooled: Tensor = pooler(rows[None].to(device))[0].cpu()
    else:
        pooled = _BY_NAME[pooling](rows)
    require_finite({"pooled": pooled})
    return pooled


def normalized(row: Tensor) -> Tensor:
    """Scale a row ``(D,)`` to length 1; computed in fp32, returned in the row's type."""
    return nn.functional.normalize(row.float(), dim=-1).to(row.dtype)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.linear.Identity": lambda rows: rows,
}
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer and an activation, in fp32 on the CPU.

    Attributes:
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def apply(self, row: Tensor) -> Tensor:
        """Project ``(in_features,)`` to ``(out_features,)``, in the row's type."""
        out = nn.functional.linear(row.float(), self.weight, self.bias)
        return self.activation(out).to(row.dtype)


def load_projection(folder: Path, path: str, config: Mapping[str, Any]) -> Projection:
    """Load a ``Dense`` module of the layout; ``ValueError`` if it is unsupported or damaged."""
    file = folder / path / "config.json"
    name = config.get("activation_function")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"{file}: activation_function is {name!r}, and what is supported is "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if not (folder / path / _WEIGHTS).is_file():
        raise ValueError(f"{folder / path} has no {_WEIGHTS}; pickled weights are not read")
    weights = file_inside(folder, str(Path(path, _WEIGHTS)))
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights} cannot be read: {error}") from error
    sides = [config.get(key) for key in ("out_features", "in_features")]
    wanted = {"linear.weight": sides}
    if config.get("bias", True):
        wanted["linear.bias"] = sides[:1]
    for key, shape in wanted.items():
        if key not in tensors or list(tensors[key].shape) != shape:
            found = list(tensors[key].shape) if key in tensors else "nothing"
            raise ValueError(f"{weights}: {key} must be {shape} by {file}, got {found}")
        if not tensors[key].is_floating_point():
            raise ValueError(f"{weights}: {key} must be floating point, got {tensors[key].dtype}")
    bias = tensors["linear.bias"].float() if "linear.bias" in wanted else None
    return Projection(tensors["linear.weight"].float(), bias, _ACTIVATIONS[name])


_MODULES = "modules.json"
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PROMPTS = "config_sentence_transformers.json"
_PACKAGE = "sentence_transformers."
_MAX_FILE_BYTES = 2**20

_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Keys of the format before ``pooling_mode``.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    """The processing before and after a checkpoint's transformer.

    Attributes:
        projections: projections of the pooled row, in order.
        normalize: True if the result is scaled to length 1.
        max_seq_length: maximum tokens of an input; None uses the model's limit.
        lower_case: True if texts are lowercased.
    """

    pooling: Pooling
    projections: tuple[Projection, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False
    prefix: str = ""

    def written(self, text: str) -> str:
        """Return a text as the model should read it."""
        plain = (self.prefix + text).strip()
        return plain.lower() if self.lower_case else plain


def read_sentence_layout(folder: Path, pooling: Pooling = "auto") -> SentenceLayout | None:
    """Read the layout of a checkpoint folder; None if it has no ``modules.json``.

    Args:
        pooling: replaces the checkpoint's own, unless it is ``auto``.

    Raises:
        ValueError: a file is unreadable or requests unsupported settings; names file and key.
    """
    if not (folder / _MODULES).is_file():
        return None
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"{folder / _MODULES}: its modules must begin with a Transformer and a Pooling, "
            f"got {', '.join(kinds) or 'none'}"
        )
    (_, transformer), (_, pooling_path), *rest = modules
    if Path(transformer) != Path():
        raise ValueError(
            f"{folder / _MODULES}: the path of its Transformer must be the folder itself, "
            f"got {transformer!r}"
        )
    settings = _read_settings(folder)
    if pooling == "auto":
        pooling = _read_pooling(_config_path(folder, pooling_path), bool(settings["prefix"]))
    projections: list[Projection] = []
    for position, (kind, path) in enumerate(rest, start=2):
        if kind == "Dense":
            config = _read_object(_config_path(folder, path))
            projections.append(load_projection(folder, path, config))
        elif kind != "Normalize" or position != len(modules) - 1:
            raise ValueError(
                f"{folder / _MODULES}: module {position} is a {kind}; behind the Pooling, what is "
                "supported is Dense, and Normalize as the last"
            )
    return SentenceLayout(
        pooling=pooling,
        projections=tuple(projections),
        normalize=kinds[-1] == "Normalize",
        **settings,
    )


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the last name of each module's type, with its path in the folder, in order."""
    file = file_inside(folder, _MODULES)
    entries = read_json(file, most_bytes=_MAX_FILE_BYTES)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file}: must be a list of modules, each a mapping")
    entries.sort(key=lambda entry: _require(file, entry, "idx", int))
    found = []
    for entry in entries:
        kind, path = _require(file, entry, "type", str), _require(file, entry, "path", str)
        if not kind.startswith(_PACKAGE):
            raise ValueError(
                f"{file}: type {kind!r} is code that the checkpoint brings, which is not run"
            )
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{file}: path {path!r} leads out of the checkpoint's folder")
        found.append((kind.rpartition(".")[2], path))
    return found


def _config_path(folder: Path, path: str) -> Path:
    return file_inside(folder, str(Path(path, "config.json")))


def _read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_seq_length": None, "lower_case": False, "prefix": ""}
    names = (name for name in _TRANSFORMER_CONFIGS if (folder / name).is_file())
    files = [file_inside(folder, name) for name in names]
    if files:
        config = _read_object(files[0])
        longest = _optional(files[0], config, "max_seq_length", int)
        if longest is not None and longest < 1:
            raise ValueError(f"{files[0]}: max_seq_length must be at least 1, got {longest}")
        settings["max_seq_length"] = longest
        settings["lower_case"] = bool(_optional(files[0], config, "do_lower_case", bool))
    if (folder / _PROMPTS).is_file():
        prompts = file_inside(folder, _PROMPTS)
        config = _read_object(prompts)
        name = _optional(prompts, config, "default_prompt_name", str)
        if name is not None:
            named = _require(prompts, config, "prompts", dict)
            settings["prefix"] = _require(prompts, named, name, str)
    return settings


def _read_pooling(file: Path, has_prefix: bool) -> Pooling:
    config = _read_object(file)
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        modes: Sequence[Any] = mode if isinstance(mode, list) else [mode]
        key = "pooling_mode"
    else:
        flags = [flag for flag in config if flag.startswith("pooling_mode_") and config[flag]]
        modes, key = [_FLAGS.get(flag, flag) for flag in flags], ", ".join(flags)
    if len(modes) != 1:
        raise ValueError(
            f"{file}: exactly one way of pooling must be chosen, got {key or 'none'}; "
            "set 'pooling' for the stage"
        )
    if modes[0] not in list(_POOLINGS):  # a list, as the mode may be unhashable
        raise ValueError(
            f"{file}: {key} is {modes[0]!r}, and what is supported is {', '.join(_POOLINGS)}; "
            "set 'pooling' for the stage"
        )
    if has_prefix and config.get("include_prompt") is False:
        raise ValueError(
            f"{file}: include_prompt is false, and a prompt that is left out of the pooling is "
            "not supported"
        )
    return _POOLINGS[modes[0]]


def _read_object(file: Path) -> dict[str, Any]:
    return read_json_object(file, most_bytes=_MAX_FILE_BYTES)


def _optional(file: Path, config: Mapping[str, Any], key: str, kind: type) -> Any:
    return None if config.get(key) is None else _require(file, config, key, kind)


def _require(file: Path, config: Mapping[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    # JSON's true is not a number.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        got = "nothing" if key not in config else repr(value)[:80]
        raise ValueError(f"{file}: {key} must be {kind.__name__}, got {got}")
    return value
