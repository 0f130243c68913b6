"""Holds what people use around the service. Serving imports none of it."""
