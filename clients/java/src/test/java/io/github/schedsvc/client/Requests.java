package io.github.schedsvc.client;

import static org.junit.jupiter.api.Assertions.assertThrows;

import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.github.schedsvc.v1.StatsRequest;
import io.github.schedsvc.v1.StatsResponse;
import io.grpc.CallOptions;
import io.grpc.Status;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;

/** Makes requests of tests, and waits for what becomes of them. */
final class Requests {
  private Requests() {}

  static AdmitRequest request() {
    return AdmitRequest.newBuilder()
        .setTenant("red")
        .addInputTokens(100)
        .setMaxOutputTokens(20)
        .build();
  }

  /** Returns the totals of no token that is known. */
  static LeaseProgress nothing() {
    return LeaseProgress.getDefaultInstance();
  }

  static LeaseProgress input(long tokens, long cachedTokens) {
    return LeaseProgress.newBuilder()
        .setInputTokens(tokens)
        .setCachedInputTokens(cachedTokens)
        .build();
  }

  static LeaseProgress output(long tokens) {
    return LeaseProgress.newBuilder().setOutputTokens(tokens).build();
  }

  static StatsResponse stats(Scheduler scheduler, CallOptions options) throws Exception {
    StatsRequest request = StatsRequest.getDefaultInstance();
    return await(scheduler.call(SchedulerServiceGrpc.getStatsMethod(), request, options));
  }

  static <T> T await(CompletableFuture<T> future) throws Exception {
    return future.get(1, TimeUnit.MINUTES);
  }

  /** Returns why a future fails. */
  static Throwable failureOf(CompletableFuture<?> future) {
    return assertThrows(ExecutionException.class, () -> await(future)).getCause();
  }

  static Status.Code codeOf(Throwable failure) {
    return Status.fromThrowable(failure).getCode();
  }
}
