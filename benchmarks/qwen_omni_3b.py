"""Qwen2.5-Omni at the published size of 3 B on a CPU: load time, memory, real-time factor.

    python -m benchmarks.qwen_omni_3b [--folder ~/.cache/omni-pipeline/qwen-omni-3b] [--tokens 32]
    python -m benchmarks.qwen_omni_3b --vocoders

Writes a checkpoint of random weights once (7.0 GB), in the layout of the published ones: the
products of the thinker's layers in GPTQ of 4 bits, groups of 128, all else in bfloat16. Then runs
the shipped pipeline on it, one stage after another: a spoken question of three seconds, an answer
of so many tokens, and its speech. Random weights never end a sequence, so the lengths are fixed.
With ``--vocoders``, runs the vocoder alone in each format, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
)

from engine import AudioPrompt, ChatPrompt, CodecPrompt, GeneratorConfig, GeneratorEngine
from engine.files.disk_cache import cache_root
from omni import AutoregressiveStage, Omni, OmniOutput
from omni.seeded.omni import build_qwen2_5_omni

GROUP, SHARD_BYTES = 128, 4 << 30
RATE, NUM_CODES = 16_000, 8192
PUBLISHED = {
    "thinker_config.text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "thinker_config.vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "thinker_config.audio_config": {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": 2048,
    },
    "talker_config": {
        "vocab_size": 8448,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
        "embedding_size": 2048,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 16, 0]},
    },
    "token2wav_config.dit_config": Qwen2_5OmniDiTConfig().to_dict(),
    "token2wav_config.bigvgan_config": Qwen2_5OmniBigVGANConfig().to_dict(),
}
"""Fields in which the published config differs from the seeded one."""

PLACES = {
    "thinker.model.audio_tower.": "thinker.audio_tower.",
    "thinker.model.visual.": "thinker.visual.",
    "thinker.model.language_model.": "thinker.model.",
}
"""Names in published files of what transformers' modules hold."""


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint; one shard at a time is in memory."""
    build_qwen2_5_omni(folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    for place, fields in PUBLISHED.items():
        part = reduce(getitem, place.split("."), config)
        part.update(fields)
        part.pop("layer_types", None)
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    write_shards(folder, model.state_dict())
    processors = json.loads((folder / "preprocessor_config.json").read_text())
    processors["feature_size"] = config["thinker_config"]["audio_config"]["num_mel_bins"]
    (folder / "preprocessor_config.json").write_text(json.dumps(processors, indent=2))
    voices = torch.load(folder / "spk_dict.pt", weights_only=True)
    dit = config["token2wav_config"]["dit_config"]
    for voice in voices.values():
        voice["cond"] = torch.randn(1, dit["enc_emb_dim"])
        voice["ref_mel"] = torch.randn(1, 300, dit["mel_dim"])
    torch.save(voices, folder / "spk_dict.pt")
    # Last, so that an interrupted run leaves nothing that looks complete.
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_shards(folder: Path, outline: Mapping[str, Tensor]) -> None:
    """Write random weights of these names and shapes, and their index."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len({*weight_map.values()}) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for module, tensor in outline.items():
        name = module
        for inside, published in PLACES.items():
            name = name.replace(inside, published)
        is_packed = name.startswith("thinker.model.layers.") and name.endswith("_proj.weight")
        shard |= packed(name, tensor) if is_packed else {name: plain(name, tensor)}
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def plain(name: str, outline: Tensor) -> Tensor:
    """A weight in bfloat16: of fan-in for matrices, near 1 for scales, else small."""
    weight = torch.empty(outline.shape, dtype=torch.bfloat16)
    if weight.ndim >= 2:
        is_embedding = "embed" in name and "proj" not in name and weight.ndim == 2
        weight.normal_(0, 1 if is_embedding else 0.5 * weight[0].numel() ** -0.5)
        if name == "talker.codec_head.weight":
            weight[NUM_CODES:] = 0  # control tokens, which a trained talker does not sample
        return weight
    return weight.normal_(float("norm" in name and name.endswith("weight")), 0.02)


def packed(name: str, outline: Tensor) -> dict[str, Tensor]:
    """A matrix of random codes as GPTQ stores it."""
    out, width = outline.shape
    whole = torch.iinfo(torch.int32)
    scale = (4.6 * width**0.5) ** -1  # codes from 0 to 15 have a deviation of 4.6
    parts = {
        "qweight": torch.randint(whole.min, whole.max, (width // 8, out), dtype=torch.int32),
        "qzeros": torch.full((width // GROUP, out // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((width // GROUP, out), scale, dtype=torch.float16),
        "g_idx": torch.arange(width, dtype=torch.int32) // GROUP,
    }
    return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}


def pipeline(folder: Path, num_tokens: int, num_codes: int) -> Omni:
    """The shipped pipeline on this checkpoint, in few bytes."""
    stages: dict[str, Any] = {
        "thinker": {"dtype": "bfloat16", "max_model_len": 2048, "num_blocks": 256},
        "talker": {"dtype": "bfloat16", "quantization": "int4", "max_model_len": 2048},
        "code2wav": {},
    }
    overrides: dict[str, Any] = {"stages.thinker.sampling.max_tokens": num_tokens}
    overrides["stages.talker.sampling.max_tokens"] = num_codes
    overrides["stages.talker.engine.num_blocks"] = 256
    # One stage after the other, so that each one's time is its own.
    overrides |= {f"stages.{each}.inputs.chunk_size": None for each in ("talker", "code2wav")}
    for stage, engine in stages.items():
        overrides[f"stages.{stage}.model"] = str(folder)
        overrides |= {f"stages.{stage}.engine.{key}": value for key, value in engine.items()}
    return Omni("qwen2_5_omni", overrides=overrides)


def ask(omni: Omni) -> OmniOutput:
    """Ask by voice, and wait for all of the answer."""
    question = AudioPrompt(0.1 * np.random.default_rng().standard_normal(3 * RATE), RATE)
    parts = [{"type": "audio"}]
    prompt = ChatPrompt(({"role": "user", "content": parts},), {"audio": [question]})
    (output,) = omni.generate([prompt])
    assert output.error is None, output.error
    return output


def report(omni: Omni, output: OmniOutput) -> Table:
    """Tabulate the time of each stage for one answer."""
    sound = output.stages["code2wav"].audio
    assert sound is not None
    seconds = sound.duration_s
    table = Table(title=f"{seconds:.2f} s of sound")
    columns = ("stage", "tokens", "s", "first token s", "ms a token", "of real time")
    for column in columns:
        table.add_column(column, justify="left" if column == "stage" else "right")
    whole = 0.0
    for each in output.timeline:
        assert each.ended_s is not None
        took = each.ended_s - each.entered_s
        whole += took
        cells = ["", "", ""]
        if isinstance(omni.pipeline.stages[each.stage], AutoregressiveStage):
            first = each.first_token_s or 0.0
            decode = (took - first) / max(each.num_tokens - 1, 1)
            cells = [str(each.num_tokens), f"{first:.2f}", f"{decode * 1e3:.0f}"]
        table.add_row(each.stage, cells[0], f"{took:.1f}", *cells[1:], f"{took / seconds:.2f}")
    table.add_row("all", "", f"{whole:.1f}", "", "", f"{whole / seconds:.2f}")
    return table


def compare_vocoders(folder: Path, num_codes: int, rounds: int) -> Table:
    """Time the vocoder in each format on the same codes, the formats in turn."""
    codes = CodecPrompt(tuple(np.random.default_rng(0).integers(0, NUM_CODES, num_codes).tolist()))
    engines, times = {}, {}
    forms: tuple[Literal["int8", "int4"] | None, ...] = (None, "int8", "int4")
    for form in forms:
        config = GeneratorConfig(model=str(folder), part="code2wav", quantization=form)
        engines[form], times[form] = GeneratorEngine(config), list[float]()
    for _ in range(rounds):
        for form, engine in engines.items():
            started = time.perf_counter()
            engine.add_request("utterance", codes)
            while engine.has_unfinished_requests:
                for output in engine.step():
                    assert output.error is None, output.error
            times[form].append(time.perf_counter() - started)
    table = Table("format", "weights MiB", "s", "/ float32", title=f"{num_codes} codes")
    for form, engine in engines.items():
        ratios = [own / plain for own, plain in zip(times[form], times[None], strict=True)]
        size = f"{engine._model.nbytes / 2**20:.0f}"
        table.add_row(
            form or "float32", size, f"{median(times[form]):.1f}", f"{median(ratios):.2f}"
        )
    return table


def peak_gib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=cache_root() / "qwen-omni-3b")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--codes", type=int, default=150)
    parser.add_argument("--vocoders", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not (args.folder / "model.safetensors.index.json").is_file():
        write_checkpoint(args.folder)
    if args.vocoders:
        Console(width=110).print(compare_vocoders(args.folder, args.codes, args.rounds))
        return
    started = time.perf_counter()
    with pipeline(args.folder, args.tokens, args.codes) as omni:
        print(f"loaded in {time.perf_counter() - started:.0f} s, peak {peak_gib():.1f} GiB")
        ask(omni)  # warms up
        Console(width=110).print(report(omni, ask(omni)))
        print(f"peak {peak_gib():.1f} GiB")


if __name__ == "__main__":
    main()
