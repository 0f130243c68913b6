"""Lists the paths that the gate decides by, and those of other endpoints that vLLM serves."""

from __future__ import annotations

import re

from schedsvc_vllm.operator_paths import is_operator_path
from schedsvc_vllm.paths import TENANT_PATHS
from schedsvc_vllm.routes import GATED_PATHS

#: Endpoints that are only read, and neither act on the engine nor reveal its setup. Each `ID` is a
#: parameter of the path.
READ_PATHS = frozenset(
    {"/health", "/load", "/metrics", "/v1/models", "/v1/responses/ID", "/version"}
)
CANCEL = "/v1/responses/ID/cancel"
#: Endpoints that run the model and that the gate cannot size: they return 501.
UNSIZED_PATHS = frozenset({"/generative_scoring", "/v1/systemone"})


def lists_of(path: str) -> list[str]:
    """Return the lists that a path is in; its parameters may be written `{name}`."""
    path = re.sub(r"\{[^}]*\}", "ID", path)
    lists = {
        "gated": path in GATED_PATHS,
        "tenants": path in TENANT_PATHS | {CANCEL},
        "operators": is_operator_path(path.encode()),
        "reads": path in READ_PATHS,
        "unsized": path in UNSIZED_PATHS,
    }
    return [name for name, is_in in lists.items() if is_in]
