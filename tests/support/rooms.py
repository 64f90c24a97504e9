"""The rooms and floors of the source, and imports that violate them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.support.import_graph import arrows, module_name

FLOORS = """\
prefix_cache.specs
prefix_cache.blocks
prefix_cache.layer_types, prefix_cache.stores
prefix_cache.kv_cache
prefix_cache
engine.interface.log_fields
engine.interface, engine.files
engine.resources
engine.checkpoints, engine.text, engine.media, engine.native
engine.sampling
engine.requests
engine.scheduling, engine.attention
engine.layers
engine.inputs
engine.models
engine.models.decoders
engine.models.hybrids, engine.models.seq2seq, engine.models.mllama, engine.models.llava, \
engine.models.qwen2_5_vl
engine.models.whisper, engine.models.qwen2_5_omni, engine.models.qwen3_vl, engine.models.gemma3, \
engine.models.csm
engine.models.qwen3_omni, engine.models.qwen3_5, engine.models.pocket_tts
engine.models.qwen3_asr
engine.models.voxtral
engine.models.registry
engine.models.model_loader
engine.execution
engine.encoder, engine.generator, engine.llm
engine
stages.stage_output, stages.placement, stages.trace_events
stages.stage
stages.transforms
stages
stages.worker
stages.remote
stages.cluster
stage_configs
omni.seeded, omni.commands.command
omni.pipelines, omni.requests
omni.runtime
omni.runtime.omni
omni.verification, omni.server.serving
omni.server.openai
omni.server, omni.commands.bench
omni.commands
omni
"""
"""Each line is a floor, the first one the lowest. A room is a folder without its subfolders, or a
module that stands apart from its folder. Its files may import each other without cycles, and
modules on lower floors; not rooms on the same floor."""


def floor_of(floors: str = FLOORS) -> dict[str, int]:
    """Return every room with its floor, the lowest 0.

    Raises:
        ValueError: a room stands on two floors.
    """
    rooms: dict[str, int] = {}
    for floor, line in enumerate(floors.splitlines()):
        for room in line.split(","):
            if rooms.setdefault(room.strip(), floor) != floor:
                raise ValueError(f"{room.strip()} stands on floors {rooms[room.strip()]}, {floor}")
    return rooms


def room_of(file: str, rooms: Mapping[str, int]) -> str | None:
    """Return the room of a file such as ``engine/llm/llm_engine.py``; None if it is in no room."""
    folder = file.rpartition("/")[0].replace("/", ".")
    return next((name for name in (module_name(file), folder) if name in rooms), None)


def unknown_rooms(files: Iterable[str], rooms: Mapping[str, int]) -> list[str]:
    """Return folders that hold modules and are no room, with the first module of each."""
    found: dict[str, str] = {}
    for file in sorted(files):
        if room_of(file, rooms) is None:
            found.setdefault(file.rpartition("/")[0], file)
    return [f"{folder}/ is not in the table of rooms ({file})" for folder, file in found.items()]


def closed_doors(sources: Mapping[str, str], rooms: Mapping[str, int]) -> list[str]:
    """Return imports of rooms that are not on a lower floor; unknown rooms are skipped."""
    found = []
    for (file, imported), line in arrows(sources).items():
        room, other = room_of(file, rooms), room_of(imported, rooms)
        if room is None or other is None or room == other or rooms[other] < rooms[room]:
            continue
        where = "above it" if rooms[other] > rooms[room] else "beside it"
        found.append(f"{file}:{line} imports {imported}: {other} is {where}, not below {room}")
    return sorted(found)
