"""Maps the RPCs of schedsvc.v1.SchedulerService and OperatorService to the driver."""

from schedsvc.service.auth import Authenticator, Credentials, Unauthenticated
from schedsvc.service.operator import OPERATOR_SERVICE_NAME, Actions, OperatorService
from schedsvc.service.rpcs import SERVICE_NAME, Service

__all__ = [
    "OPERATOR_SERVICE_NAME",
    "SERVICE_NAME",
    "Actions",
    "Authenticator",
    "Credentials",
    "OperatorService",
    "Service",
    "Unauthenticated",
]
