"""Reads the core with Cython's own parser: which file declares a name, and which files use it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from Cython.Compiler import ExprNodes, Main, Nodes, Options
from Cython.Compiler.Scanning import FileSourceDescriptor
from Cython.Compiler.Visitor import TreeVisitor

_FUNCTIONS = (Nodes.FuncDefNode, ExprNodes.LambdaNode)


@dataclass(frozen=True)
class Use:
    """A name at the place where a file uses it."""

    name: str
    path: Path
    line: int


def parse(main: Path) -> Any:
    """The syntax tree of a Cython file and of all that it includes."""
    options = Options.CompilationOptions(Options.default_options, language_level=3)
    context = Main.Context.from_options(options)
    source = FileSourceDescriptor(str(main), main.name)
    scope = context.find_module(main.stem, pos=(source, 1, 0), need_pxd=False)
    return context.parse(source, scope, pxd=False, full_module_name=main.stem)


def upward(main: Path) -> Iterator[tuple[Use, Path]]:
    """Every use of a name that a later file declares, with that file.

    The order of files is the order in which `main` includes them. A method or field is found
    through its type: whoever holds an object of a later file's class names that class.
    """
    tree = parse(main)
    declared = dict(_declared(tree))
    order: dict[Path, int] = {}
    for statement in _statements(tree.body):
        order.setdefault(_path(statement), len(order))
    collector = _Uses()
    collector.visit(tree)
    for use in collector.uses:
        other = declared.get(use.name)
        if other is not None and order[other] > order.get(use.path, -1):
            yield use, other


def _path(node: Any) -> Path:
    return Path(node.pos[0].filename)


def _statements(node: Any) -> Iterator[Any]:
    if isinstance(node, Nodes.StatListNode):
        for inner in node.stats:
            yield from _statements(inner)
    else:
        yield node


def _declared(tree: Any) -> Iterator[tuple[str, Path]]:
    """(name, file) of what stands outside of functions and classes."""
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


class _Locals(TreeVisitor):  # type: ignore[misc] # Cython's classes have no types
    """The names that a function declares or assigns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def visit_Node(self, node: Any) -> None:
        if isinstance(node, Nodes.CNameDeclaratorNode):
            self.names.add(node.name)
        for field in ("lhs", "target"):
            self._assign(getattr(node, field, None))
        self.visitchildren(node)

    def _assign(self, target: Any) -> None:
        if isinstance(target, ExprNodes.NameNode):
            self.names.add(target.name)
        elif isinstance(target, ExprNodes.TupleNode | ExprNodes.ListNode):
            for inner in target.args:
                self._assign(inner)


class _Uses(TreeVisitor):  # type: ignore[misc] # Cython's classes have no types
    """The names that are used and are not a function's own."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self._own: list[set[str]] = []

    def visit_Node(self, node: Any) -> None:
        is_function = isinstance(node, _FUNCTIONS)
        if is_function:
            found = _Locals()
            found.visit(node)
            self._own.append(found.names)
        if isinstance(node, ExprNodes.NameNode | Nodes.CSimpleBaseTypeNode):
            self._use(node)
        self.visitchildren(node)
        if is_function:
            self._own.pop()

    def _use(self, node: Any) -> None:
        if node.name and not any(node.name in own for own in self._own):
            self.uses.append(Use(str(node.name), _path(node), node.pos[1]))
