"""Drafts a configuration that meets stated goals on recorded traffic ([docs/use/advise.md])."""
