"""Maps the RPCs of the four services to the driver."""

from schedsvc.service.auth import Authenticator, Credentials, Known, Unauthenticated
from schedsvc.service.explain import EXPLAIN_SERVICE_NAME, ExplainService, stories
from schedsvc.service.explanation_text import pool_needs
from schedsvc.service.follow import FollowService
from schedsvc.service.identity import IdentityService
from schedsvc.service.judging import Judge
from schedsvc.service.methods import METHODS
from schedsvc.service.operator import OPERATOR_SERVICE_NAME, Actions, OperatorService
from schedsvc.service.pace import Paces
from schedsvc.service.scheduler_servicer import SERVICE_NAME, Service
from schedsvc.service.tenants import TenantCalls

__all__ = [
    "EXPLAIN_SERVICE_NAME",
    "METHODS",
    "OPERATOR_SERVICE_NAME",
    "SERVICE_NAME",
    "Actions",
    "Authenticator",
    "Credentials",
    "ExplainService",
    "FollowService",
    "IdentityService",
    "Judge",
    "Known",
    "OperatorService",
    "Paces",
    "Service",
    "TenantCalls",
    "Unauthenticated",
    "pool_needs",
    "stories",
]
