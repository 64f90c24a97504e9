"""GGUF files as checkpoints: config and weights, by transformers' names.

llama.cpp's converter renames tensors, permutes the rows of some, and writes the config as metadata.
To undo this, transformers' table of metadata keys and its inverse value transforms are used. The
``gguf`` package dequantizes blocks, tensor by tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoints.config_file import check_generation, make_config
from engine.checkpoints.quantized_weight import QuantizationScheme, QuantizedWeight, Stored, Target
from engine.files.gguf_header import GGUFHeader, GGUFTensor

_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Types kept as codes: bits, values per group, and the code of zero if it is a constant.
_CODE_FORMATS: Mapping[str, tuple[Literal[4, 8], int, int | None]] = {
    "Q4_0": (4, 32, 8),
    "Q4_1": (4, 32, None),
    "Q5_0": (8, 32, 16),
    "Q5_1": (8, 32, None),
    "Q8_0": (8, 32, 128),
    "Q4_K": (4, 32, None),
    "Q5_K": (8, 32, None),
    "Q6_K": (8, 16, 32),
}
_READABLE = (*_PLAIN_TYPES, *_BLOCKS, "IQ4_NL", "IQ4_XS")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
# Tensors that stack a matrix of every expert.
_EXPERTS_IN_LAYERS = {
    f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")
}
# Each gets names of its own; published models have a few hundred.
_MAX_EXPERTS = 1024
# transformers' names of architectures, where they differ.
_ARCHITECTURES = {"qwen3moe": "qwen3_moe"}
# Target of ffn_norm in models that also normalise the outputs of attention and MLP.
_PRE_MLP_NORM = "pre_feedforward_layernorm"
# Keys, without the architecture prefix, that transformers' table lacks for some architectures.
_MORE_KEYS = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Models with these numbers of layers scale scores by hidden size / heads; metadata lacks this.
_LAYERS_SCALED_BY_WIDTH = (46, 62)


def gguf_config(header: GGUFHeader) -> PreTrainedConfig:
    """Build the transformers config that a file's metadata describes.

    Raises:
        ValueError: the architecture is not known, or a value is missing, invalid, or not
            supported; names the file and the key.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = _ARCHITECTURES.get(header.architecture, header.architecture)
    # For multimodal models, GGUF files contain only the text model.
    kind = next((t for t in (f"{architecture}_text", architecture) if t in CONFIG_MAPPING), "")
    if architecture not in GGUF_CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{header.path}: transformers cannot make a config of the architecture "
            f"{architecture!r}; it knows {', '.join(sorted(GGUF_CONFIG_MAPPING))}"
        )
    content = gguf_token_ids(header)
    table: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    for key, field in {**table[architecture], **_MORE_KEYS}.items():
        value = _number(header, f"{header.architecture}.{key}")
        if field is not None and value is not None:
            content[field] = value
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{header.path} lacks the weights token_embd.weight")
    largest = max(header.tensors.values(), key=lambda tensor: tensor.nbytes)
    content |= {
        "model_type": kind,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _PLAIN_TYPES.get(largest.type_name),
    }
    for key, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
        if f"blk.0.{tensor}.bias" in header.tensors:
            content[key] = True
    if "num_experts" in content:
        content["norm_topk_prob"] = True  # as in llama.cpp; there is no key for it
    _add_rope(header, content)
    config = make_config(header.path, content)
    if hasattr(config, "query_pre_attn_scalar"):
        width = config.hidden_size // config.num_attention_heads
        by_width = config.num_hidden_layers in _LAYERS_SCALED_BY_WIDTH
        config.query_pre_attn_scalar = width if by_width else config.head_dim
    if _ROPE_FACTORS in header.tensors:
        _set_rope_factors(header, config)
    return config


def _number(header: GGUFHeader, key: str) -> Any:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"{header.path}: {key} must be one number, got {value!r:.80}")
    return value


def _add_rope(header: GGUFHeader, content: dict[str, Any]) -> None:
    prefix = f"{header.architecture}.rope"
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    head_dim = content.get("head_dim") or (hidden // heads if hidden and heads else None)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        width = _number(header, f"{header.architecture}.{key}")
        if width not in (None, head_dim):
            raise ValueError(
                f"{header.path}: {header.architecture}.{key} is {width}, but heads are "
                f"{head_dim} wide; models that turn a part of each head are not supported"
            )
    kind = header.metadata.get(f"{prefix}.scaling.type", "none")
    factor = _number(header, f"{prefix}.scaling.factor")
    if kind == "none":
        return
    if kind not in ("linear", "yarn") or factor is None:
        raise ValueError(
            f"{header.path}: {prefix}.scaling.type must be none, or linear or yarn with a "
            f"{prefix}.scaling.factor; got {kind!r:.80} and {factor!r}"
        )
    content["rope_scaling"] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = _number(header, f"{prefix}.scaling.original_context_length")
        content["rope_scaling"]["original_max_position_embeddings"] = original


def _set_rope_factors(header: GGUFHeader, config: PreTrainedConfig) -> None:
    """Set the rope parameters that reproduce a file's factors; raise if no known ones do."""
    parameters, tensor = dict(config.rope_parameters), header.tensors[_ROPE_FACTORS]
    theta, width = parameters.get("rope_theta"), 2 * tensor.shape[0]
    if tensor.type_name != "F32" or len(tensor.shape) != 1 or theta is None:
        raise ValueError(f"{header.path}: {_ROPE_FACTORS} must be a row of F32 for one base")
    factors = torch.from_numpy(GGUFWeights(header).values(tensor))
    config.rope_parameters = parameters | {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, width, 2) / width)
    if factors.shape != scaled.shape or not torch.allclose(plain / factors, scaled, rtol=1e-3):
        raise ValueError(
            f"{header.path}: {_ROPE_FACTORS} are not the factors of rope parameters that are known"
        )


def gguf_token_ids(header: GGUFHeader) -> dict[str, Any]:
    """Return the ids of special tokens that begin, pad and end a text, by transformers' names."""
    names = ("bos", "padding", "eos", "eot", "eom")
    first, padding, *ends = (_number(header, f"tokenizer.ggml.{n}_token_id") for n in names)
    ids: dict[str, Any] = {"bos_token_id": first, "pad_token_id": padding}
    ids["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    check_generation(header.path, ids)
    return ids


@dataclass(frozen=True)
class GGUFWeights:
    """The weights of a GGUF file, by transformers' names."""

    header: GGUFHeader

    @cached_property
    def files(self) -> Mapping[str, str]:
        """File name of each tensor."""
        return dict.fromkeys(self._stored, self.header.path.name)

    @property
    def formats(self) -> Mapping[str, int]:
        """Number of tensors of each type, most frequent first."""
        return dict(Counter(x.type_name for x in self.header.tensors.values()).most_common())

    @cached_property
    def _stored(self) -> Mapping[str, tuple[str, GGUFTensor]]:
        """Name and place in the file by transformers' names; unknown names are unchanged."""
        has_output_norms = any(".post_ffw_norm." in name for name in self.header.tensors)
        names = _NAMES_IN_LAYERS | ({"ffn_norm": _PRE_MLP_NORM} if has_output_norms else {})
        stored: dict[str, tuple[str, GGUFTensor]] = {}
        for name, tensor in self.header.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            stem, _, suffix = name.rpartition(".")
            given = _NAMES.get(stem)
            if stem.startswith("blk."):
                _, layer, rest = (*stem.split(".", 2), "")[:3]
                if rest in _EXPERTS_IN_LAYERS and tensor.shape[0] <= _MAX_EXPERTS:
                    given = f"model.layers.{layer}.{_EXPERTS_IN_LAYERS[rest]}.{suffix}"
                    for index, matrix in enumerate(tensor.rows()):
                        stored[given.format(index)] = name, matrix
                    continue
                given = names.get(rest) and f"model.layers.{layer}.{names[rest]}"
            stored[name if given is None else f"{given}.{suffix}"] = name, tensor
        return stored

    @cached_property
    def _undo(self) -> Callable[[Any, str], Any]:
        """Function that undoes the converter's changes to the values of a tensor."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        config = gguf_config(self.header)
        kind = TENSOR_PROCESSORS.get(self.header.architecture, TensorProcessor)
        processor = kind(config=config.to_dict())
        return lambda values, name: processor.process(values, name).weights

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        """See :class:`WeightFiles`; blocks are returned as codes, or as float32 values."""
        for name in names:
            stored, tensor = self._find(name)
            values = self.values(tensor)
            if tensor.type_name not in _CODE_FORMATS or len(tensor.shape) != 2:
                yield name, torch.from_numpy(self._undo(values, stored))
                continue
            bits, size, _ = _CODE_FORMATS[tensor.type_name]
            arrays = self._codes(tensor, values)
            codes, scales, offsets = (torch.from_numpy(self._undo(a, stored)) for a in arrays)
            yield name, QuantizedWeight(codes, scales, offsets, size, bits)

    def scheme_of(self, name: str) -> QuantizationScheme | None:
        """Return the storage scheme of a matrix that is read as codes; None for others."""
        _, tensor = self._find(name)
        code_format = _CODE_FORMATS.get(tensor.type_name) if len(tensor.shape) == 2 else None
        return code_format and QuantizationScheme(*code_format[:2])

    def check(self, expected: Mapping[str, Target]) -> None:
        """See :class:`WeightFiles`; all types must be readable."""
        for name, target in expected.items():
            _, stored = self._find(name)
            if stored.shape != tuple(target.shape):
                raise ValueError(
                    f"{name} in {self.header.path} has shape {stored.shape}; "
                    f"its metadata asks for {tuple(target.shape)}"
                )
            if stored.type_name not in _READABLE:
                raise ValueError(
                    f"{name} in {self.header.path} is of the type {stored.type_name}, which is "
                    f"not supported; supported are {', '.join(_READABLE)}"
                )

    def _codes(self, tensor: GGUFTensor, values: Any) -> tuple[Any, Any, Any]:
        """Compute codes, scales and offsets of the groups of a matrix from its values."""
        from gguf.quants import Q4_K

        bits, size, zero = _CODE_FORMATS[tensor.type_name]
        content = np.fromfile(self.header.path, np.uint8, tensor.nbytes, offset=tensor.start)
        blocks = content.reshape(values.size // tensor.block_size, -1)

        def half(start: int) -> Any:
            return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)

        if tensor.type_name == "Q6_K":
            scales = half(208) * blocks[:, 192:208].view(np.int8)
        elif tensor.type_name.endswith("_K"):
            factors, minima = Q4_K.get_scale_min(blocks[:, 4:16])
            scales, offsets = half(0) * factors, -half(2) * minima
        else:
            scales, offsets = half(0), half(2)
        if zero is not None:
            offsets = -zero * scales
        shape = (len(values), values.shape[1] // size, 1)
        scales, offsets = scales.reshape(shape), offsets.reshape(shape)
        with np.errstate(all="ignore"):  # with a scale of 0, or values that are NaN, codes are 0
            codes = np.rint((values.reshape(*shape[:2], size) - offsets) / scales)
        codes = np.nan_to_num(codes, posinf=0, neginf=0).clip(0, 2**bits - 1).astype(np.uint8)
        return codes.reshape(values.shape), scales[..., 0], offsets[..., 0]

    def _find(self, name: str) -> tuple[str, GGUFTensor]:
        if name not in self._stored:
            raise ValueError(f"{self.header.path} lacks the weights {name}")
        return self._stored[name]

    def values(self, tensor: GGUFTensor) -> Any:
        """Read a tensor; blocks are dequantized to float32."""
        from gguf import GGMLQuantizationType, dequantize

        content = np.fromfile(self.header.path, np.uint8, tensor.nbytes, offset=tensor.start)
        if tensor.type_name in ("F32", "F16"):
            kind = np.dtype("<f4" if tensor.type_name == "F32" else "<f2")
            return content.view(kind).reshape(tensor.shape)
        rows = content.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, GGMLQuantizationType[tensor.type_name]).reshape(tensor.shape)
