"""One function of the gate reads who its caller is: no other module reads a header about that."""

import ast
from collections.abc import Iterator

import pytest

from .sources import PACKAGE_FOLDERS, ROOT, files, relative

GATE = "clients/vllm/schedsvc_vllm/"
READER = "read_caller"
#: Modules beside the reader's that process the head of a request, and why.
HEAD_READERS = {
    "asgi.py": "finds a header by its name, which is one of OTHERS",
    "engine_scope.py": "writes the head that the engine gets",
    "metrics_page.py": "drops the headers that ask for a coding",
    "proxy_headers.py": "writes the head that the upstream gets",
    "tracing.py": "joins the caller's trace",
}
#: Headers about the message and the browser, not about the caller.
OTHERS = {b"content-encoding", b"content-length", b"content-type", b"origin", b"x-request-id"}


def readings(text: str) -> Iterator[str]:
    """Yield each place at which a module reads the head of a request otherwise than allowed."""
    tree = ast.parse(text)
    handed_on = {
        id(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _name(call.func) == READER and call.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and id(node) not in handed_on:
            if _is_head(node.slice) and _name(node.value) != "message":
                yield f"{node.lineno}: reads the head; have {READER}() do it"
        elif isinstance(node, ast.Call) and node.args:
            if _name(node.func) == "header" and _constant(node.args[-1]) not in OTHERS:
                yield f"{node.lineno}: header() may only find one of OTHERS"
            if _name(node.func) == "get" and _is_head(node.args[0]) and _of(node) != "message":
                yield f"{node.lineno}: reads the head; have {READER}() do it"


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _of(call: ast.Call) -> str:
    return _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_head(node: ast.expr) -> bool:
    return _constant(node) == "headers"


def test_one_function_reads_who_the_caller_is() -> None:
    assert GATE.startswith(PACKAGE_FOLDERS)
    found = [
        f"{path.name}:{place}"
        for path in files(".py")
        if relative(path).startswith(GATE) and path.name not in HEAD_READERS
        for place in readings(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("name", HEAD_READERS)
def test_each_listed_module_reads_the_head(name: str) -> None:
    assert list(readings((ROOT / GATE / name).read_text()))


@pytest.mark.parametrize(
    "wrong",
    [
        'key = dict(scope["headers"])[b"authorization"]',
        'for name, value in self.scope["headers"]: pass',
        'told = scope.get("headers", ())',
        'told = header(scope, b"x-session-id")',
        "told = header(scope, _HEADER)",
        'read_caller([], scope["headers"], 0)',
    ],
)
def test_a_second_reader_is_found(wrong: str) -> None:
    assert len(list(readings(wrong))) == 1


@pytest.mark.parametrize(
    "right",
    [
        'read_caller(scope["headers"], peer, sources)',
        'message["headers"].append((b"origin", b""))',
        'header(scope, b"origin")',
        'scope = {**scope, "headers": headers}',
    ],
)
def test_another_use_is_none(right: str) -> None:
    assert list(readings(right)) == []
