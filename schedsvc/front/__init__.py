"""A door in a process of its own, for callers who are not trusted."""

from schedsvc.front.serve import Front, serve

__all__ = ["Front", "serve"]
