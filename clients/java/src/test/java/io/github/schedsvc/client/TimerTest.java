package io.github.schedsvc.client;

import static io.github.schedsvc.client.Requests.await;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(120)
class TimerTest {
  /** Else the future of an end that pauses would never be done. */
  @Test
  void whatPausesGoesOnAfterClose() throws Exception {
    Timer timer = new Timer();
    CompletableFuture<Boolean> isOpen = new CompletableFuture<>();
    assertTrue(
        timer.after(
            Duration.ofMillis(100),
            () -> isOpen.complete(timer.after(Duration.ZERO, () -> {}))));
    timer.close();
    assertFalse(await(isOpen));
  }
}
