"""Serves asyncio programs: a Session for shims, and the unary calls."""

from schedsvc_client.aio.admission import Admission
from schedsvc_client.aio.session import SchedulerSession
from schedsvc_client.aio.session_state import SessionState
from schedsvc_client.aio.unary import AsyncScheduler

__all__ = ["Admission", "AsyncScheduler", "SchedulerSession", "SessionState"]
