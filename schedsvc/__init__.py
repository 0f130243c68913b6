"""Admits requests to shared LLM servers, fair by tokens: a gRPC scheduler with a compiled core."""
