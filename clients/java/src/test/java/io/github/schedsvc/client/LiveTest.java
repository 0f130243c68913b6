package io.github.schedsvc.client;

import static io.github.schedsvc.client.Requests.await;
import static io.github.schedsvc.client.Requests.codeOf;
import static io.github.schedsvc.client.Requests.failureOf;
import static io.github.schedsvc.client.Requests.input;
import static io.github.schedsvc.client.Requests.output;
import static io.github.schedsvc.client.Requests.request;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.schedsvc.client.tool.Dialing;
import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.CompleteRequest;
import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.ExplainRequest;
import io.github.schedsvc.v1.ExplainServiceGrpc;
import io.github.schedsvc.v1.FlowStats;
import io.github.schedsvc.v1.LimitKind;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.PoolStats;
import io.github.schedsvc.v1.RequestState;
import io.github.schedsvc.v1.RequestStory;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.github.schedsvc.v1.StatsResponse;
import io.github.schedsvc.v1.Totals;
import io.grpc.CallOptions;
import io.grpc.Status;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/**
 * Runs on the scheduler at SCHEDSVC_TARGET; `make test-java` starts it. Its pool runs one request
 * at a time for the tenant red, and its queue holds one. In the end nothing may be left there.
 */
@Timeout(120)
@EnabledIfEnvironmentVariable(named = "SCHEDSVC_TARGET", matches = ".+")
class LiveTest {
  /** The scheduler's lease TTL, and its grace. */
  private static final long TTL_MS = 3_000;

  private final Scheduler scheduler = builder().build();

  private static Scheduler.Builder builder() {
    try {
      return Dialing.builder(System.getenv("SCHEDSVC_TARGET"));
    } catch (IOException e) {
      throw new IllegalStateException(e);
    }
  }

  @AfterEach
  void nothingIsLeft() throws Exception {
    Totals totals = stats().getTotals();
    assertEquals(
        0, totals.getQueued() + totals.getLiveLeases() + totals.getPromisedTokens(), "" + totals);
    assertTrue(scheduler.close(Duration.ofMinutes(1)));
  }

  private StatsResponse stats() throws Exception {
    return Requests.stats(scheduler, CallOptions.DEFAULT);
  }

  private FlowStats flow() throws Exception {
    return stats().getFlowsList().stream()
        .filter(flow -> flow.getTenant().equals("red"))
        .findFirst()
        .orElseThrow();
  }

  private Admission admit() throws Exception {
    return scheduler.admit(request().toBuilder().setReportsProgress(true).build());
  }

  private List<RequestStory> explain(String id) throws Exception {
    ExplainRequest asked = ExplainRequest.newBuilder().setRequestId(id).setTenant("red").build();
    return await(scheduler.call(ExplainServiceGrpc.getExplainMethod(), asked, CallOptions.DEFAULT))
        .getRequestsList();
  }

  @Test
  void totalsAreCharged() throws Exception {
    FlowStats before = flow();
    Admission admission = admit();
    assertEquals("main", admission.grant().getPool());
    assertTrue(admission.grant().getReservedTokens() >= 120);
    admission.report(input(100, 16));
    assertEquals(
        CompleteResponse.newBuilder()
            .setOutcome(Outcome.OUTCOME_COMPLETED)
            .setInputTokens(100)
            .setCachedInputTokens(16)
            .setOutputTokens(7)
            .build(),
        await(admission.complete(output(7))));
    assertEquals(1, flow().getCompleted() - before.getCompleted());
    assertEquals(7, flow().getOutputTokens() - before.getOutputTokens());
  }

  @Test
  void admissionThatIsClosedIsCancelled() throws Exception {
    long before = flow().getCancelled();
    admit().close();
    CompleteResponse books = await(admit().giveBack());
    assertEquals(0, books.getInputTokens() + books.getOutputTokens());
    assertEquals(2, flow().getCancelled() - before);
  }

  @Test
  void requestIsExplained() throws Exception {
    try (Admission admission = admit()) {
      List<RequestStory> stories = explain(admission.requestId());
      assertEquals(1, stories.size());
      assertEquals(RequestState.REQUEST_STATE_LIVE, stories.get(0).getState());
    }
    AdmitRequest large = request().toBuilder().setInputTokens(0, 1_000_000).build();
    RefusedException refused = assertThrows(RefusedException.class, () -> scheduler.admit(large));
    assertEquals(Outcome.OUTCOME_REJECTED_TOO_LARGE, refused.outcome());
    assertEquals(Duration.ZERO, refused.retryAfter());
    assertEquals(refused.outcome(), explain(refused.requestId()).get(0).getOutcome());
  }

  @Test
  void fullQueueNamesItsLimit() throws Exception {
    try (Admission running = admit()) {
      CompletableFuture<Admission> waiting = scheduler.admitAsync(request());
      while (flow().getQueued() != 1) {
        Thread.sleep(1);
      }
      RefusedException refused =
          assertThrows(RefusedException.class, () -> scheduler.admit(request()));
      assertEquals(Outcome.OUTCOME_REJECTED_FLOW_QUEUE_FULL, refused.outcome());
      assertFalse(refused.retryAfter().isZero());
      assertTrue(
          refused.refusal().getQuota().getLimitsList().stream()
              .anyMatch(
                  limit ->
                      limit.getKind() == LimitKind.LIMIT_KIND_QUEUED_REQUESTS
                          && limit.getLimit() == 1
                          && limit.getRemaining() == 0));
      waiting.cancel(true);
      while (flow().getQueued() != 0) {
        Thread.sleep(1);
      }
    }
  }

  @Test
  void wrongFieldIsNamed() {
    AdmitRequest wrong = request().toBuilder().addInputTokens(0).build();
    CallException failure = assertThrows(CallException.class, () -> scheduler.admit(wrong));
    assertEquals("input_tokens[1]", failure.fields().get(0).getField());
    assertTrue(failure.getMessage().contains("input_tokens[1]"), failure.getMessage());
  }

  @Test
  void wrongTokenIsFailedCall() {
    try (Scheduler stranger = builder().token("wrong").build()) {
      assertEquals(
          Status.Code.UNAUTHENTICATED, codeOf(failureOf(stranger.admitAsync(request()))));
    }
  }

  @Test
  void leaseIsRenewed() throws Exception {
    Admission admission = admit();
    Thread.sleep(5 * TTL_MS / 2); // Its TTL and the grace are over then.
    PoolStats pool = stats().getPools(0);
    while (pool.getLiveLeases() == 1 && pool.getSuspectLeases() != 0) { // A renewal is late.
      pool = stats().getPools(0);
    }
    assertEquals(1, pool.getLiveLeases());
    assertFalse(admission.lost().isDone());
    admission.report(input(100, 0));
    assertEquals(9, await(admission.complete(output(9))).getOutputTokens());
  }

  @Test
  void lostLeaseIsSaid() throws Exception {
    try (Admission admission = admit()) {
      CompleteRequest end =
          CompleteRequest.newBuilder()
              .setLeaseId(admission.grant().getLeaseId())
              .setPoolEpoch(admission.grant().getPoolEpoch())
              .build();
      await(scheduler.call(SchedulerServiceGrpc.getCompleteMethod(), end, CallOptions.DEFAULT));
      await(admission.lost());
    }
  }
}
