"""A YAML text as plain data, with the line on which each key stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from engine.interface.placed_error import KeyPath


class ConfigError(ValueError):
    """A pipeline configuration is wrong. The message names each wrong place and what to do."""


MAX_CHARS = 2**18
"""Longest text; a pipeline's file is far below this and the bounds that follow."""

MAX_DEPTH = 64
"""Deepest nesting of lists and mappings, what aliases stand for included."""

MAX_NODES = 100_000
"""Keys and values, counted again wherever an alias stands for them, so that a few lines cannot
stand for a billion."""

MAX_NUMBER_CHARS = 64
"""Digits of a number."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with limits that are checked node by node while it composes.

    Each node's size is known when its children are, and an alias counts as much as what it stands
    for. So a text is refused after at most ``MAX_NODES`` of work, whatever it would expand to.
    """

    def __init__(self, text: str, source: str) -> None:
        if len(text) > MAX_CHARS:
            raise ConfigError(
                f"{source}: the text has {len(text)} characters; {MAX_CHARS} are read at most"
            )
        super().__init__(text)
        self._source = source
        self._above = 0
        # Of each node that is whole: how many nodes it stands for, and how deep they nest.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node, and all below it."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        # Checked on the way down too: each level is a call.
        self._check_depth(self._above + 1, line)
        self._above += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._above -= 1
        if node is None:
            return None
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise ConfigError(f"{self._source}:{line}: an alias contains itself")
        else:
            self._sizes[node] = self._size_of(node, line)
        self._check_depth(self._above + self._sizes[node][1], line)
        return node

    def _size_of(self, node: yaml.Node, line: int) -> tuple[int, int]:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARS:
            raise ConfigError(
                f"{self._source}:{line}: a number of {len(node.value)} digits; "
                f"{MAX_NUMBER_CHARS} are read at most"
            )
        sizes = [self._sizes[child] for child in children]
        num_nodes = 1 + sum(size for size, _ in sizes)
        if num_nodes > MAX_NODES:
            raise ConfigError(
                f"{self._source}:{line}: this stands for {num_nodes} keys and values, each alias "
                f"counted; {MAX_NODES} are read at most"
            )
        return num_nodes, 1 + max((depth for _, depth in sizes), default=0)

    def _check_depth(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._source}:{line}: nested deeper than {MAX_DEPTH} levels")


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A parsed YAML text; ``lines`` has line numbers, from 1, by place."""

    data: Any
    lines: Mapping[KeyPath, int]

    @classmethod
    def parse(cls, text: str, source: str) -> YamlDocument:
        """Parse a text as ``yaml.safe_load`` does, but refuse what that would silently accept.

        Raises:
            ConfigError: not YAML, beyond a limit, a key that stands twice, or a key that is not a
                string (YAML 1.1 reads a bare ``on``, ``off``, ``yes`` and ``no`` as booleans).
        """
        loader = None
        try:
            loader = _BoundedLoader(text, source)
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
