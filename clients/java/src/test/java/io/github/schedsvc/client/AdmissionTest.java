package io.github.schedsvc.client;

import static io.github.schedsvc.client.Requests.await;
import static io.github.schedsvc.client.Requests.codeOf;
import static io.github.schedsvc.client.Requests.failureOf;
import static io.github.schedsvc.client.Requests.input;
import static io.github.schedsvc.client.Requests.nothing;
import static io.github.schedsvc.client.Requests.output;
import static io.github.schedsvc.client.Requests.request;
import static io.github.schedsvc.client.Requests.stats;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.CompleteRequest;
import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.LeaseState;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.Refusal;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.github.schedsvc.v1.SessionRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

@Timeout(120)
class AdmissionTest {
  private static final ChannelCredentials PLAIN = InsecureChannelCredentials.create();

  private final FakeScheduler fake = new FakeScheduler(1);
  private final Scheduler scheduler = Scheduler.builder(fake.target()).build();

  @AfterEach
  void close() {
    assertTrue(scheduler.close(Duration.ofMinutes(1)));
    fake.close();
  }

  @Test
  void endThatDoesNotArriveIsRepeated() throws Exception {
    fake.fail("Complete", Status.Code.UNAVAILABLE, 5);
    fake.fail("Complete", Status.Code.DEADLINE_EXCEEDED, 1);
    Admission admission = scheduler.admit(request());
    CompleteResponse books = await(admission.complete(output(3)));
    assertEquals(3, books.getOutputTokens());
    assertEquals(Outcome.OUTCOME_COMPLETED, books.getOutcome());
    assertSame(books, await(admission.cancel(output(50))), "the first end wins");
    scheduler.admit(request()).close();
    assertEquals(7 + 1, fake.count("Complete"));
    assertEquals(0, fake.live());
    assertEquals(1, fake.leases.get(1L).ends.size());
  }

  @Test
  void endThatCannotSucceedIsNotRepeated() throws Exception {
    fake.fail("Complete", Status.Code.NOT_FOUND, 2);
    Admission admission = scheduler.admit(request());
    assertEquals(Status.Code.NOT_FOUND, codeOf(failureOf(admission.cancel(nothing()))));
    admission.close();
    assertEquals(1, fake.count("Complete"));
  }

  @Test
  void closeDoesNotWaitForAnEndThatTakesLong() throws Exception {
    fake.fail("Complete", Status.Code.UNAVAILABLE, 10_000);
    Admission admission = scheduler.admit(request());
    admission.close();
    assertTrue(fake.count("Complete") > 0);
    assertEquals(1, fake.live());
    fake.failNoMore("Complete");
    await(admission.complete(nothing()));
    assertEquals(0, fake.live());
  }

  @Test
  void endIsNotCancelledWithItsCaller() throws Exception {
    Admission admission = scheduler.admit(request());
    Context.CancellableContext context = Context.current().withCancellation();
    context.cancel(null);
    Context previous = context.attach();
    try {
      await(admission.complete(nothing()));
    } finally {
      context.detach(previous);
    }
    assertEquals(0, fake.live());
  }

  @Test
  void callerCannotDisturbTheFutureOfAnEnd() throws Exception {
    fake.fail("Complete", Status.Code.UNAVAILABLE, 2);
    Admission admission = scheduler.admit(request());
    admission.complete(nothing()).cancel(true);
    assertEquals(
        Outcome.OUTCOME_COMPLETED, await(admission.cancel(nothing())).getOutcome());
  }

  @Test
  void closeEndsWhatIsUnderWay() throws Exception {
    Admission running = scheduler.admit(request());
    fake.fail("Complete", Status.Code.UNAVAILABLE, 2);
    fake.decision = fake::hold;
    CompletableFuture<Admission> waiting = scheduler.admitAsync(request());
    fake.until(() -> fake.admits.size() == 2);
    scheduler.close();
    assertEquals(IllegalStateException.class, failureOf(waiting).getClass());
    assertFalse(running.lost().isDone());
    fake.until(() -> fake.withdrawn.size() == 1);
    assertEquals(0, fake.live());
    assertEquals(Outcome.OUTCOME_CANCELLED, fake.leases.get(1L).ends.get(0).getOutcome());
    assertThrows(IllegalStateException.class, () -> scheduler.admit(request()));
    assertEquals(2, fake.admits.size());
  }

  @Test
  void closeGivesUpInTheEnd() throws Exception {
    try (FakeScheduler away = new FakeScheduler(101)) {
      Scheduler client = Scheduler.builder(away.target()).build();
      Admission admission = client.admit(request());
      away.fail("Complete", Status.Code.UNAVAILABLE, 10_000);
      assertFalse(client.close(Duration.ZERO));
      assertEquals(Status.Code.UNAVAILABLE, codeOf(failureOf(admission.complete(nothing()))));
    }
  }

  /** Lets a grant be out, which the client has not read when it withdraws its request. */
  private void cross(Runnable withdraw) {
    fake.decision =
        (asked, answer) -> {
          if (fake.admits.size() > 1) {
            fake.grant(asked, answer);
            return;
          }
          fake.grantTo(asked);
          withdraw.run();
        };
  }

  private void assertReturned() {
    fake.until(() -> fake.leases.size() == 1 && fake.live() == 0);
    CompleteRequest end = fake.leases.get(1L).ends.get(0);
    assertEquals(Outcome.OUTCOME_CANCELLED, end.getOutcome());
    assertTrue(end.hasInputTokens() && end.hasOutputTokens());
    assertEquals(0, end.getInputTokens() + end.getOutputTokens());
    assertEquals(fake.admits.get(0).getRequestId(), fake.admits.get(1).getRequestId());
    assertEquals(1, fake.admits.get(1).getQueueTtlMs());
  }

  @Test
  void grantThatCrossesAnInterruptIsReturned() throws Exception {
    Thread caller = Thread.currentThread();
    cross(caller::interrupt);
    assertThrows(InterruptedException.class, () -> scheduler.admit(request()));
    assertReturned();
  }

  @Test
  void grantThatCrossesTheCancellationOfItsFutureIsReturned() throws Exception {
    CompletableFuture<Void> isOut = new CompletableFuture<>();
    cross(() -> isOut.complete(null));
    CompletableFuture<Admission> admitted = scheduler.admitAsync(request());
    await(isOut);
    assertTrue(admitted.cancel(true));
    assertReturned();
  }

  @Test
  void grantThatCrossesTheCancellationOfItsContextIsReturned() throws Exception {
    Context.CancellableContext context = Context.current().withCancellation();
    cross(() -> context.cancel(null));
    CompletableFuture<Admission> admitted =
        context.call(() -> scheduler.admitAsync(request()));
    assertEquals(Status.Code.CANCELLED, codeOf(failureOf(admitted)));
    assertReturned();
  }

  @Test
  void grantThatCrossesADeadlineIsReturned() {
    fake.decision =
        (asked, answer) -> {
          if (fake.admits.size() > 1) {
            fake.grant(asked, answer);
            return;
          }
          fake.grantTo(asked);
          answer.onError(Status.DEADLINE_EXCEEDED.asException());
        };
    assertEquals(
        Status.Code.DEADLINE_EXCEEDED, codeOf(failureOf(scheduler.admitAsync(request()))));
    assertReturned();
  }

  @Test
  void grantThatIsReadAfterTheCancellationIsReturned() throws Exception {
    List<CompletableFuture<Admission>> asked = Collections.synchronizedList(new ArrayList<>());
    // The verdict reaches the client's thread, which withdraws before it hands it on.
    ClientInterceptor late = new OnClose(() -> asked.forEach(future -> future.cancel(true)));
    try (Scheduler client =
        Scheduler.builder(fake.target())
            .connect(target -> Grpc.newChannelBuilder(target, PLAIN).intercept(late))
            .build()) {
      fake.decision =
          (request, answer) -> {
            fake.until(() -> asked.size() == 1);
            fake.grant(request, answer);
          };
      asked.add(client.admitAsync(request()));
      fake.until(() -> fake.leases.size() == 1 && fake.live() == 0);
      assertTrue(asked.get(0).isCancelled());
    }
  }

  @Test
  void whatFollowsAGrantIsNotCancelledWithItsCall() throws Exception {
    CompletableFuture<Void> isReady = new CompletableFuture<>();
    fake.decision = (asked, answer) -> isReady.thenRun(() -> fake.grant(asked, answer));
    CompletableFuture<Context> seen =
        scheduler.admitAsync(request()).thenApply(admission -> Context.current());
    isReady.complete(null);
    await(seen);
    scheduler.close();
    assertFalse(await(seen).isCancelled());
  }

  @Test
  void requestThatWasWithdrawnBeforeItWasSentStaysUnsent() throws Exception {
    Context.CancellableContext context = Context.current().withCancellation();
    context.cancel(null);
    CompletableFuture<Admission> admitted =
        context.call(() -> scheduler.admitAsync(request()));
    assertEquals(Status.Code.CANCELLED, codeOf(failureOf(admitted)));
    assertEquals(List.of(), fake.calls);
  }

  @Test
  void totalsBeyondTheLimitsAreBroughtWithinThem() throws Exception {
    Admission admission = scheduler.admit(request());
    admission.report(output(1L << 40));
    await(admission.complete(input(-1, -9)));
    CompleteRequest end = fake.leases.get(1L).ends.get(0);
    assertEquals(0, end.getInputTokens());
    assertEquals(0, end.getCachedInputTokens());
    assertEquals(1 << 27, end.getOutputTokens());
  }

  @ParameterizedTest
  @EnumSource(
      value = LeaseState.class,
      names = {"LEASE_STATE_UNKNOWN", "LEASE_STATE_VOID", "LEASE_STATE_ENDED"})
  void lostLeaseIsSaid(LeaseState state) throws Exception {
    fake.ttlMs = 30;
    try (Admission admission = scheduler.admit(request())) {
      admission.report(input(100, 16));
      admission.report(output(7));
      List<LeaseProgress> reports = fake.leases.get(1L).reports;
      fake.until(
          () -> {
            LeaseProgress last =
                reports.isEmpty()
                    ? LeaseProgress.getDefaultInstance()
                    : reports.get(reports.size() - 1);
            return last.getInputTokens() == 100
                && last.getCachedInputTokens() == 16
                && last.getOutputTokens() == 7;
          });
      int seen;
      synchronized (fake) {
        fake.leases.get(1L).state = 9; // A state of a later version.
        seen = reports.size();
      }
      fake.until(() -> reports.size() > seen + 1);
      assertFalse(admission.lost().isDone());
      synchronized (fake) {
        fake.leases.get(1L).state = state.getNumber();
      }
      assertEquals(state, await(admission.lost()));
    }
  }

  @Test
  void renewalThatFailsIsRepeatedBeforeTheNextIsDue() throws Exception {
    fake.fail("Progress", Status.Code.UNAVAILABLE, 3);
    fake.ttlMs = 3_000;
    try (FakeScheduler usual = new FakeScheduler(101);
        Scheduler other = Scheduler.builder(usual.target()).build()) {
      usual.ttlMs = 3_000;
      scheduler.admit(request());
      other.admit(request());
      fake.until(() -> !fake.leases.get(1L).reports.isEmpty());
      assertEquals(4, fake.count("Progress"));
      assertTrue(usual.leases.get(101L).reports.size() <= 2);
    }
  }

  @Test
  void renewalWithoutAnAnswerIsRepeated() throws Exception {
    fake.ttlMs = 300;
    scheduler.admit(request());
    int seen;
    synchronized (fake) {
      fake.hangs = true;
      seen = fake.count("Progress");
    }
    fake.until(() -> fake.count("Progress") > seen);
    synchronized (fake) {
      fake.hangs = false;
    }
    fake.until(() -> fake.leases.get(1L).reports.size() > seen);
  }

  @Test
  void endedLeaseIsNotRenewed() throws Exception {
    fake.ttlMs = 300;
    scheduler.admit(request()).close();
    scheduler.admit(request());
    fake.until(() -> fake.leases.get(2L).reports.size() > 2);
    assertEquals(List.of(), fake.leases.get(1L).reports);
  }

  @ParameterizedTest
  @CsvSource({"22, OUTCOME_REJECTED_QUOTA", "31, OUTCOME_UNSPECIFIED"})
  void refusalSaysWhyAndWhenToRetry(int outcome, Outcome said) {
    fake.decision =
        FakeScheduler.refusal(
            outcome, Refusal.newBuilder().setMessage("not now").setRetryAfterMs(500).build());
    RefusedException refused =
        assertThrows(RefusedException.class, () -> scheduler.admit(request()));
    assertEquals(said, refused.outcome());
    assertEquals(said + ": not now", refused.getMessage());
    assertEquals(Duration.ofMillis(500), refused.retryAfter());
    assertEquals(fake.admits.get(0).getRequestId(), refused.requestId());
  }

  @Test
  void tooManyPrefixHashesAreRefusedWithTheirNumber() {
    AdmitRequest large =
        request().toBuilder().addAllPrefixBlockHashes(Collections.nCopies(20_000, 1L)).build();
    CallException failure = assertThrows(CallException.class, () -> scheduler.admit(large));
    String said = "prefix_block_hashes: has 20000 hashes; at most 4096 are allowed";
    assertEquals("INVALID_ARGUMENT: " + said, failure.getMessage());
    assertEquals(List.of(), fake.calls);
  }

  @Test
  void idsAreMadeUpOrKept() throws Exception {
    String own = scheduler.admit(request().toBuilder().setRequestId("own").build()).requestId();
    Set<String> ids =
        Set.of(own, scheduler.admit(request()).requestId(), scheduler.admit(request()).requestId());
    assertEquals(3, ids.size());
    assertEquals("own", fake.admits.get(0).getRequestId());
  }

  @Test
  void optionsReachTheCalls() throws Exception {
    List<String> methods = Collections.synchronizedList(new ArrayList<>());
    ClientInterceptor interceptor =
        new ClientInterceptor() {
          @Override
          public <Q, R> ClientCall<Q, R> interceptCall(
              MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
            methods.add(method.getBareMethodName());
            return next.newCall(method, options);
          }
        };
    try (Scheduler client =
        Scheduler.builder(fake.target())
            .token("secret")
            .connect(target -> Grpc.newChannelBuilder(target, PLAIN).intercept(interceptor))
            .build()) {
      client.admit(request()).close();
    }
    assertEquals(List.of("Admit", "Complete"), methods);
    assertEquals("Bearer secret", fake.headers.get(0).get(Calls.key("authorization")));
  }

  @Test
  void eachMethodIsCalledThroughTheClient() throws Exception {
    stats(scheduler, CallOptions.DEFAULT);
    fake.hangs = true;
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(100, TimeUnit.MILLISECONDS);
    Throwable failure =
        assertThrows(ExecutionException.class, () -> stats(scheduler, options)).getCause();
    assertEquals(CallException.class, failure.getClass());
    assertEquals(Status.Code.DEADLINE_EXCEEDED, codeOf(failure));
    assertEquals(2, fake.count("Stats"));
  }

  @Test
  void streamIsRefused() {
    StatusRuntimeException failure =
        assertThrows(
            StatusRuntimeException.class,
            () ->
                scheduler.call(
                    SchedulerServiceGrpc.getSessionMethod(),
                    SessionRequest.getDefaultInstance(),
                    CallOptions.DEFAULT));
    assertEquals("UNIMPLEMENTED: only unary calls are made", failure.getMessage());
  }
}
