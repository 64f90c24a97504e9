"""Says whether a pipeline fits this machine, in each format, by the configs of its models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from engine.checkpoints.checkpoint import locate
from engine.checkpoints.quantized_weight import SCHEMES
from engine.llm.llm_engine import outline_needs
from engine.models.model_loader import is_supported, open_checkpoint
from engine.resources.device import resolve_device
from engine.resources.memory_plan import MemoryEstimate, format_bytes, free_bytes
from omni.commands.explanation import columns
from omni.pipelines.pipeline_config import PipelineConfig
from stages.stage_config import StageConfig, TokenStageConfig

_FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{dtype: {"dtype": dtype, "quantization": None} for dtype in ("float32", "bfloat16")},
    **{scheme: {"quantization": scheme} for scheme in SCHEMES},
}
_HEADS = ("stage", "format", "weights", "KV pages", "kept rows", "activations", "")


def describe_needs(config: PipelineConfig) -> str:
    """Write what each stage takes in each format; a stage whose config is not here is named."""
    known, devices, notes = {}, {}, []
    rows: list[tuple[str, ...]] = [_HEADS]
    for name in config.topological_order():
        stage = config.stages[name]
        placed: list[Any] = [stage.on_device(device) for device in stage.placement.all_devices]
        try:
            of = estimate_stage(placed[0])
            devices[name], known[name] = [resolve_device(x.engine.device) for x in placed], of
        except ValueError as error:
            notes.append(f"  {name} is left out: {str(error).splitlines()[0]}")
            continue
        rows += [(name, kind, *map(format_bytes, each[:4]), "") for kind, each in of.items()]
    now = {device: free_bytes(device) for each in devices.values() for device in each}
    for kind in max(known.values(), key=len, default=()):
        chosen = {name: of.get(kind) or next(iter(of.values())) for name, of in known.items()}
        held = [(device, chosen[name]) for name, each in devices.items() for device in each]
        is_short = any(size < sum(x.least for on, x in held if on == d) for d, size in now.items())
        verdict = "does not fit" if is_short else "not known" if notes else "fits"
        total = map(sum, zip(*(x[:4] for _, x in held), strict=True))
        rows.append(("together", kind, *map(format_bytes, total), verdict))
    free_now = ", ".join(f"{device} has {format_bytes(size)} free" for device, size in now.items())
    title = f"What the stages take, by their configs alone ({free_now or 'none here'}):"
    return "\n".join([title, "", *(columns(rows) if known else ()), *notes])


def estimate_stage(stage: StageConfig) -> Mapping[str, MemoryEstimate]:
    """What a replica holds, by format; ``ValueError`` of a config that is absent or too short."""
    engine: Any = getattr(stage, "engine", None)
    if stage.model is None or not hasattr(engine, "revision"):
        raise ValueError(f"stages of kind {stage.kind!r} do not say what they take")
    trusted = getattr(engine, "trust_remote_code", False)
    model = str(locate(stage.model, engine.revision, trusted, configs_only=True))
    checkpoint = open_checkpoint(model, part=stage.part, trust_remote_code=trusted)
    if isinstance(stage, TokenStageConfig) and is_supported(checkpoint.architecture):
        given, outputs = stage.engine_config().model_copy(update={"model": model}), stage.outputs
        if outputs is None:
            outputs = tuple(stage.emitted(checkpoint.whole_config.to_dict()) or ())
        formats = _FORMATS if checkpoint.stored is None else {checkpoint.stored: {}}
        configs = {name: given.model_copy(update=each) for name, each in formats.items()}
        return {name: outline_needs(x).estimate(x, outputs) for name, x in configs.items()}
    if (network := getattr(transformers, checkpoint.architecture, None)) is None:
        raise ValueError(f"transformers knows no {checkpoint.architecture}")
    with torch.device("meta"):
        count = network(checkpoint.config).base_model.num_parameters()
    if not isinstance(stage, TokenStageConfig):
        return {"float32": MemoryEstimate(4 * count, 0, 0, 0, 4 * count)}
    length = engine.max_model_len or getattr(checkpoint.config, "max_position_embeddings", 0)
    num_tokens = (engine.num_blocks or 0) * engine.block_size or length * engine.max_num_seqs
    width, sizes = checkpoint.config.hidden_size * num_tokens, {"float32": 4, "bfloat16": 2}
    return {x: MemoryEstimate(n * count, 0, n * width, 0, n * count) for x, n in sizes.items()}
