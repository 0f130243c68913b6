package io.github.schedsvc.client;

import com.google.protobuf.Descriptors.Descriptor;
import io.github.schedsvc.v1.AdmitResponse;
import io.github.schedsvc.v1.CompleteRequest;
import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.Grant;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.LeaseState;
import io.github.schedsvc.v1.LeaseStatus;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.ProgressRequest;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import java.time.Duration;
import java.util.EnumSet;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/** Is a granted request. It is renewed in the background until it ends. */
public final class Admission implements AutoCloseable {
  /** The most of any total: a scheduler refuses the whole report otherwise. */
  private static final long TOKENS_MAX = 1 << 27;

  private static final long END_BACKOFF_MIN_MS = 50;
  private static final long END_BACKOFF_MAX_MS = 2_000;
  /** The time for which the scheduler keeps an expired lease: past it no end is repeated. */
  private static final long LEASE_GRACE_MS = 20_000;
  /** How long close waits for an end that has to be repeated. */
  private static final Duration CLOSE_WAIT = Duration.ofSeconds(1);

  /** A state of a later version of the contract is no reason to stop. */
  private static final Set<LeaseState> LOST =
      EnumSet.of(
          LeaseState.LEASE_STATE_UNKNOWN,
          LeaseState.LEASE_STATE_VOID,
          LeaseState.LEASE_STATE_ENDED);

  private final Scheduler scheduler;
  private final String requestId;
  private final AdmitResponse response;
  private final CompletableFuture<LeaseState> lost = new CompletableFuture<>();
  private final CompletableFuture<CompleteResponse> books = new CompletableFuture<>();
  /** The lease, and what is known of its totals. */
  private final LeaseProgress.Builder report;

  private volatile boolean hasEnded;

  Admission(Scheduler scheduler, String requestId, AdmitResponse response) {
    this.scheduler = scheduler;
    this.requestId = requestId;
    this.response = response;
    this.report =
        LeaseProgress.newBuilder()
            .setLeaseId(grant().getLeaseId())
            .setPoolEpoch(grant().getPoolEpoch());
    scheduler.begin(books, () -> cancel(LeaseProgress.getDefaultInstance()));
    Calls.after(renewalPause(), this::renew);
  }

  /** Returns the id by which Explain knows the request. */
  public String requestId() {
    return requestId;
  }

  /** Returns the grant: the lease, its pool, and what is reserved. */
  public Grant grant() {
    return response.getGrant();
  }

  /** Returns the time from the request's arrival to its grant. */
  public Duration queueDuration() {
    return Duration.ofNanos(1_000 * response.getQueueDurationUs());
  }

  /**
   * Returns a future that is done, with the reason, when the scheduler no longer knows the lease as
   * live. Stop the engine's work then. An end of the admission does not complete it.
   */
  public CompletableFuture<LeaseState> lost() {
    return lost.copy();
  }

  /**
   * Notes running totals, never differences. One that is not set is not known. One beyond the
   * limits of the contract is brought within them. They are sent with the next renewal and with the
   * end, so it costs nothing to call it for every token.
   */
  public synchronized void report(LeaseProgress totals) {
    totals
        .getAllFields()
        .forEach(
            (field, total) -> {
              if (field.hasPresence()) { // It is a total: the lease is not the caller's to name.
                report.setField(field, Math.max(0, Math.min((Long) total, TOKENS_MAX)));
              }
            });
  }

  /**
   * Ends the lease as done. The first end counts: after another one the future has the books of
   * that one.
   *
   * @return what was charged, when the scheduler knows of the end; the client repeats the end
   *     until the lease has surely expired
   */
  public CompletableFuture<CompleteResponse> complete(LeaseProgress totals) {
    return end(Outcome.OUTCOME_COMPLETED, totals);
  }

  /**
   * Ends the lease before it was done, as {@link #complete} does. Without totals the request is
   * charged for its time.
   */
  public CompletableFuture<CompleteResponse> cancel(LeaseProgress totals) {
    return end(Outcome.OUTCOME_CANCELLED, totals);
  }

  /** Cancels a lease whose request the engine never had. It costs nothing. */
  public synchronized CompletableFuture<CompleteResponse> giveBack() {
    report.setInputTokens(0).setCachedInputTokens(0).setOutputTokens(0);
    return end(Outcome.OUTCOME_CANCELLED, LeaseProgress.getDefaultInstance());
  }

  /**
   * Cancels the lease if it has not ended, and waits until the scheduler knows of the end. If the
   * scheduler is away, it waits for a second at most, and the rest goes on behind it. An end that
   * fails is seen in the future of that end only.
   */
  @Override
  public void close() {
    Scheduler.await(cancel(LeaseProgress.getDefaultInstance()), CLOSE_WAIT);
  }

  /** Begins to end the lease, if that has not begun. */
  private synchronized CompletableFuture<CompleteResponse> end(
      Outcome outcome, LeaseProgress totals) {
    if (!hasEnded) {
      hasEnded = true;
      report(totals);
      CompleteRequest.Builder request = CompleteRequest.newBuilder().setOutcome(outcome);
      Descriptor fields = CompleteRequest.getDescriptor();
      report
          .getAllFields()
          .forEach((of, value) -> request.setField(fields.findFieldByName(of.getName()), value));
      long patience = TimeUnit.MILLISECONDS.toNanos(grant().getTtlMs() + LEASE_GRACE_MS);
      deliver(request.build(), System.nanoTime() + patience, END_BACKOFF_MIN_MS);
    }
    return books.copy();
  }

  /** Repeats the end until the scheduler has it, or the lease has surely expired. */
  private void deliver(CompleteRequest request, long expiry, long backoffMs) {
    scheduler
        .calls
        .ask(SchedulerServiceGrpc.getCompleteMethod(), request)
        .whenComplete(
            (found, failure) -> {
              if (failure == null) {
                books.complete(found);
              } else if (!CallException.of(failure).isPassing()
                  || System.nanoTime() - expiry > 0
                  || scheduler.calls.isClosed) {
                books.completeExceptionally(failure);
              } else {
                long most = Math.min(backoffMs, END_BACKOFF_MAX_MS);
                long pauseMs = ThreadLocalRandom.current().nextLong(most / 2, most + 1);
                Calls.after(
                    Duration.ofMillis(pauseMs), () -> deliver(request, expiry, 2 * most));
              }
            });
  }

  /** Returns a third of the TTL, so that two renewals may be lost before the lease is. */
  private Duration renewalPause() {
    return Duration.ofMillis(grant().getTtlMs() / 3);
  }

  /** Reports the totals, and goes on until the lease has ended or is lost. */
  private void renew() {
    ProgressRequest request;
    synchronized (this) {
      if (hasEnded || lost.isDone()) {
        return;
      }
      request = ProgressRequest.newBuilder().addLeases(report).build();
    }
    scheduler
        .calls
        .ask(SchedulerServiceGrpc.getProgressMethod(), request)
        .whenComplete(
            (found, failure) -> {
              if (failure == null) {
                found.getLeasesList().forEach(this::obey);
              }
              Duration pause = failure == null ? renewalPause() : renewalPause().dividedBy(8);
              Calls.after(pause, this::renew);
            });
  }

  private void obey(LeaseStatus found) {
    if (!hasEnded && LOST.contains(found.getState())) {
      lost.complete(found.getState());
    }
  }
}
