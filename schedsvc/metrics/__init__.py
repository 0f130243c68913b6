"""Exports Prometheus metrics, read from the core at each scrape."""

from schedsvc.metrics.exporter import Metrics

__all__ = ["Metrics"]
