package io.github.schedsvc.client;

import java.time.Duration;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/** Runs what is due later, in one thread that no work blocks. */
final class Timer {
  private final ScheduledThreadPoolExecutor executor =
      new ScheduledThreadPoolExecutor(
          1,
          work -> {
            Thread thread = new Thread(work, "schedsvc-timer");
            thread.setDaemon(true);
            return thread;
          });

  /** Returns whether the work will run: not after close. */
  boolean after(Duration pause, Runnable work) {
    try {
      executor.schedule(work, pause.toNanos(), TimeUnit.NANOSECONDS);
      return true;
    } catch (RejectedExecutionException e) {
      return false;
    }
  }

  void close() {
    executor.shutdown(); // Paused work runs, and finds the channel closed.
  }
}
