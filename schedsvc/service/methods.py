"""Lists the RPCs, by their names on the wire."""

from schedsvc_client.v1 import explain_pb2, identity_pb2, operator_pb2, scheduler_pb2

__all__ = ["METHODS"]

#: Such as /schedsvc.v1.SchedulerService/Admit.
METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in (scheduler_pb2, operator_pb2, explain_pb2, identity_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
