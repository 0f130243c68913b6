"""Makes the metrics of a server from its configuration."""

import grpc

from schedsvc.config import Config
from schedsvc.driver import Driver
from schedsvc.metrics import Metrics
from schedsvc.server.listed_tenants import shown_tenants
from schedsvc.server.process_counts import PROCESS_COUNTS
from schedsvc.service import METHODS

__all__ = ["metrics_of", "models_of"]


def metrics_of(driver: Driver, config: Config) -> Metrics:
    """Return the metrics of a driver. O(tenants)."""
    page = config.metrics
    caps = (0, 0) if page is None else (page.tenants_max, page.histogram_tenants_max)
    metrics = Metrics(
        driver,
        shown_tenants(config),
        *caps,
        PROCESS_COUNTS,
        models=models_of(config),
        gen_ai=page is not None and page.gen_ai,
    )
    metrics.expect_failures(
        (method.rpartition("/")[2], code.name)
        for method in sorted(METHODS)
        for code in grpc.StatusCode
        if code is not grpc.StatusCode.OK
    )
    return metrics


def models_of(config: Config) -> dict[str, str]:
    """Return the model of each pool that the configuration lists under one. O(pools)."""
    return {pool: model.name for model in config.models for pool in model.pools}
