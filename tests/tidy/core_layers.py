"""Reads the core with Cython's own parser: which file declares a name, and which files use it."""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from Cython.Compiler import ExprNodes, Main, Nodes, Options
from Cython.Compiler.Scanning import FileSourceDescriptor

# Python's objects that the core holds, and C's record of a time.
_BUILTINS = (bytes, dict, list, set, str, namedtuple("Row", ()), Exception)
_FIELDS_OF_C = {"tv_sec", "tv_nsec"}
_FUNCTIONS = (Nodes.FuncDefNode, ExprNodes.LambdaNode)


@dataclass(frozen=True)
class Use:
    """Names a name at the place where a file uses it."""

    name: str
    path: Path
    line: int


def parse(main: Path) -> Any:
    """Return the syntax tree of a Cython file and of all that it includes."""
    options = Options.CompilationOptions(Options.default_options, language_level=3)
    context = Main.Context.from_options(options)
    source = FileSourceDescriptor(str(main), main.name)
    scope = context.find_module(main.stem, pos=(source, 1, 0), need_pxd=False)
    return context.parse(source, scope, pxd=False, full_module_name=main.stem)


def upward(main: Path) -> Iterator[tuple[Use, Path]]:
    """Yield every use of a name that a later file declares, with that file.

    The order of files is the order in which `main` includes them. A method or field is found
    through its type: code that holds an object of a later file's class names that class.
    """
    tree = parse(main)
    declared = dict(_declared(tree))
    order: dict[Path, int] = {}
    for statement in _statements(tree.body):
        order.setdefault(_path(statement), len(order))
    for use in _uses(tree):
        other = declared.get(use.name)
        if other is not None and order[other] > order.get(use.path, -1):
            yield use, other


def undeclared_attributes(main: Path) -> Iterator[Use]:
    """Every attribute that no class or struct of the tree declares and no builtin has.

    Cython compiles such an attribute as a lookup by name, which fails only when it runs.
    """
    tree = parse(main)
    declared = _FIELDS_OF_C.union(*(dir(kind) for kind in _BUILTINS))
    for node in _walk(tree):
        if isinstance(node, Nodes.CClassDefNode | Nodes.CStructOrUnionDefNode):
            for inner in _walk(node):
                if isinstance(inner, Nodes.CNameDeclaratorNode | Nodes.DefNode):
                    declared.add(inner.name)
    for node in _walk(tree):
        if isinstance(node, ExprNodes.AttributeNode) and node.attribute not in declared:
            yield Use(str(node.attribute), _path(node), node.pos[1])


def _path(node: Any) -> Path:
    return Path(node.pos[0].filename)


def _statements(node: Any) -> Iterator[Any]:
    if isinstance(node, Nodes.StatListNode):
        for inner in node.stats:
            yield from _statements(inner)
    else:
        yield node


def _declared(tree: Any) -> Iterator[tuple[str, Path]]:
    """(name, file) of the definitions outside of functions and classes."""
    for node in _statements(tree.body):
        for name in _names(node):
            yield name, _path(node)


def _names(node: Any) -> Iterator[str]:
    match node:
        case Nodes.CClassDefNode():
            if node.body is not None:  # else: `cdef class X`, declared ahead of its file
                yield node.class_name
        case Nodes.CEnumDefNode():
            yield from (item.name for item in node.items)
            yield from [node.name] if node.name else []
        case Nodes.CStructOrUnionDefNode():
            if node.attributes is not None:
                yield node.name
        case Nodes.CFuncDefNode():
            yield _declarator_name(node.declarator)
        case Nodes.DefNode() | Nodes.PyClassDefNode():
            yield node.name
        case Nodes.CVarDefNode():
            yield from (_declarator_name(each) for each in node.declarators)
        case Nodes.CTypeDefNode():
            yield _declarator_name(node.declarator)
        case Nodes.SingleAssignmentNode() if isinstance(node.lhs, ExprNodes.NameNode):
            yield node.lhs.name


def _declarator_name(node: Any) -> str:
    while not isinstance(node, Nodes.CNameDeclaratorNode):
        node = node.base
    return str(node.name)


def _children(node: Any) -> Iterator[Any]:
    for field in node.child_attrs:
        found = getattr(node, field)
        yield from found if isinstance(found, list) else [found] if found is not None else []


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _walk(child)


def _own_names(function: Any) -> Iterator[str]:
    """Return the names that a function declares or assigns itself."""
    for node in _walk(function):
        if isinstance(node, Nodes.CNameDeclaratorNode):
            yield node.name
        for field in ("lhs", "target"):
            yield from _assigned(getattr(node, field, None))


def _assigned(target: Any) -> Iterator[str]:
    if isinstance(target, ExprNodes.NameNode):
        yield target.name
    elif isinstance(target, ExprNodes.TupleNode | ExprNodes.ListNode):
        for inner in target.args:
            yield from _assigned(inner)


def _uses(node: Any, own: frozenset[str] = frozenset()) -> Iterator[Use]:
    """Yield the names that a tree uses, without those that belong to the function around them."""
    if isinstance(node, _FUNCTIONS):
        own |= set(_own_names(node))
    is_name = isinstance(node, ExprNodes.NameNode | Nodes.CSimpleBaseTypeNode)
    if is_name and node.name and node.name not in own:
        yield Use(str(node.name), _path(node), node.pos[1])
    for child in _children(node):
        yield from _uses(child, own)
