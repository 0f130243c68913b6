package io.github.schedsvc.client;

import io.github.schedsvc.v1.ProgressRequest;
import io.github.schedsvc.v1.ProgressResponse;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.EnumSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * Makes unary calls. With several targets it asks one after the other, until the deadline of the
 * call, and for at most a set time without one that leads.
 */
final class FailoverChannel extends Channel {
  /** After this number of unanswered probes in a row a scheduler that holds a call is silent. */
  static final int PROBES_MAX = 3;

  private static final Metadata.Key<String> LEADER = Link.key("schedsvc-leader");
  /** Every scheduler would answer so. */
  private static final Set<Status.Code> OF_CALLER =
      EnumSet.of(
          Status.Code.INVALID_ARGUMENT,
          Status.Code.OUT_OF_RANGE,
          Status.Code.ALREADY_EXISTS,
          Status.Code.NOT_FOUND,
          Status.Code.UNAUTHENTICATED,
          Status.Code.PERMISSION_DENIED,
          Status.Code.RESOURCE_EXHAUSTED);

  private final Targets targets;
  private final Timer timer;
  private final Duration failoverWait;
  private final Duration silentAfter;
  private final Map<String, Link> links = new LinkedHashMap<>();

  FailoverChannel(Scheduler.Builder options, Timer timer) {
    this.targets = options.targets;
    this.timer = timer;
    this.failoverWait = options.failoverWait;
    this.silentAfter = options.silentAfter;
    targets.all().forEach(target -> links.put(target, new Link(target, options)));
    if (targets.several()) {
      probeLater();
    }
  }

  @Override
  public String authority() {
    return targets.ask();
  }

  @Override
  public <Q, R> ClientCall<Q, R> newCall(MethodDescriptor<Q, R> method, CallOptions options) {
    if (method.getType() != MethodDescriptor.MethodType.UNARY) {
      throw Status.UNIMPLEMENTED.withDescription("only unary calls are made").asRuntimeException();
    }
    return new Call<>(method, options, Context.current());
  }

  /** Makes a call of this client's own, which no context of a caller cancels. */
  <Q, R> CompletableFuture<R> ask(MethodDescriptor<Q, R> method, Q request, CallOptions options) {
    return Link.start(
        new Call<>(method, options, Context.current().fork()), request, new CompletableFuture<>());
  }

  void close() {
    links.values().forEach(Link::close);
  }

  private void probeLater() {
    Runnable probes =
        () -> {
          links.values().forEach(this::probe);
          probeLater();
        };
    timer.after(silentAfter.dividedBy(PROBES_MAX), probes);
  }

  /**
   * Asks a scheduler for a sign of life while it holds calls, and hangs up if there is none. Each
   * probe has its own deadline, so a process that stood still loses one probe at most.
   */
  private void probe(Link link) {
    if (link.held.get() == 0) {
      link.missed.set(0);
      return;
    }
    long step = silentAfter.toNanos() / PROBES_MAX;
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(step, TimeUnit.NANOSECONDS);
    Link.start(
            link.newCall(SchedulerServiceGrpc.getProgressMethod(), options, new Metadata()),
            ProgressRequest.getDefaultInstance(),
            new CompletableFuture<ProgressResponse>())
        .whenComplete(
            (answer, failure) -> {
              boolean isSilent =
                  failure == null
                      ? !link.check(answer).isOk()
                      : isLate(Status.fromThrowable(failure));
              if (!isSilent) {
                link.missed.set(0);
              } else if (link.missed.incrementAndGet() == PROBES_MAX) {
                targets.moveOn(link.target, "", System.nanoTime(), silentAfter);
                link.hangUp();
                link.missed.set(0);
              }
            });
  }

  private static boolean isLate(Status status) {
    return status.getCode() == Status.Code.DEADLINE_EXCEEDED;
  }

  private static Deadline earlier(Deadline one, Deadline other) {
    return one == null || (other != null && other.isBefore(one)) ? other : one;
  }

  /** Is one call, whose attempts follow each other. */
  private final class Call<Q, R> extends ClientCall<Q, R> {
    private final MethodDescriptor<Q, R> method;
    private final CallOptions options;
    private final Context context;
    private final boolean isHeld;
    private long awaySince;
    private Listener<R> listener;
    private Metadata headers;
    private Q message;
    private ClientCall<Q, R> attempt;
    private boolean hasBegun;
    private boolean isCancelled;

    Call(MethodDescriptor<Q, R> method, CallOptions options, Context context) {
      this.method = method;
      this.options = options;
      this.context = context;
      // An Admit may be held for long, so it is watched. Others are answered at once.
      String name = SchedulerServiceGrpc.getAdmitMethod().getFullMethodName();
      this.isHeld = method.getFullMethodName().equals(name);
    }

    @Override
    public void start(Listener<R> listener, Metadata headers) {
      this.listener = listener;
      this.headers = headers;
    }

    @Override
    public void request(int count) {} // The only answer comes at once.

    @Override
    public void sendMessage(Q message) {
      this.message = message;
    }

    @Override
    public synchronized void halfClose() {
      if (!hasBegun) {
        hasBegun = true;
        awaySince = System.nanoTime();
        ask();
      }
    }

    @Override
    public synchronized void cancel(String why, Throwable cause) {
      isCancelled = true;
      if (attempt != null) {
        attempt.cancel(why, cause);
      } else if (listener != null) {
        halfClose(); // It ends without being sent.
      }
    }

    private void ask() {
      context.run(() -> ask(links.get(targets.ask()), System.nanoTime()));
    }

    private synchronized void ask(Link link, long began) {
      if (isCancelled) {
        Status status = Status.CANCELLED.withDescription("it was withdrawn");
        Executor executor = options.getExecutor() == null ? Runnable::run : options.getExecutor();
        executor.execute(() -> listener.onClose(status, new Metadata()));
        return;
      }
      CallOptions bounded = options;
      if (isHeld) {
        link.held.incrementAndGet();
      } else if (targets.several()) {
        Deadline silent = Deadline.after(silentAfter.toNanos(), TimeUnit.NANOSECONDS);
        bounded = options.withDeadline(earlier(options.getDeadline(), silent));
      }
      attempt = link.newCall(method, bounded, headers);
      CompletableFuture<R> answer = new CompletableFuture<>();
      answer.whenComplete((found, failure) -> ended(link, began, found, failure));
      Link.start(attempt, message, answer);
    }

    private void ended(Link link, long began, R answer, Throwable failure) {
      if (isHeld) {
        link.held.decrementAndGet();
      }
      Status status = failure == null ? link.check(answer) : Status.fromThrowable(failure);
      Metadata trailers = new Metadata();
      if (failure != null && Status.trailersFromThrowable(failure) != null) {
        trailers.merge(Status.trailersFromThrowable(failure));
      }
      if (status.isOk()) {
        targets.answered();
        listener.onHeaders(new Metadata());
        listener.onMessage(answer);
      } else if (goesOn(link, began, status, trailers)) {
        return;
      }
      listener.onClose(status, trailers);
    }

    /** Moves on to the next target, if that can help, and returns whether it does. */
    private boolean goesOn(Link link, long began, Status status, Metadata trailers) {
      Deadline deadline = earlier(options.getDeadline(), context.getDeadline());
      synchronized (this) {
        if (!targets.several()
            || OF_CALLER.contains(status.getCode())
            || isCancelled
            || context.isCancelled()
            || (deadline != null && deadline.isExpired())) {
          return false;
        }
      }
      long now = System.nanoTime();
      if (now - began > failoverWait.toNanos()) { // It was held by one that answered until then.
        awaySince = now;
      }
      String leader = trailers.get(LEADER);
      Duration pauseMax =
          targets.moveOn(
              link.target,
              leader == null ? "" : leader,
              now,
              isLate(status) ? silentAfter : Duration.ZERO);
      Duration pause = Duration.ofNanos(ThreadLocalRandom.current().nextLong(pauseMax.toNanos()));
      return now - awaySince <= failoverWait.toNanos() && timer.after(pause, this::ask);
    }
  }
}
