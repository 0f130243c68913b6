"""Exports Prometheus metrics, read from the core at each scrape."""

from schedsvc.metrics.exporter import HISTOGRAM_BOUNDS_MS, Metrics

__all__ = ["HISTOGRAM_BOUNDS_MS", "Metrics"]
