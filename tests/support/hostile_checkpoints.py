"""Corrupted checkpoints: changes to a whole one by an adversary or an accident."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model_trial import TRIALS

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SPEECH = ("talker", "code2wav")
_SEEING = ("llava", "qwen2_5_vl", "mllama", "whisper", "thinker")
Harm = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Hostile:
    """One checkpoint.

    Attributes:
        family: one of ``TRIALS``.
        what: what is wrong with it.
        spoil: corrupts a whole one.
        names: what an error's message has to name; empty if it may also load.
    """

    family: str
    what: str
    spoil: Harm
    names: tuple[str, ...]


def hostile_checkpoints() -> Iterator[Hostile]:
    """Yield all of them, over all families; each is corrupted in one way."""
    for family, trial in TRIALS.items():
        for what, (harm, names) in (_CONFIGS | _SHARDS).items():
            yield Hostile(family, what, harm, names)
        if trial.kind == "llm":
            for what, (harm, names) in _TEXTS.items():
                yield Hostile(family, what, harm, () if family.endswith("talker") else names)
        if family in _SPEECH:
            for what, harm in _VOICES.items():
                names = () if what in _HARMLESS else ("spk_dict.pt",)
                yield Hostile(family, what, harm, names)
        if family in _SEEING:
            for what, (harm, names) in _PROCESSORS.items():
                yield Hostile(family, what, harm, names)


def _edit(file: str, change: Callable[[dict[str, Any]], object]) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content))

    return harm


def _set(file: str, key: str, value: Any) -> Harm:
    return _edit(file, lambda content: content.update({key: value}))


def _keys(
    file: str, changes: Mapping[str, tuple[str, Any]]
) -> dict[str, tuple[Harm, tuple[str, ...]]]:
    """Return a wrong value for each key, which the error has to name."""
    return {what: (_set(file, key, value), (file, key)) for what, (key, value) in changes.items()}


def _write(file: str, content: bytes) -> Harm:
    return lambda folder: (folder / file).write_bytes(content)


def _prepend(file: str, text: str) -> Harm:
    """Insert text after the first brace."""

    def harm(folder: Path) -> None:
        path = folder / file
        before = path.read_text() if path.exists() else '{"a": 1}'
        path.write_text("{" + text + "," + before.lstrip()[1:])

    return harm


def _replace_by(file: str, make: Callable[[Path], object]) -> Harm:
    def harm(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return harm


def _link_outside(file: str) -> Harm:
    def harm(folder: Path) -> None:
        outside = folder.parent / f"outside-{file}"
        if (folder / file).exists():
            (folder / file).rename(outside)
        else:
            outside.write_text("{}")
        (folder / file).symlink_to(outside)

    return harm


def _weights(change: Callable[[dict[str, Tensor]], object]) -> Harm:
    def harm(folder: Path) -> None:
        weights = load_file(folder / _WEIGHTS)
        change(weights)
        save_file(weights, folder / _WEIGHTS, {"format": "pt"})

    return harm


def _largest(weights: Mapping[str, Tensor]) -> str:
    """A matrix of the part tried last in all families: the vocoder's, or the only one's."""
    mine = [name for name in weights if name.startswith("token2wav.code2wav_dit")] or list(weights)
    return max(mine, key=lambda name: weights[name].numel())


def _everywhere(change: Callable[[Tensor], Tensor]) -> Harm:
    """Change a large tensor of every part, so that each part's loading encounters one."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / _WEIGHTS)
        for prefix in ("thinker.", "talker.", "token2wav."):
            names = [name for name in weights if name.startswith(prefix)]
            for name in sorted(names, key=lambda name: -weights[name].numel())[:1]:
                weights[name] = change(weights[name])
        if not any(name.startswith("thinker.") for name in weights):
            name = _largest(weights)
            weights[name] = change(weights[name])
        save_file(weights, folder / _WEIGHTS, {"format": "pt"})

    return harm


def _cut(share: float) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / _WEIGHTS
        os.truncate(path, int(path.stat().st_size * share))

    return harm


def _header(make: Callable[[bytes], bytes]) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / _WEIGHTS
        path.write_bytes(make(path.read_bytes()))

    return harm


def _shards(change: Callable[[Path, dict[str, Any]], object]) -> Harm:
    """Split the weights into two shards with an index, and corrupt that."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / _WEIGHTS)
        (folder / _WEIGHTS).unlink()
        names = sorted(weights)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in shards.items():
            save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
        weight_map = {name: file for file, held in shards.items() for name in held}
        index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
        change(folder, index)
        if not (folder / _INDEX).exists():
            (folder / _INDEX).write_text(json.dumps(index))

    return harm


def _move_shard(place: Callable[[Path], str]) -> Harm:
    """Keep a shard elsewhere, and name that path in the index."""

    def change(folder: Path, index: dict[str, Any]) -> None:
        name = place(folder)
        (folder / "b.safetensors").rename(folder / name)
        for tensor, file in index["weight_map"].items():
            if file == "b.safetensors":
                index["weight_map"][tensor] = name

    return _shards(change)


def _renamed(index: dict[str, Any], value: Any) -> None:
    index["weight_map"] = dict.fromkeys(index["weight_map"], value)


def _deep(levels: int) -> str:
    return '"deep": ' + "[" * levels + "]" * levels


def _absolute_place(folder: Path) -> str:
    return str(folder.parent / "elsewhere.safetensors")


def _link_shard(folder: Path, index: dict[str, Any]) -> None:
    (folder / "b.safetensors").rename(folder.parent / "elsewhere")
    (folder / "b.safetensors").symlink_to(folder.parent / "elsewhere")


def _fewer(weights: dict[str, Tensor]) -> None:
    for name in list(weights)[::7]:
        del weights[name]


def _garbage(data: bytes) -> bytes:
    return data[:8] + b"x" * 100 + data[108:]


_CONFIGS: dict[str, tuple[Harm, tuple[str, ...]]] = {
    "config is empty": (_write("config.json", b""), ("config.json",)),
    "config is a list": (_write("config.json", b"[]"), ("config.json",)),
    "config is half": (_write("config.json", b'{"model_type": "qw'), ("config.json",)),
    "config is no UTF-8": (_write("config.json", b'{"a": "\xff"}'), ("config.json",)),
    "config is very deep": (_prepend("config.json", _deep(100_000)), ("config.json",)),
    "config names a key twice": (
        _prepend("config.json", '"model_type": "llama"'),
        ("config.json", "model_type"),
    ),
    "config holds NaN": (_prepend("config.json", '"rope_theta": NaN'), ("config.json",)),
    "config holds a number of many digits": (
        _prepend("config.json", '"hidden": ' + "9" * 5000),
        ("config.json",),
    ),
    "config is huge": (lambda folder: os.truncate(folder / "config.json", 2**33), ("config.json",)),
    "config is a pipe": (_replace_by("config.json", os.mkfifo), ("config.json",)),
    "config is a folder": (_replace_by("config.json", Path.mkdir), ("config.json",)),
    "config leads outside": (_link_outside("config.json"), ("config.json",)),
    "model_type is unknown": (_set("config.json", "model_type", "gpt9"), ("config.json",)),
    "model_type is a number": (_set("config.json", "model_type", 9), ("config.json",)),
    "model_type is of another family": (_set("config.json", "model_type", "gpt2"), ()),
    "code is brought along": (
        _set("config.json", "auto_map", {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}),
        (),
    ),
    "attention is code of the hub": (_set("config.json", "attn_implementation", "evil/code"), ()),
    **_keys(
        "config.json",
        {
            "architectures is a text": ("architectures", "X"),
            "architectures holds a number": ("architectures", [1]),
            "a key hides a method": ("get_text_config", 5),
            "another config is to be read": ("configuration_files", ["config.4.0.0.json"]),
            "there are a billion labels": ("num_labels", 10**9),
            "there are a billion layers": ("num_hidden_layers", 10**9),
            "weights are quantized": ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        },
    ),
}
_SHARDS: dict[str, tuple[Harm, tuple[str, ...]]] = {
    "weights are missing": (lambda folder: (folder / _WEIGHTS).unlink(), ("safetensors",)),
    "weights are pickled": (
        lambda folder: (folder / _WEIGHTS).rename(folder / "pytorch_model.bin"),
        ("pytorch_model.bin",),
    ),
    "weights are empty": (_write(_WEIGHTS, b""), (_WEIGHTS,)),
    "weights are cut": (_cut(0.6), (_WEIGHTS,)),
    "the header is cut": (_cut(0.001), (_WEIGHTS,)),
    "the header is garbage": (_header(_garbage), (_WEIGHTS,)),
    "the header is said to be endless": (
        _header(lambda data: struct.pack("<Q", 2**63) + data[8:]),
        (_WEIGHTS,),
    ),
    "weights are a pipe": (_replace_by(_WEIGHTS, os.mkfifo), (_WEIGHTS,)),
    "weights lead outside": (_link_outside(_WEIGHTS), (_WEIGHTS,)),
    "tensors are missing": (_weights(_fewer), ("lacks",)),
    "a tensor is too long": (_everywhere(lambda x: torch.cat([x, x])), ("shape",)),
    "a tensor has no elements": (_everywhere(lambda x: x[:0].clone()), ("shape",)),
    "a tensor has a dimension more": (_everywhere(lambda x: x[None].clone()), ("shape",)),
    "a tensor is of integers": (_everywhere(lambda x: x.to(torch.int32)), ("I32",)),
    "a tensor is of bytes": (_everywhere(lambda x: x.to(torch.uint8)), ("U8",)),
    "a tensor is of truth values": (_everywhere(lambda x: x > 0), ("BOOL",)),
    "a tensor is of 8 bits": (_everywhere(lambda x: x.to(torch.float8_e4m3fn)), ("F8",)),
    "a shard lies above": (_move_shard(lambda _: "../x.safetensors"), (_INDEX, "../x")),
    "a shard is named by its place": (_move_shard(_absolute_place), ("elsewhere.safetensors",)),
    "a shard leads outside": (_shards(_link_shard), ("b.safetensors",)),
    "a shard is missing": (
        _shards(lambda folder, _: (folder / "b.safetensors").unlink()),
        (_INDEX, "b.safetensors"),
    ),
    "a shard is a folder": (
        _shards(lambda folder, _: _replace_by("b.safetensors", Path.mkdir)(folder)),
        ("b.safetensors",),
    ),
    "the index names other shards": (
        _shards(lambda _, index: _renamed(index, "a.safetensors")),
        (_INDEX, "a.safetensors"),
    ),
    "the index names no files": (_shards(lambda _, index: _renamed(index, 7)), (_INDEX,)),
    "the index holds a NUL": (
        _shards(lambda _, index: _renamed(index, "a\0.safetensors")),
        (_INDEX,),
    ),
    "the index is a list": (
        _shards(lambda folder, _: (folder / _INDEX).write_text("[]")),
        (_INDEX,),
    ),
    "the index is empty": (
        _shards(lambda folder, _: (folder / _INDEX).write_text('{"weight_map": {}}')),
        (),
    ),
}
_TOKENIZER = ("tokenizer",)
_GENERATION = ("generation_config.json",)
_TEXTS: dict[str, tuple[Harm, tuple[str, ...]]] = {
    "the tokenizer is half": (
        lambda folder: os.truncate(folder / "tokenizer.json", 1000),
        _TOKENIZER,
    ),
    "the tokenizer is empty": (_write("tokenizer.json", b"{}"), _TOKENIZER),
    "the tokenizer is deep": (_prepend("tokenizer.json", _deep(50_000)), _TOKENIZER),
    "the tokenizer is of an unknown kind": (
        _edit("tokenizer.json", lambda content: content["model"].update(type="Evil")),
        _TOKENIZER,
    ),
    "the tokenizer leads outside": (_link_outside("tokenizer.json"), ("tokenizer.json",)),
    "the tokenizer's config is a list": (_write("tokenizer_config.json", b"[]"), _TOKENIZER),
    "the tokenizer's class is a number": (
        _set("tokenizer_config.json", "tokenizer_class", 5),
        _TOKENIZER,
    ),
    "the tokenizer brings code": (
        _set("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["evil.A", "evil.B"]}),
        (),
    ),
    "generation is a list": (_write("generation_config.json", b"[]"), _GENERATION),
    "generation is half": (_write("generation_config.json", b"{"), _GENERATION),
    **_keys(
        "generation_config.json",
        {
            "generation ends at a text": ("eos_token_id", "end"),
            "generation suppresses texts": ("suppress_tokens", ["a"]),
            "generation forces numbers": ("forced_decoder_ids", [1, 2]),
        },
    ),
}
_PROCESSOR = "preprocessor_config.json"
_PROCESSORS: dict[str, tuple[Harm, tuple[str, ...]]] = {
    "the processor is no JSON": (_write(_PROCESSOR, b"{"), (_PROCESSOR,)),
    "the processor is a list": (_write(_PROCESSOR, b"[]"), (_PROCESSOR,)),
    "the processor is missing": (lambda folder: (folder / _PROCESSOR).unlink(), ()),
    "the processor brings code": (
        _set(
            _PROCESSOR,
            "auto_map",
            {"AutoImageProcessor": "evil.Evil", "AutoFeatureExtractor": "evil.Evil"},
        ),
        (),
    ),
    "the processor's map is a number": (_set(_PROCESSOR, "auto_map", 5), ()),
    "the processor's kind is a number": (
        _edit(_PROCESSOR, lambda c: c.update(image_processor_type=5, feature_extractor_type=5)),
        (),
    ),
    "the processor makes enormous images": (
        _set(_PROCESSOR, "size", {"height": 10**9, "width": 10**9}),
        (_PROCESSOR, "height"),
    ),
    "the processor crops enormous images": (
        _set(_PROCESSOR, "crop_size", {"height": 10**6, "width": 10**6}),
        (_PROCESSOR, "height"),
    ),
    **_keys(
        _PROCESSOR,
        {
            "the processor's patches have no size": ("patch_size", 0),
            "the processor makes enormous spectrograms": ("feature_size", 10**9),
            "the processor hears a million years": ("chunk_length", 10**12),
            "the processor's means are a text": ("image_mean", "grey"),
        },
    ),
}


def _voice(**changes: Any) -> Harm:
    def harm(folder: Path) -> None:
        voices = torch.load(folder / "spk_dict.pt", weights_only=True)
        for voice in voices.values():
            voice.update(changes)
        torch.save(voices, folder / "spk_dict.pt")

    return harm


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch RAN",))


def _zip_again(change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / "spk_dict.pt"
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, data in entries.items():
                archive.writestr(name, change(name, data))

    return harm


def _bloat(name: str, data: bytes) -> bytes:
    return data[:-1] + b"0" * 200_000_000 + data[-1:] if name.endswith("data.pkl") else data


def _claim_more(name: str, data: bytes) -> bytes:
    """Claim that the storages of spectrograms have 2 ** 31 - 1 elements."""
    return data.replace(b"M\x80\x0c", b"J" + struct.pack("<i", 2**31 - 1))


# Values that one of the two parts does not read, or that are within the file after all.
_HARMLESS = (
    "the voices claim more than there is",
    "the voices begin outside",
    "the voices are of other widths",
)
_VOICES: dict[str, Harm] = {
    "the voices are missing": lambda folder: (folder / "spk_dict.pt").unlink(),
    "the voices are empty": _write("spk_dict.pt", b""),
    "the voices are cut": lambda folder: os.truncate(folder / "spk_dict.pt", 5000),
    "the voices are a pipe": _replace_by("spk_dict.pt", os.mkfifo),
    "the voices lead outside": _link_outside("spk_dict.pt"),
    "the voices run code": _voice(cond=_Bomb()),
    "the voices are compressed": _zip_again(lambda _, data: data, zipfile.ZIP_DEFLATED),
    "the voices are a bomb": _zip_again(_bloat, zipfile.ZIP_DEFLATED),
    "the voices claim more than there is": _zip_again(_claim_more),
    "the voices are huge": lambda folder: os.truncate(folder / "spk_dict.pt", 2**36),
    "the voices are spread": _voice(cond=torch.zeros(1, 1).expand(1, 10**11)),
    "the voices are nowhere": _voice(cond=torch.zeros(1, 16, device="meta")),
    "the voices are sparse": _voice(ref_mel=torch.zeros(1, 40, 80).to_sparse()),
    "the voices are integers": _voice(cond=torch.zeros(1, 16, dtype=torch.int64)),
    "the voices are NaN": _voice(cond=torch.full((1, 16), torch.nan)),
    "the voices begin with True": _voice(bos_token=True),
    "the voices begin outside": _voice(bos_token=10**9),
    "the voices are of other widths": _voice(cond=torch.zeros(1, 7), ref_mel=torch.zeros(1, 4, 9)),
}
