"""Looks at the internals of vLLM that the gate and the simulator count on; run it inside vLLM.

    python contract.py

Prints a line for each difference from the gate's expectations; exit status 1 if there is one.
"""

import ast
import inspect
import sys
import textwrap

from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats


def set_in_init(kind: type) -> set[str]:
    """Return the attributes that a class sets in its `__init__`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def fields(kind: type) -> set[str]:
    """Return the fields of a dataclass or pydantic model."""
    return set(inspect.get_annotations(kind)) | set(getattr(kind, "model_fields", {}))


def resumes_in_order() -> bool:
    """Return whether the youngest preempted requests go on before all others in their old order."""
    waiting = FCFSRequestQueue()
    for put, name in ("add", "new"), ("prepend", "younger"), ("prepend", "older"):
        getattr(waiting, f"{put}_request")(name)
    preempts = inspect.getsource(Scheduler.schedule), inspect.getsource(Scheduler._preempt_request)
    return (
        list(waiting) == ["older", "younger", "new"]
        and "preempted_req = self.running.pop()" in preempts[0]
        and "self.waiting.prepend_request(request)" in preempts[1]
    )


def missing() -> list[str]:
    """Return what is not there."""
    found: list[str] = []

    def expect(where: object, present: set[str], *names: str) -> None:
        found.extend(f"{where}.{name} is gone" for name in names if name not in present)

    state = set_in_init(RequestState)
    expect("RequestState", state, "request_id", "parent_req", "prompt_len", "is_prefilling")
    expect("RequestState", state, "num_cached_tokens", "detokenizer")
    expect("OutputProcessor", set_in_init(OutputProcessor), "request_states")
    first = list(inspect.signature(OutputProcessor.add_request).parameters)[1]
    if first != "request":
        found.append(f"OutputProcessor.add_request takes {first} first, not the request")
    expect("IncrementalDetokenizer", set(dir(IncrementalDetokenizer)), "num_output_tokens")
    expect("RequestResponseMetadata", fields(RequestResponseMetadata), "final_usage_info")
    expect("OpenAIServingModels", set_in_init(OpenAIServingModels), "lora_requests")
    expect("CacheConfig", fields(CacheConfig), "kv_cache_size_tokens", "block_size")
    expect("SchedulerConfig", fields(SchedulerConfig), "max_num_seqs", "policy")
    parallel = fields(ParallelConfig) | set(dir(ParallelConfig))
    expect("ParallelConfig", parallel, "data_parallel_size", "data_parallel_size_local")
    expect("ParallelConfig", parallel, "local_engines_only")
    expect("ParallelConfig", parallel, "_api_process_count", "_api_process_rank")
    scheduler = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")
    expect("SchedulerStats", fields(SchedulerStats), *scheduler, "kv_cache_usage")
    expect("IterationStats", set_in_init(IterationStats), "num_preempted_reqs")
    expect("StatLoggerBase", set(dir(StatLoggerBase)), "record", "log_engine_initialized")
    if not resumes_in_order():
        found.append("what was preempted may go on in another order, or behind what is new")
    if PRIORITY_HEADER.lower() != "x-vllm-priority":
        found.append(f"the header of priorities is {PRIORITY_HEADER}")
    return found


if __name__ == "__main__":
    gone = missing()
    print("\n".join(gone))
    sys.exit(1 if gone else 0)
