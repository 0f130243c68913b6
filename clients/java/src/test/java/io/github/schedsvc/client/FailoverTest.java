package io.github.schedsvc.client;

import static io.github.schedsvc.client.Requests.await;
import static io.github.schedsvc.client.Requests.codeOf;
import static io.github.schedsvc.client.Requests.failureOf;
import static io.github.schedsvc.client.Requests.nothing;
import static io.github.schedsvc.client.Requests.request;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.Leadership;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.github.schedsvc.v1.StatsRequest;
import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.Status;
import java.io.IOException;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

@Timeout(120)
class FailoverTest {
  private static final Duration SOON = Duration.ofMillis(150);

  /** The leases of the first are 1 and up, those of the others 101 and up, and 201 and up. */
  private final FakeScheduler a = new FakeScheduler(1);

  private final FakeScheduler b = new FakeScheduler(101);
  private final FakeScheduler c = new FakeScheduler(201);
  private final String both = a.target() + "," + b.target();
  private final List<Scheduler> open = new ArrayList<>();

  @AfterEach
  void close() {
    open.forEach(scheduler -> scheduler.close(Duration.ZERO));
    List.of(a, b, c).forEach(FakeScheduler::close);
  }

  private Scheduler open(Scheduler.Builder builder) {
    Scheduler scheduler = builder.build();
    open.add(scheduler);
    return scheduler;
  }

  private Scheduler open() {
    return open(Scheduler.builder(both));
  }

  private static void stats(Scheduler scheduler) throws Exception {
    Requests.stats(scheduler, CallOptions.DEFAULT);
  }

  private static Leadership led(long term, String leader) {
    return Leadership.newBuilder().setTerm(term).setLeader(leader).build();
  }

  @Test
  void callGoesToTheNextTargetIfTheFirstIsAway() throws Exception {
    a.close();
    try (Admission admission = open().admit(request())) {
      assertEquals(101, admission.grant().getLeaseId());
      await(admission.complete(nothing()));
    }
  }

  @Test
  void heldCallMovesOnWithItsRequestId() throws Exception {
    a.hangs = true;
    Scheduler scheduler = open(Scheduler.builder(both).silentAfter(Duration.ofMinutes(1)));
    CompletableFuture<Admission> admitted = scheduler.admitAsync(request());
    a.until(() -> !a.admits.isEmpty());
    a.close();
    assertEquals(101, await(admitted).grant().getLeaseId());
    assertEquals(a.admits.get(0).getRequestId(), await(admitted).requestId());
  }

  @Test
  void silentSchedulerIsLeftForTheNext() throws Exception {
    a.hangs = true;
    Admission admission = open(Scheduler.builder(both).silentAfter(SOON)).admit(request());
    assertEquals(101, admission.grant().getLeaseId());
    assertTrue(a.count("Progress") >= Calls.PROBES_MAX);
    assertEquals(1, b.count("Admit"));
    stats(open(Scheduler.builder(both).silentAfter(SOON))); // It has a deadline of its own.
    assertEquals(1, a.count("Stats"));
    assertEquals(1, b.count("Stats"));
  }

  @Test
  void heldCallStaysWithSchedulerThatAnswersProbes() throws Exception {
    a.decision =
        (asked, answer) -> {
          a.until(() -> a.count("Progress") >= 5);
          a.grant(asked, answer);
        };
    Scheduler scheduler = open(Scheduler.builder(both).silentAfter(Duration.ofMillis(900)));
    assertEquals(1, scheduler.admit(request()).grant().getLeaseId());
    assertEquals(List.of(), b.calls);
  }

  @Test
  void schedulerWhoseTermIsOverIsLeftWhileItHoldsCall() throws Exception {
    a.leadership = led(6, "a/1");
    Scheduler scheduler = open(Scheduler.builder(both).silentAfter(SOON));
    scheduler.admit(request()).close();
    synchronized (a) {
      a.decision = a::hold;
      a.leadership = led(5, "a/0");
    }
    b.leadership = led(7, "b/1");
    assertEquals(101, scheduler.admit(request()).grant().getLeaseId());
  }

  @Test
  void namedLeaderIsAskedIfItIsInTheList() throws Exception {
    a.leader = c.target();
    Scheduler scheduler = open(Scheduler.builder(both + "," + c.target()));
    stats(scheduler);
    assertEquals(List.of(), b.calls);
    assertEquals(1, c.count("Stats"));
    a.leader = "";
    c.leader = "192.0.2.1:7600";
    stats(scheduler);
    assertEquals(2, a.count("Stats"));
    assertEquals(List.of(), b.calls);
  }

  @ParameterizedTest
  @CsvSource({"4, b/1", "5, b/1", "0, ''"})
  void grantUnderStaleTermIsDropped(long term, String leader) throws Exception {
    a.leadership = led(5, "a/1");
    b.leadership = led(term, leader);
    Scheduler scheduler = open(Scheduler.builder(both).failoverWait(Duration.ofMillis(300)));
    scheduler.admit(request()).close();
    a.leader = b.target();
    CallException failure =
        assertThrows(CallException.class, () -> scheduler.admit(request()));
    assertEquals(Status.Code.UNAVAILABLE, codeOf(failure));
    assertFalse(b.admits.isEmpty());
    assertEquals("5", b.headers.get(0).get(Calls.key("schedsvc-term")));
    synchronized (b) {
      b.leadership = led(6, "b/2");
    }
    assertTrue(scheduler.admit(request()).grant().getLeaseId() >= 101);
  }

  @ParameterizedTest
  @CsvSource({"4, b/1", "5, b/1", "0, ''"})
  void stateAndEndUnderStaleTermHaveNoEffect(long term, String leader) throws Exception {
    a.ttlMs = 60;
    a.leadership = led(5, "a/1");
    b.leadership = led(term, leader);
    Scheduler scheduler = open(Scheduler.builder(both).failoverWait(Duration.ofMinutes(1)));
    Admission admission = scheduler.admit(request());
    FakeScheduler.Lease lost = new FakeScheduler.Lease(request(), admission.grant());
    lost.state = 3;
    synchronized (b) {
      b.leases.put(1L, lost);
    }
    synchronized (a) {
      a.leader = b.target();
    }
    b.until(() -> lost.reports.size() >= 2);
    assertFalse(admission.lost().isDone());
    CompletableFuture<CompleteResponse> books = admission.complete(nothing());
    b.until(() -> lost.ends.size() >= 2);
    assertFalse(books.isDone());
    synchronized (a) {
      assertEquals(List.of(), a.leases.get(1L).ends);
      a.leader = "";
    }
    assertEquals("a/1", await(books).getLeadership().getLeader());
    assertEquals(1, a.leases.get(1L).ends.size());
  }

  @Test
  void answerAboutTheCallerIsFinal() {
    a.fail("Stats", Status.Code.UNAUTHENTICATED, 1);
    Scheduler scheduler = open();
    Throwable failure = assertThrows(ExecutionException.class, () -> stats(scheduler));
    assertEquals(Status.Code.UNAUTHENTICATED, codeOf(failure));
    assertEquals(List.of(), b.calls);
  }

  @Test
  void retriesEndWithTheDeadline() {
    a.close();
    b.close();
    Scheduler scheduler = open(Scheduler.builder(both).failoverWait(Duration.ofHours(1)));
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(300, TimeUnit.MILLISECONDS);
    assertThrows(ExecutionException.class, () -> Requests.stats(scheduler, options));
  }

  @Test
  void retriesEndWithTheirContext() throws Exception {
    a.close();
    b.close();
    Scheduler scheduler = open(Scheduler.builder(both).failoverWait(Duration.ofHours(1)));
    for (int i = 0; i < 20; i++) {
      Context.CancellableContext context = Context.current().withCancellation();
      CompletableFuture<?> waiting =
          context.call(
              () ->
                  scheduler.call(
                      SchedulerServiceGrpc.getStatsMethod(),
                      StatsRequest.getDefaultInstance(),
                      CallOptions.DEFAULT));
      Thread.sleep(5 * i);
      context.cancel(null);
      assertEquals(Status.Code.CANCELLED, codeOf(failureOf(waiting)));
    }
  }

  @Test
  void withdrawnRequestIsNotAskedElsewhere() throws Exception {
    a.decision = a::hold;
    CompletableFuture<Admission> waiting = open().admitAsync(request());
    a.until(() -> !a.admits.isEmpty());
    waiting.cancel(true);
    a.until(() -> a.withdrawn.size() == 1 && a.count("Explain") == 1);
    assertEquals(List.of(), b.calls);
  }

  @Test
  void lostConnectionIsTriedAgainSoon() throws Exception {
    // gRPC alone pauses for up to 2 min. This one is called a hundred times in about 12 s.
    try (ServerSocket away = new ServerSocket(0)) {
      AtomicInteger connections = new AtomicInteger();
      CompletableFuture<Void> accepting =
          CompletableFuture.runAsync(
              () -> {
                try {
                  while (true) {
                    away.accept().close();
                    connections.incrementAndGet();
                  }
                } catch (IOException e) {
                  return; // The test is over.
                }
              });
      Scheduler scheduler = open(Scheduler.builder("127.0.0.1:" + away.getLocalPort()));
      for (int i = 0; connections.get() < 8; i++) {
        assertTrue(i < 100, connections + " connections in 100 calls");
        assertThrows(Exception.class, () -> stats(scheduler));
        Thread.sleep(120);
      }
      away.close();
      await(accepting);
    }
  }

  @ParameterizedTest
  @CsvSource(
      delimiter = '|',
      value = {
        "'a:1,'       | target \"\" of \"a:1,\" is empty or listed twice",
        "'a:1,b:2,a:1' | target \"a:1\" of \"a:1,b:2,a:1\" is empty or listed twice",
        "'a:0,a:1,a:2,a:3,a:4,a:5,a:6,a:7,a:8,a:9,b:0,b:1,b:2,b:3,b:4,b:5,b:6'"
            + " | 17 targets are listed; list at most 16",
      })
  void listIsChecked(String list, String complaint) {
    Exception failure =
        assertThrows(IllegalArgumentException.class, () -> Scheduler.builder(list));
    assertEquals(complaint, failure.getMessage());
  }
}
