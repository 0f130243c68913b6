package io.github.schedsvc.client;

import static org.junit.jupiter.api.Assertions.assertThrows;

import io.github.schedsvc.v1.AdmitRequest;
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
