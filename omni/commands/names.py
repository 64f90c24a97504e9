"""The names that a pipeline's YAML file can use, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["described_names"]


def described_names(what: str | None = None) -> Iterator[str]:
    """Yield a block of text for each sort of names.

    Args:
        what: the one sort that is wanted: ``pipelines``, ``models``, ``architectures``,
            ``transforms`` or ``kinds``; None for all.
    """
    for sort, (heading, lines) in _SORTS.items():
        if what in (sort, None):
            yield "\n".join([heading, *(f"  {line}" for line in lines())])


def _pipelines() -> Iterable[str]:
    from omni.pipelines.config_file import shipped_configs
    from omni.pipelines.pipeline_config import PipelineConfig

    names = shipped_configs()
    width = max(map(len, names))
    for name in names:
        yield f"{name.ljust(width)}  {PipelineConfig.load(name).description or ''}".rstrip()


def _models() -> Iterable[str]:
    from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX

    return (SEEDED_PREFIX + name for name in SEEDED_MODELS)


def _architectures() -> Iterable[str]:
    from engine.models.registry import FAMILIES

    yield from FAMILIES.architectures()
    yield from FAMILIES.architectures(makes_sound=True)
    yield "and, for stages of kind encoder, text encoders of transformers such as BertModel"


def _transforms() -> Iterable[str]:
    from stages import registered_transforms

    yield from registered_transforms()
    yield "and your own: package.module:function"


def _kinds() -> Iterable[str]:
    from stages.stage_config import stage_kind_names

    return stage_kind_names()


_SORTS: Mapping[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "pipelines": ("Pipelines, for omni run NAME:", _pipelines),
    "models": ("Seeded models, small and random, for model: NAME:", _models),
    "kinds": ("Kinds of stages, for kind: NAME:", _kinds),
    "transforms": ("Transforms, for inputs: {transform: NAME}:", _transforms),
    "architectures": ("Architectures of checkpoints, as config.json names them:", _architectures),
}
