"""A YAML loader that refuses what would take too much, before it is made."""

from __future__ import annotations

import yaml

from omni.documents.document_error import ConfigError
from omni.documents.document_limits import DocumentLimits

__all__ = ["BoundedLoader"]

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with limits that are checked node by node while it composes.

    Each node's size is known when its children are, and an alias counts as much as what it stands
    for. So a text is refused after at most ``max_nodes`` of work, whatever it would expand to.

    Args:
        text: the YAML.
        source: what to call it in errors.
        limits: see :class:`DocumentLimits`.

    Raises:
        ConfigError: the text is too long; composing raises it for all other limits.
        yaml.YAMLError: it holds characters that YAML does not allow.
    """

    def __init__(self, text: str, source: str, limits: DocumentLimits) -> None:
        if len(text) > limits.max_chars:
            raise ConfigError(
                f"{source}: the text has {len(text)} characters; {limits.max_chars} are read at "
                "most"
            )
        super().__init__(text)
        self._source = source
        self._limits = limits
        self._above = 0
        # Of each node that is whole: how many nodes it stands for, and how deep they nest.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node, and all below it.

        Raises:
            ConfigError: it is too deep, too large, or an alias of what it stands in.
        """
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
        elif node.tag in _NUMBERS and len(node.value) > self._limits.max_number_chars:
            raise ConfigError(
                f"{self._source}:{line}: a number of {len(node.value)} digits; "
                f"{self._limits.max_number_chars} are read at most"
            )
        sizes = [self._sizes[child] for child in children]
        num_nodes = 1 + sum(size for size, _ in sizes)
        if num_nodes > self._limits.max_nodes:
            raise ConfigError(
                f"{self._source}:{line}: this stands for {num_nodes} keys and values, each alias "
                f"counted; {self._limits.max_nodes} are read at most"
            )
        return num_nodes, 1 + max((depth for _, depth in sizes), default=0)

    def _check_depth(self, depth: int, line: int) -> None:
        if depth > self._limits.max_depth:
            raise ConfigError(
                f"{self._source}:{line}: nested deeper than {self._limits.max_depth} levels"
            )
