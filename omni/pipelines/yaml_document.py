"""A YAML text as plain data, with the line on which each key stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from engine.interface.placed_error import KeyPath


class ConfigError(ValueError):
    """A pipeline configuration is wrong. The message names each wrong place and what to do."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A parsed YAML text; ``lines`` has line numbers, from 1, by place."""

    data: Any
    lines: Mapping[KeyPath, int]

    @classmethod
    def parse(cls, text: str, source: str) -> YamlDocument:
        """Parse a text as ``yaml.safe_load`` does, but refuse what that would silently accept.

        Raises:
            ConfigError: not YAML, a key that stands twice, or a key that is not a string (YAML 1.1
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
        except Exception as error:  # what makes values of tags, such as !!int, raises whatever
            raise ConfigError(
                f"{source}: not valid YAML: {type(error).__name__}: {error}"
            ) from error
        finally:
            if loader is not None:
                loader.dispose()
        return cls(data, lines)


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
