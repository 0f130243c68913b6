package io.github.schedsvc.client.tool;

import com.google.gson.Gson;
import io.github.schedsvc.client.Admission;
import io.github.schedsvc.client.Scheduler;
import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.LeaseState;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.IntPredicate;

/**
 * Sends requests to a live scheduler: cancels TARGET SEED, or kill TARGETS. It prints what became
 * of them.
 */
public final class Load {
  private static final int AT_ONCE = 32;
  private static final int CANCELLED = 1_000;
  private static final AdmitRequest REQUEST =
      AdmitRequest.newBuilder()
          .setTenant("red")
          .addInputTokens(100)
          .setMaxOutputTokens(20)
          .setReportsProgress(true)
          .build();

  private final Scheduler scheduler;
  private final AtomicInteger withdrawn = new AtomicInteger();
  private final AtomicInteger ran = new AtomicInteger();
  private final AtomicInteger served = new AtomicInteger();
  private final List<String> failed = new CopyOnWriteArrayList<>();

  private Load(Scheduler scheduler) {
    this.scheduler = scheduler;
  }

  /** Sends requests. */
  public static void main(String[] arguments) throws IOException, InterruptedException {
    if (arguments.length < 2) {
      System.err.println("usage: Load cancels TARGET SEED, or Load kill TARGETS");
      System.exit(2);
    }
    Load load;
    boolean isDone;
    Duration electing = Duration.ofMinutes(1); // A busy machine takes long to elect a leader.
    try (Scheduler scheduler =
        Dialing.builder(arguments[1]).failoverWait(electing).build()) {
      load = new Load(scheduler);
      if (arguments[0].equals("kill")) {
        load.kill();
      } else {
        load.cancels(Long.parseLong(arguments[2]));
      }
      isDone = scheduler.close(Duration.ofMinutes(1));
    }
    Map<String, Object> counts =
        Map.of(
            "withdrawn", load.withdrawn,
            "ran", load.ran,
            "served", load.served,
            "failed", load.failed);
    System.out.println(new Gson().toJson(counts));
    System.exit(isDone ? 0 : 1);
  }

  /** Waits for a request's turn, and works for a time unless the lease is lost. */
  private void serve(Callable<Admission> turn, double work, Runnable granted) throws Exception {
    try (Admission admission = turn.call()) {
      granted.run();
      admission.report(LeaseProgress.newBuilder().setInputTokens(100).setOutputTokens(5).build());
      try {
        LeaseState lost = admission.lost().get((long) (10_000 * work), TimeUnit.MICROSECONDS);
        throw new IllegalStateException("the lease is " + lost);
      } catch (TimeoutException e) {
        // A lease whose leader was killed is unknown to the next one; the request was served.
        admission.complete(LeaseProgress.getDefaultInstance());
      }
    }
  }

  /** Withdraws 1,000 requests, each after a random time: it waits, starts or runs. */
  private void cancels(long seed) throws InterruptedException {
    double[] draw = new Random(seed).doubles(3 * CANCELLED).toArray();
    // How long a request takes here, if it is not withdrawn, once the code is compiled.
    double measured = 0;
    for (int round = 0; round < 5; round++) {
      long began = System.nanoTime();
      loops(4 * AT_ONCE, i -> ask(() -> serve(() -> scheduler.admit(REQUEST), draw[i], () -> {})));
      measured = (System.nanoTime() - began) / 4.0;
    }
    AtomicLong usualNanos = new AtomicLong((long) measured);
    served.set(0);
    ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
    loops(
        CANCELLED,
        i -> {
          Withdrawal withdrawal = new Withdrawal(draw[3 * i] < 0.5);
          // The client keeps a quarter of its requests. It measures by their times how long a
          // request takes now, because this changes with the load of the machine.
          boolean stays = draw[3 * i + 1] < 0.25;
          if (!stays) {
            long after = (long) (2 * usualNanos.get() * (draw[3 * i + 1] - 0.25) / 0.75);
            timer.schedule(withdrawal, after, TimeUnit.NANOSECONDS);
          }
          long began = System.nanoTime();
          ask(
              () -> {
                serve(withdrawal::turn, draw[3 * i + 2], ran::incrementAndGet);
                if (stays) {
                  long took = System.nanoTime() - began;
                  usualNanos.updateAndGet(usual -> (7 * usual + took) / 8);
                }
              });
          withdrawal.close();
          return true;
        });
    timer.shutdownNow();
  }

  /** Withdraws a request by its future, or by an interrupt of the thread that asked. */
  private final class Withdrawal implements Runnable {
    private final Thread worker = Thread.currentThread();
    private final CompletableFuture<Admission> admitted;
    private boolean isOver;

    Withdrawal(boolean byFuture) {
      admitted = byFuture ? scheduler.admitAsync(REQUEST) : null;
    }

    Admission turn() throws Exception {
      return admitted == null ? scheduler.admit(REQUEST) : admitted.get();
    }

    @Override
    public synchronized void run() {
      if (!isOver && (admitted == null || !admitted.cancel(true))) {
        worker.interrupt();
      }
    }

    synchronized void close() {
      isOver = true;
      Thread.interrupted();
    }
  }

  /** Asks without a pause until a line arrives or a request fails; prints how many were served. */
  private void kill() throws InterruptedException {
    CompletableFuture<Void> stop =
        CompletableFuture.runAsync(
            () -> {
              try {
                System.in.read();
              } catch (IOException e) {
                failed.add(e.toString());
              }
            });
    loops(
        Integer.MAX_VALUE,
        i -> {
          ask(() -> serve(() -> scheduler.admit(REQUEST), 2, () -> {}));
          return !stop.isDone() && failed.isEmpty();
        });
  }

  /** Does one request, and counts what became of it. */
  private boolean ask(Work work) {
    try {
      work.run();
      int count = served.incrementAndGet();
      if (count % 100 == 0) {
        System.out.println(count);
      }
    } catch (InterruptedException | CancellationException e) {
      withdrawn.incrementAndGet();
    } catch (Exception e) {
      failed.add(e.toString());
    }
    return true;
  }

  /** Runs work for each number below a count while it returns true, AT_ONCE at a time. */
  private static void loops(int count, IntPredicate work) throws InterruptedException {
    AtomicInteger next = new AtomicInteger();
    ExecutorService threads = Executors.newFixedThreadPool(AT_ONCE);
    for (int n = 0; n < AT_ONCE; n++) {
      threads.execute(
          () -> {
            int i = next.getAndIncrement();
            while (i < count && work.test(i)) {
              i = next.getAndIncrement();
            }
          });
    }
    threads.shutdown();
    threads.awaitTermination(1, TimeUnit.HOURS);
  }

  private interface Work {
    void run() throws Exception;
  }
}
