"""Small YAML files that people write: what they hold, and in which line each part stands."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vitline.infra.storage import read_small

_MAX_BYTES, _MAX_DEPTH = 256 * 1024, 20
"""Of a file. vitline's recipes, written out, have 5 kB and three levels."""


@dataclass(frozen=True)
class YamlFile:
    """A file that holds a mapping with known keys."""

    reference: str
    """Its path or URI."""
    tree: dict[str, Any]
    _node: yaml.Node

    def place(self, path: Sequence[str | int]) -> str:
        """`deployments.yaml (line 7)`: where the part at this path begins, or the innermost part around it that there is."""
        node, mark = self._node, self._node.start_mark
        for name in path:
            if isinstance(node, yaml.MappingNode):
                found = next((pair for pair in node.value if pair[0].value == name), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(name, int) and name < len(node.value):
                found = (node.value[name], node.value[name])
            else:
                found = None
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
        return f"{self.reference} (line {mark.line + 1})"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no annotations
    """Refuses, with the line, what stands for more than fits into memory or a stack: aliases of aliases, and deep nesting. Also a key
    that stands twice, of which YAML would take the last."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise _refused("aliases (*name) are not supported; write the value out", mark)
        if self._depth == _MAX_DEPTH:
            raise _refused(f"it is nested deeper than {_MAX_DEPTH} levels", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refused(f"the key {key.value!r:.100} stands twice in one mapping", key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # of a date or number that there is not; its message may quote the file
            kind = node.tag.rpartition(":")[2]
            raise _refused(f"a value looks like a {kind} and is none; put text in quotes", node.start_mark) from error


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def read_yaml(reference: str, what: str, keys: Collection[str]) -> YamlFile:
    """A YAML file at a path or URI, a `what` with some of these keys. Raises ValueError naming the file for one that is missing, too
    large or of another kind."""
    listed = "`, `".join(keys)
    try:
        text = read_small(reference if "://" in reference else str(Path(reference).expanduser()), _MAX_BYTES)
    except FileNotFoundError as error:
        raise ValueError(f"There is no {what} {reference!r}: no such file.") from error
    except OSError as error:
        raise ValueError(f"The {what} {reference!r} cannot be read: {error}") from error
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            tree = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The full error quotes the file. Leave that out: a form may name a file that its user has no right to read.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" (line {mark.line + 1})" if mark else ""
        hint = ""
        if getattr(error, "context", None) == "while scanning an alias":  # of `cron: * * * * *`
            hint = "; put text that begins with * in quotes"
        raise ValueError(f"{reference}{line} is not valid YAML: {problem or 'it is no text'}{hint}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{reference} holds no mapping; a {what} has the keys `{listed}`.")
    found = YamlFile(reference, tree, node)
    if odd := sorted(tree.keys() - set(keys), key=str):
        raise ValueError(f"{found.place(odd[:1])} has the key {odd[0]!r}; a {what} has `{listed}`.")
    return found
