package io.github.schedsvc.client.servlet;

import io.github.schedsvc.client.CallException;
import io.github.schedsvc.client.RefusedException;
import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.Limit;
import io.github.schedsvc.v1.LimitKind;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.QuotaSnapshot;
import io.grpc.Status;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Locale;
import java.util.Map;
import java.util.regex.Pattern;

/** Writes errors in OpenAI's form, and the headers that describe a request. */
enum Answers {
  SLOW_DOWN(429, Kind.RATE_LIMIT, "slow_down"),
  LIMITED(429, Kind.RATE_LIMIT, "rate_limit_exceeded"),
  NEVER(429, Kind.RATE_LIMIT, "request_too_large"),
  TOO_LONG(400, Kind.BAD_REQUEST, "context_length_exceeded"),
  INVALID_SIZE(400, Kind.BAD_REQUEST, "invalid_size"),
  TOO_LARGE(413, Kind.BAD_REQUEST, "request_too_large"),
  UNKNOWN_TENANT(403, "permission_error", "unknown_tenant"),
  MISCONFIGURED(500, "internal_error", "gate_misconfigured"),
  OVERLOADED(503, "service_unavailable_error", "server_is_overloaded");

  static final long AWAY_RETRY_MS = 1_000;

  /** They are those of the gate of schedsvc-vllm; an outcome that is missing is OVERLOADED. */
  private static final Map<Outcome, Answers> OF =
      Map.of(
          Outcome.OUTCOME_REJECTED_FLOW_QUEUE_FULL, SLOW_DOWN,
          Outcome.OUTCOME_REJECTED_TOO_LARGE, TOO_LONG,
          Outcome.OUTCOME_EVICTED_TOO_LARGE, TOO_LONG,
          Outcome.OUTCOME_REJECTED_UNKNOWN_TENANT, UNKNOWN_TENANT,
          Outcome.OUTCOME_REJECTED_QUOTA, LIMITED,
          Outcome.OUTCOME_REJECTED_QUOTA_SIZE, NEVER,
          Outcome.OUTCOME_REJECTED_DEADLINE, LIMITED,
          Outcome.OUTCOME_EVICTED_TTL, LIMITED,
          Outcome.OUTCOME_EVICTED_DEADLINE, LIMITED);

  /**
   * The limits that x-ratelimit headers report. Places in a queue and tokens of the pool would show
   * how busy the server is with other tenants.
   */
  private static final Map<LimitKind, String> QUOTAS =
      Map.of(
          LimitKind.LIMIT_KIND_REQUESTS_PER_MINUTE, "requests",
          LimitKind.LIMIT_KIND_TOKENS_PER_MINUTE, "tokens",
          LimitKind.LIMIT_KIND_INPUT_TOKENS_PER_MINUTE, "input-tokens",
          LimitKind.LIMIT_KIND_OUTPUT_TOKENS_PER_MINUTE, "output-tokens",
          LimitKind.LIMIT_KIND_CONCURRENT_REQUESTS, "concurrent-requests",
          LimitKind.LIMIT_KIND_TOKENS_PER_DAY, "tokens-day",
          LimitKind.LIMIT_KIND_TOKENS_PER_MONTH, "tokens-month");

  private static final Pattern TO_ESCAPE = Pattern.compile("[\"\\\\\\p{Cntrl}]");

  private final int status;
  private final String kind;
  private final String code;

  Answers(int status, String kind, String code) {
    this.status = status;
    this.kind = kind;
    this.code = code;
  }

  /** Answers a request that gets no turn. */
  static void refuse(HttpServletResponse response, AdmitRequest request, Throwable failure)
      throws IOException {
    if (failure instanceof RefusedException) {
      RefusedException refused = (RefusedException) failure;
      String reason = refused.outcome().name().replace("OUTCOME_", "").toLowerCase(Locale.ROOT);
      response.setHeader("x-schedsvc-dropped-reason", reason);
      describe(
          response,
          request,
          refused.requestId(),
          refused.queueDuration(),
          refused.refusal().getQuota());
      OF.getOrDefault(refused.outcome(), OVERLOADED)
          .write(response, refused.refusal().getMessage(), refused.retryAfter().toMillis());
      return;
    }
    CallException failed = // A client that is closed is away.
        CallException.of(
            failure instanceof IllegalStateException
                ? Status.UNAVAILABLE.withCause(failure).asRuntimeException()
                : failure);
    switch (failed.getStatus().getCode()) {
      case UNAVAILABLE:
      case DEADLINE_EXCEEDED:
      case RESOURCE_EXHAUSTED:
        long stated = failed.retryAfter().toMillis();
        response.setHeader("x-schedsvc-dropped-reason", "scheduler_unreachable");
        OVERLOADED.write(response, "the scheduler is away", stated > 0 ? stated : AWAY_RETRY_MS);
        return;
      case INVALID_ARGUMENT:
        INVALID_SIZE.write(response, failed.getMessage(), 0);
        return;
      default: // A mistake of the server is not its client's.
        MISCONFIGURED.write(response, "the request could not be scheduled", 0);
    }
  }

  /**
   * Sets what the scheduler said of a request: its wait, and the quotas of its tenant. A caller
   * without a name shares the limits of unknown tenants, which are not its own to see.
   */
  static void describe(
      HttpServletResponse response,
      AdmitRequest request,
      String requestId,
      Duration waited,
      QuotaSnapshot quota) {
    response.setHeader("x-schedsvc-request-id", requestId);
    String ms = BigDecimal.valueOf(waited.toNanos() / 1_000, 3).toPlainString();
    response.setHeader("x-schedsvc-queue-duration-ms", ms);
    if (request.getTenant().isEmpty() && request.getApiKeySha256().isEmpty()) {
      return;
    }
    for (Limit limit : quota.getLimitsList()) {
      String name = QUOTAS.get(limit.getKind());
      if (name != null) {
        response.setHeader("x-ratelimit-limit-" + name, String.valueOf(limit.getLimit()));
        response.setHeader("x-ratelimit-remaining-" + name, String.valueOf(limit.getRemaining()));
        response.setHeader("x-ratelimit-reset-" + name, span(limit.getResetMs()));
      }
    }
  }

  /** Writes a time as OpenAI does, such as 1m30.5s. */
  static String span(long ms) {
    if (ms < 1_000) {
      return ms + "ms";
    }
    String seconds = BigDecimal.valueOf(ms % 60_000, 3).stripTrailingZeros().toPlainString() + "s";
    long minutes = ms / 60_000;
    String hours = minutes < 60 ? "" : minutes / 60 + "h";
    return minutes == 0 ? seconds : hours + minutes % 60 + "m" + seconds;
  }

  /** Writes an error. Without a time for a retry, a retry cannot help. */
  void write(HttpServletResponse response, String message, long retryMs) throws IOException {
    response.setStatus(status);
    response.setContentType("application/json");
    if (retryMs > 0) {
      response.setHeader("retry-after", String.valueOf((retryMs + 999) / 1000));
      response.setHeader("retry-after-ms", String.valueOf(retryMs));
    } else {
      response.setHeader("x-should-retry", "false");
    }
    String text =
        TO_ESCAPE
            .matcher(message)
            .replaceAll(found -> String.format("\\\\u%04x", (int) found.group().charAt(0)));
    String form = "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"code\":\"%s\",\"param\":null}}";
    byte[] answer = String.format(form, text, kind, code).getBytes(StandardCharsets.UTF_8);
    response.setContentLength(answer.length);
    response.getOutputStream().write(answer);
  }

  private static final class Kind {
    static final String RATE_LIMIT = "rate_limit_error";
    static final String BAD_REQUEST = "invalid_request_error";
  }
}
