"""Generates load: what tenants experience at an OpenAI-compatible endpoint."""
