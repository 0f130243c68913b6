"""Lists faults as data: one in each room, as a hand may slip, and the test file that judges it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Describes one text in one file, and what a slip makes of it."""

    room: str
    path: str
    before: str  # occurs once
    after: str
    caught: str  # a file of tests that judges it; `python -m tests.tidy.planted` shows which fails

    def planted(self, text: str) -> str:
        """Return the file's text with the fault."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.path} has not exactly one {self.before!r}: mend the table")
        return text.replace(self.before, self.after)


FAULTS = (
    Fault(
        "_core/model",
        "_core/model/token_bucket.pxi",
        "        level[0] += ticks * rate\n",
        "        level[0] += rate\n",
        "tests/core/test_quotas.py",
    ),
    Fault(
        "_core/policy",
        "_core/policy/deadline_shedding.pxi",
        "    if wait_ns < left_ns:\n",
        "    if wait_ns > left_ns:\n",
        "tests/core/test_deadline_shedding.py",
    ),
    Fault(
        "_core/lifecycle",
        "_core/lifecycle/late_usage.pxi",
        "    if u.output_tokens < 0:\n",
        "    if u.output_tokens > 0:\n",
        "tests/core/test_late_usage.py",
    ),
    Fault(
        "schedsvc/driver",
        "schedsvc/driver/driver.py",
        "if waiting.calls == 0 and not waiting.delivered:",
        "if waiting.calls == 0 and waiting.delivered:",
        "tests/server/test_driver.py",
    ),
    Fault(
        "schedsvc/service",
        "schedsvc/service/scheduler_servicer.py",
        "if outcome not in (pb.OUTCOME_COMPLETED, pb.OUTCOME_CANCELLED):",
        "if outcome not in (pb.OUTCOME_COMPLETED,):",
        "tests/server/test_unary.py",
    ),
    Fault(
        "schedsvc/edge",
        "schedsvc/edge/relay.py",
        "if self.open >= self._open_max:",
        "if self.open > self._open_max:",
        "tests/server/test_edge.py",
    ),
    Fault(
        "schedsvc/state",
        "schedsvc/records/state/row_feed.py",
        "if record.number <= number:",
        "if record.number < number:",
        "tests/server/test_state.py",
    ),
    Fault(
        "schedsvc/usage",
        "schedsvc/records/usage/ledger.py",
        "if request_class not in without_classes",
        "if request_class in without_classes",
        "tests/usage/test_budgets.py",
    ),
    Fault(
        "schedsvc/recording",
        "schedsvc/records/recording/recorder.py",
        "if name not in READS:",
        "if name in READS:",
        "tests/recording/test_recorder.py",
    ),
    Fault(
        "schedsvc/metrics",
        "schedsvc/metrics/groups.py",
        "if name not in self._summed and len(self._shown) < self._max:",
        "if name not in self._summed and len(self._shown) <= self._max:",
        "tests/server/test_groups.py",
    ),
    Fault(
        "schedsvc/cluster",
        "schedsvc/cluster/signing.py",
        "if version < version_min:",
        "if version <= version_min:",
        "tests/cluster/test_signing.py",
    ),
    Fault(
        "schedsvc/cluster, its functions in the store",
        "schedsvc/cluster/totals.lua",
        "if due == nil or tonumber(due) <= now then",
        "if due == nil or tonumber(due) > now then",
        "tests/cluster/test_joining.py",
    ),
    Fault(
        "schedsvc/cli",
        "schedsvc/cli/stats.py",
        'if not snapshot.HasField("totals"):',
        'if snapshot.HasField("totals"):',
        "tests/server/test_cli.py",
    ),
    Fault(
        "schedsvc/config",
        "schedsvc/config/quota_rules.py",
        "promised.get(name, 0) > shares.get(name, 0):",
        "promised.get(name, 0) >= shares.get(name, 0):",
        "tests/server/test_config_quotas.py",
    ),
    Fault(
        "schedsvc/server",
        "schedsvc/server/http_limits.py",
        "if len(self._connections) >= self._connections_max:",
        "if len(self._connections) > self._connections_max:",
        "tests/server/test_http_limits.py",
    ),
    Fault(
        "lab/schedsvc_lab/engine",
        "lab/schedsvc_lab/engine/adapters.py",
        "if len(self._tables) >= self.slots:",
        "if len(self._tables) > self.slots:",
        "tests/lab/engine/test_engine_properties.py",
    ),
    Fault(
        "lab/schedsvc_lab/sim",
        "lab/schedsvc_lab/sim/metrics.py",
        "return WARMUP_S if duration_s > WARMUP_S else 0.0",
        "return WARMUP_S if duration_s < WARMUP_S else 0.0",
        "tests/lab/sim/test_metrics.py",
    ),
    Fault(
        "lab/schedsvc_lab/faults",
        "lab/schedsvc_lab/faults/auditor/peak.py",
        "    return most + fixed\n",
        "    return most\n",
        "tests/lab/faults/test_auditor_room.py",
    ),
    Fault(
        "lab/schedsvc_lab/workload",
        "lab/schedsvc_lab/workload/csv_forms.py",
        "if not least <= value <= TOKENS_MAX:",
        "if not least < value <= TOKENS_MAX:",
        "tests/lab/workload/test_forms.py",
    ),
    Fault(
        "lab/schedsvc_lab/load",
        "lab/schedsvc_lab/load/fairness.py",
        "if len(values) < 2 or squares == 0:",
        "if len(values) > 2 or squares == 0:",
        "tests/lab/load/test_result.py",
    ),
    Fault(
        "lab/schedsvc_lab/emulator",
        "lab/schedsvc_lab/emulator/intake.py",
        "if body.max_completion_tokens is not None:",
        "if body.max_completion_tokens is None:",
        "tests/lab/emulator/test_emulator_http.py",
    ),
    Fault(
        "lab/schedsvc_lab/demo",
        "lab/schedsvc_lab/demo/verdict.py",
        "not any(after.values()), figures)",
        "any(after.values()), figures)",
        "tests/lab/demo/test_verdict.py",
    ),
    Fault(
        "clients/python",
        "clients/python/schedsvc_client/session_protocol.py",
        "if len(self._pending) >= self._open_requests_max:",
        "if len(self._pending) > self._open_requests_max:",
        "tests/clients/test_session_protocol.py",
    ),
    Fault(
        "clients/vllm",
        "clients/vllm/schedsvc_vllm/sse.py",
        'piece.find(b"\\n\\n") == len(piece) - 2 and',
        'piece.find(b"\\n\\n") <= len(piece) - 2 and',
        "tests/clients/test_sse.py",
    ),
    Fault(
        "clients/vllm, choices",
        "clients/vllm/schedsvc_vllm/answer_readers.py",
        "several = call.n * len(call.prompts.tokens) > 1",
        "several = False",
        "tests/clients/test_choices.py",
    ),
    Fault(
        "clients/vllm, beams",
        "clients/vllm/schedsvc_vllm/account.py",
        "counted, is_sound = self.counted(), ",
        "counted, is_sound = None if self.call.beams else self.counted(), ",
        "tests/clients/test_beam_search.py",
    ),
    Fault(
        "clients/vllm, router",
        "clients/vllm/schedsvc_vllm/router.py",
        "is not None and not each.is_out",
        "is not None",
        "tests/clients/test_routes.py",
    ),
)
