"""Finds and reads the YAML file of a pipeline; errors name its lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from engine.interface.placed_error import KeyPath, suggest


class ConfigError(ValueError):
    """An invalid pipeline configuration. The message names each wrong place and its remedy."""


def shipped_configs() -> list[str]:
    """Return the names of the pipelines that are shipped with the package."""
    files = resources.files("stage_configs").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse assignments like ``stages.writer.engine.num_blocks=64`` into values by dotted path.

    Raises:
        ConfigError: an assignment has no ``=``, or a value that is not YAML.
    """
    overrides = {}
    for assignment in assignments:
        place, equals, value = assignment.partition("=")
        if not equals or not place:
            raise ConfigError(
                f"--set {assignment}: expected PLACE=VALUE, such as "
                "stages.writer.engine.num_blocks=64"
            )
        overrides[place.strip()], _ = parse_yaml(value, f"--set {place}")
    return overrides


def find_config(config: str | Path) -> tuple[str, str, dict[str, Path | None]]:
    """Return a configuration's text, its name in errors, and the base folders of its paths.

    Checkpoints may be next to any configuration; user code is never next to a shipped one.
    """
    name = str(config)
    path = Path(config).expanduser()
    is_short_name = isinstance(config, str) and path.suffix == "" and "/" not in name
    shipped = shipped_configs()
    if is_short_name and name in shipped:
        folder = resources.files("stage_configs")
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        return text, f"{name}.yaml", {"base_dir": None, "model_dir": Path(str(folder))}
    if is_short_name and not path.is_file():
        raise ConfigError(
            f"{name}: no pipeline of that name is shipped{suggest(name, shipped)} "
            "(a file of your own is given by its path, with .yaml)"
        )
    try:
        return path.read_text("utf-8"), name, {"base_dir": path.parent, "model_dir": path.parent}
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None


def override(data: dict[str, Any], place: str, value: Any, flag: str) -> None:
    """Set ``value`` at a dotted path, creating missing mappings in between."""
    *parents, key = place.split(".")
    at = data
    for depth, parent in enumerate(parents):
        if depth == 1 and parents[0] == "stages" and parent not in at:
            raise ConfigError(f"{flag}: unknown stage {parent!r}{suggest(parent, at)}")
        # A key without a value is None in YAML.
        if at.get(parent) is None:
            at[parent] = {}
        at = at[parent]
        if not isinstance(at, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError(f"{flag}: {above} is no mapping but {at!r}")
    at[key] = value


def parse_yaml(text: str, source: str) -> tuple[Any, Mapping[KeyPath, int]]:
    """Parse a text like ``yaml.safe_load``, but reject what that would silently accept.

    Returns:
        Plain data, and the line number of each key and each list item, counted from 1.

    Raises:
        ConfigError: the text is not YAML, a key is duplicated, or a key is not a string (YAML 1.1
            reads a bare ``on``, ``off``, ``yes`` and ``no`` as booleans).
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        lines = dict(_walk(root, (), source)) if root is not None else {}
        data = loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = error.problem or error.context or ""
        hint = "; indent with spaces" if "'\\t'" in problem else ""
        raise ConfigError(f"{place}: not valid YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = error.character if isinstance(error.character, int) else 0
        raise ConfigError(
            f"{source}:{line}: not valid YAML: the character U+{character:04X} is not allowed"
        ) from None
    except ConfigError:
        raise
    except RecursionError:
        problem = "it is nested too deeply, or an alias contains itself"
        raise ConfigError(f"{source}: not valid YAML: {problem}") from None
    except Exception as error:  # constructors of tags, such as !!int, raise anything
        raise ConfigError(f"{source}: not valid YAML: {type(error).__name__}: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return data, lines


def _walk(node: yaml.Node, place: KeyPath, source: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the line of every key and list item at and below ``node``."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*place, index), item.start_mark.line + 1
            yield from _walk(item, (*place, index), source)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"{source}:{line}: a key must be a string, and YAML reads this one as "
                    f"something else; quote it: {getattr(key, 'value', '')!r}"
                )
            if key.value in seen:
                dotted = ".".join(str(part) for part in (*place, key.value))
                raise ConfigError(
                    f"{source}:{line}: {dotted}: given twice (first on line {seen[key.value]}); "
                    "remove one of them"
                )
            seen[key.value] = line
            yield (*place, key.value), line
            yield from _walk(value, (*place, key.value), source)
