"""Lists endpoints that act on the engine itself, or reveal what only its operator should read.

The gate passes them to no tenant, whatever the method: one tenant could stop all others, or read
how the engine is set up. A request needs an operator's key (`SCHEDSVC_OPERATOR_KEYS_FILE`).
A path is an operator's if any of its segments is the name of such an endpoint. So neither a prefix
that the server strips (vLLM's `--root-path`), nor an application that it mounts there, nor a
segment of dots leads around the list.
"""

from __future__ import annotations

#: Paths of vLLM, and of SageMaker's container, whose routes vLLM serves beside its own.
VLLM_OPERATOR_PATHS = frozenset(
    {
        "/abort_requests",
        "/adapters",
        "/collective_rpc",
        "/fault_tolerance",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/kv_event_sources",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/tokenizer_info",
        "/update_weight_version",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    }
)
#: Paths of servers that stand behind the proxy. SGLang serves many of them for GET, too, so the
#: refusal of unknown POST requests does not cover them. The last lines are of llama.cpp and
#: LMDeploy.
OTHER_OPERATOR_PATHS = frozenset(
    {
        "/abort_request",
        "/add_external_corpus",
        "/clear_hicache_storage_backend",
        "/close_session",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/dump_expert_distribution_record",
        "/dumper",
        "/flush_cache",
        "/freeze_gc",
        "/get_internal_state",
        "/get_remote_instance_transfer_engine_info",
        "/get_server_info",
        "/get_weight_version",
        "/get_weights_by_name",
        "/health_generate",  # a GET that runs the model
        "/hicache",
        "/init_weights_send_group_for_remote_instance",
        "/init_weights_update_group",
        "/list_external_corpora",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/open_session",
        "/pause_generation",
        "/release_memory_occupation",
        "/remote_instance_transfer_engine_info",
        "/remove_external_corpus",
        "/resume_memory_occupation",
        "/send_weights_to_remote_instance",
        "/set_internal_state",
        "/set_trace_level",
        "/slow_down",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/weight_version",
        "/weights_checker",
        *("/lora-adapters", "/slots"),
        *("/distserve", "/terminate", "/wakeup"),
    }
)
OPERATOR_PATHS = VLLM_OPERATOR_PATHS | OTHER_OPERATOR_PATHS
_NAMES = frozenset(path.rpartition("/")[2].encode() for path in OPERATOR_PATHS)


def is_operator_path(path: bytes) -> bool:
    """Return whether a segment of a path names an operator's endpoint, in any case. O(path)."""
    return not _NAMES.isdisjoint(path.lower().split(b"/"))
