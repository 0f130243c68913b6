"""Reads plain data out of a YAML text, and where in the text each piece of it is."""

import json
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

__all__ = ["Path", "Place", "Problem", "YamlText", "path_text", "read_yaml"]

#: A path of mapping keys and list positions from the document's root.
Path = tuple[str | int, ...]

_NESTING_MAX = 32
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Names a position in a text; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes something wrong in a configuration: where, at which field, and what to do."""

    place: Place
    path: Path
    message: str
    #: The file, if it is not the one that was asked for.
    file: FilePath | None = None


@dataclass(slots=True)
class YamlText:
    """Holds the data of a document, the places of its keys and values, and its faults."""

    data: Any = None
    values: dict[Path, Place] = field(default_factory=dict)
    keys: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path, *, key: bool = False) -> Place:
        """Return where a path stands, or else its nearest ancestor. O(length of the path)."""
        if key and path in self.keys:
            return self.keys[path]
        for length in range(len(path), -1, -1):
            found = self.values.get(path[:length]) or self.keys.get(path[:length])
            if found is not None:
                return found
        return Place(1, 1)


def path_text(path: Path) -> str:
    """Write a path as a person does: `tenants[3].weight`; keys that need it stand in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if part.replace("_", "").isalnum() else json.dumps(part[:80])
            text += f".{word}" if text else word
    return text


def read_yaml(text: str) -> YamlText:
    """Read one YAML document. Never raises: what is wrong stands in `problems`. O(text).

    Repeated keys, keys that are no text, aliases and merge keys are refused: the first three hide
    mistakes, and aliases can make a short text arbitrarily large.
    """
    out = YamlText()
    loader = _Loader(text)
    try:
        _check_nesting(text)
        node = loader.get_single_node()
        if node is not None:
            out.data = _build(loader, node, (), out, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark is not None else Place(1, 1)
        out.problems.append(
            Problem(place, (), f"not valid YAML: {_yaml_problem(error, mark, text)}")
        )
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        before = text[:position] if isinstance(position, int) else ""
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        out.problems.append(Problem(place, (), f"not valid YAML: {str(error).splitlines()[0]}"))
    finally:
        loader.dispose()
    return out


def _check_nesting(text: str) -> None:
    """Count levels before anything is built: the parser's nodes are made by recursion in C.

    50 KB of brackets overflow its stack, which ends the process. O(text).
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _NESTING_MAX:
                mark: Any = event.start_mark
                problem = f"nested deeper than {_NESTING_MAX} levels"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _yaml_problem(error: yaml.MarkedYAMLError, mark: yaml.Mark | None, text: str) -> str:
    """Return one line out of PyYAML's several."""
    # PyYAML does not name the character, and a tab cannot be seen.
    if mark is not None and text[mark.index : mark.index + 1] == "\t":
        return "a tab stands here; indent with spaces"
    parts = [part for part in (error.context, error.problem) if part]
    return ", ".join(parts) or "it cannot be read"


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _build(loader: Any, node: yaml.Node, path: Path, out: YamlText, seen: dict[int, Path]) -> Any:
    """Turn a node into data, and note the place of each piece."""
    if id(node) in seen:
        # The node is the one that was built already; only its key gives the alias's place.
        message = f"an alias of {path_text(seen[id(node)]) or 'the document'}; write it out"
        out.problems.append(Problem(out.place(path), path, message))
        return None
    place = _place(node)
    seen[id(node)] = path
    out.values[path] = place
    if isinstance(node, yaml.SequenceNode):
        children = enumerate(node.value)
        return [_build(loader, child, (*path, i), out, seen) for i, child in children]
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(loader, node, path, out, seen)
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError):
        out.problems.append(Problem(place, path, f"{node.value[:80]!r} cannot be read as a value"))
        return None


def _build_mapping(
    loader: Any, node: yaml.MappingNode, path: Path, out: YamlText, seen: dict[int, Path]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = _place(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            out.problems.append(Problem(place, path, "a key has to be a word"))
            continue
        # The text as written: a key such as `no` or `1` is still a name here.
        key = key_node.value
        here = (*path, key)
        if key in data:
            first = out.keys[here]
            message = f"this key stands twice, first on line {first.line}; remove one of them"
            out.problems.append(Problem(place, here, message))
            continue
        out.keys[here] = place
        data[key] = _build(loader, value_node, here, out, seen)
    return data
