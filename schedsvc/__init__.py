"""Fair, token-aware admission for shared LLM servers: a gRPC scheduler with a compiled core."""
