"""Changes one tenant of a running core, without a look at the others."""

from schedsvc.config.apply import Configurable, class_flow, group_name, limit_flow
from schedsvc.config.class_rules import DEFAULT_CLASS
from schedsvc.config.models import Config, Tenant

__all__ = ["change_tenant"]


def change_tenant(
    core: Configurable, config: Config, before: Tenant | None, after: Tenant | None, now_ns: int
) -> None:
    """Give a tenant other terms and keys; None: no operator or file lists it. O(keys + classes).

    `config` has the groups and classes that the core knows, and the mode of all tenants.
    """
    name = next(tenant.name for tenant in (after, before) if tenant is not None).encode()
    old = set(before.api_keys_sha256) if before else set()
    new = set(after.api_keys_sha256) if after else set()
    for key in sorted(old - new):
        core.set_key_gone(bytes.fromhex(key))
    if after is None:
        core.set_retired(now_ns, name)
        return
    flow = core.set_flow(name, after.weight_milli)
    groups = {} if after.group is None else {after.group: core.quota_index(group_name(after.group))}
    limit_flow(core, flow, after, groups, now_ns)
    named = {after.request_class or DEFAULT_CLASS, *(after.classes or ())}
    classes = {cls: 0 if cls == DEFAULT_CLASS else core.class_index(cls.encode()) for cls in named}
    class_flow(core, flow, after, classes)
    core.set_flow_mode(now_ns, flow, config.is_dry_run(after))
    for key in sorted(new - old):
        core.set_key(bytes.fromhex(key), flow)
