"""Maps the five RPCs of schedsvc.v1.SchedulerService to the driver."""

from schedsvc.service.auth import Authenticator, Credentials, Unauthenticated
from schedsvc.service.rpcs import SERVICE_NAME, Service

__all__ = ["SERVICE_NAME", "Authenticator", "Credentials", "Service", "Unauthenticated"]
