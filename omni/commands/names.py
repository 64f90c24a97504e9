"""Listing of the names that a pipeline's YAML file can use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_HEADINGS = {
    "pipelines": "Pipelines, for omni run NAME:",
    "models": "Seeded models, small and random, for model: NAME:",
    "kinds": "Kinds of stages, for kind: NAME:",
    "transforms": "Transforms, for inputs: {transform: NAME}:",
    "architectures": "Architectures of checkpoints, as config.json names them:",
}


def described_names(what: str | None = None) -> Iterator[str]:
    """Yield a block of text for each kind of name, or only for the kind ``what``."""
    for sort, heading in _HEADINGS.items():
        if what in (sort, None):
            yield "\n".join([heading, *(f"  {line}" for line in _lines(sort))])


def _lines(sort: str) -> Iterable[str]:
    match sort:
        case "pipelines":
            from omni.pipelines.config_file import shipped_configs
            from omni.pipelines.pipeline_config import PipelineConfig

            names = shipped_configs()
            width = max(map(len, names))
            for name in names:
                yield f"{name.ljust(width)}  {PipelineConfig.load(name).description or ''}".rstrip()
        case "models":
            from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX

            yield from (SEEDED_PREFIX + name for name in SEEDED_MODELS)
        case "kinds":
            from stages.stage_config import stage_kind_names

            yield from stage_kind_names()
        case "transforms":
            from stages import registered_transforms

            yield from registered_transforms()
            yield "and your own: package.module:function"
        case "architectures":
            from engine.models.registry import FAMILIES

            FAMILIES.load_entry_points()
            yield from FAMILIES.architectures()
            yield from FAMILIES.architectures(makes_sound=True)
            yield "and, for stages of kind encoder, text encoders of transformers such as BertModel"
