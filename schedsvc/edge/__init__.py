"""Opens a door in a process of its own, for callers who are not trusted."""

from schedsvc.edge.serve import Edge, serve

__all__ = ["Edge", "serve"]
