"""The load generator: what tenants experience at an OpenAI-compatible endpoint."""
