package io.github.schedsvc.client;

import io.github.schedsvc.v1.AdmitResponse;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.Refusal;
import java.time.Duration;

/** Is the scheduler's verdict that a request does not run. */
public final class RefusedException extends Exception {
  private static final long serialVersionUID = 1;

  private final String requestId;
  private final AdmitResponse response;

  RefusedException(String requestId, AdmitResponse response) {
    super(known(response.getOutcome()) + ": " + response.getRefusal().getMessage());
    this.requestId = requestId;
    this.response = response;
  }

  /** Returns the id by which Explain knows the request. */
  public String requestId() {
    return requestId;
  }

  /** Returns the reason: OUTCOME_UNSPECIFIED if a later version of the contract has given it. */
  public Outcome outcome() {
    return known(response.getOutcome());
  }

  /** Returns a sentence for a person, and the limits of the tenant. */
  public Refusal refusal() {
    return response.getRefusal();
  }

  /** Returns the time until the earliest sensible retry; zero says that a retry cannot help. */
  public Duration retryAfter() {
    return Duration.ofMillis(refusal().getRetryAfterMs());
  }

  /** Returns the time from the request's arrival to the verdict. */
  public Duration queueDuration() {
    return Duration.ofNanos(1_000 * response.getQueueDurationUs());
  }

  private static Outcome known(Outcome outcome) {
    return outcome == Outcome.UNRECOGNIZED ? Outcome.OUTCOME_UNSPECIFIED : outcome;
  }
}
