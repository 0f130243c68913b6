package io.github.schedsvc.client;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.github.schedsvc.v1.Leadership;
import io.github.schedsvc.v1.ProgressRequest;
import io.github.schedsvc.v1.ProgressResponse;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.EnumSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;

/**
 * Makes unary calls. With several targets it asks one after the other, until the deadline of the
 * call, and for at most a set time without one that leads.
 */
final class FailoverChannel extends Channel {
  /** After this number of unanswered probes in a row a scheduler that holds a call is silent. */
  static final int PROBES_MAX = 3;

  /** Bounds a call of this client's own, such as one attempt to end a lease. */
  private static final Duration OWN_DEADLINE = Duration.ofSeconds(5);

  /** A lost connection is tried again after this time; gRPC alone would wait for up to 2 min. */
  private static final long RECONNECT_NANOS = TimeUnit.MILLISECONDS.toNanos(100);

  private static final Metadata.Key<String> AUTHORIZATION = key("authorization");
  private static final Metadata.Key<String> TERM = key("schedsvc-term");
  private static final Metadata.Key<String> LEADER = key("schedsvc-leader");
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
  private final Targets.Fence fence;
  private final String token;
  private final Duration failoverWait;
  private final Duration silentAfter;
  private final Map<String, Link> links = new LinkedHashMap<>();
  private volatile boolean isClosed;

  FailoverChannel(Scheduler.Builder options) {
    this.targets = options.targets;
    this.fence = Targets.Fence.of(targets.all);
    this.token = options.token;
    this.failoverWait = options.failoverWait;
    this.silentAfter = options.silentAfter;
    for (String target : targets.all) {
      links.put(target, new Link(target, () -> options.connect(target)));
    }
    if (targets.several()) {
      probe();
    }
  }

  static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
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
  <Q, R> CompletableFuture<R> ask(MethodDescriptor<Q, R> method, Q request) {
    Call<Q, R> call = new Call<>(method, within(OWN_DEADLINE), Context.current().fork());
    return send(call, request, new CompletableFuture<>());
  }

  /**
   * Makes a unary call, which fails with a {@link CallException}. The executor of the call runs
   * each function that waits for the answer already: a blocking stub listens to that one alone.
   */
  static <Q, R> CompletableFuture<R> send(
      ClientCall<Q, R> call, Q request, CompletableFuture<R> answer) {
    ClientCalls.asyncUnaryCall(
        call,
        request,
        new StreamObserver<R>() {
          private R message;

          @Override
          public void onNext(R response) {
            message = response;
          }

          @Override
          public void onError(Throwable failure) {
            answer.completeExceptionally(CallException.of(failure));
          }

          @Override
          public void onCompleted() {
            answer.complete(message);
          }
        });
    return answer;
  }

  /**
   * Runs work later, also if this is closed then: it finds the channel closed. All of the JVM's
   * delays share the thread, so the work must not wait.
   */
  static void after(Duration pause, Runnable work) {
    CompletableFuture.delayedExecutor(pause.toNanos(), TimeUnit.NANOSECONDS, Runnable::run)
        .execute(work);
  }

  private static CallOptions within(Duration time) {
    return CallOptions.DEFAULT.withDeadlineAfter(time.toNanos(), TimeUnit.NANOSECONDS);
  }

  boolean isClosed() {
    return isClosed;
  }

  void close() {
    isClosed = true;
    links.values().forEach(Link::close);
  }

  private void probe() {
    if (!isClosed) {
      Duration step = silentAfter.dividedBy(PROBES_MAX);
      links.values().forEach(link -> link.probe(step));
      after(step, this::probe);
    }
  }

  private static boolean isLate(Status status) {
    return status.getCode() == Status.Code.DEADLINE_EXCEEDED;
  }

  /** Is one call, whose attempts follow each other. */
  private final class Call<Q, R> extends ClientCall<Q, R> {
    private final MethodDescriptor<Q, R> method;
    private final CallOptions options;
    private final Context caller;
    /** Is that of the attempts: its cancellation ends them, by gRPC. */
    private final Context.CancellableContext context;
    private final boolean isHeld;
    private long awaySince;
    private Listener<R> listener;
    private Metadata headers;
    private Q message;
    private boolean hasBegun;

    Call(MethodDescriptor<Q, R> method, CallOptions options, Context caller) {
      this.method = method;
      this.options = options;
      this.caller = caller;
      this.context = caller.withCancellation();
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
        context.run(this::ask);
      }
    }

    @Override
    public synchronized void cancel(String why, Throwable cause) {
      context.cancel(
          Status.CANCELLED.withDescription(why).withCause(cause).asRuntimeException());
      if (listener != null) {
        halfClose(); // If it was not sent, it ends without being sent.
      }
    }

    private void ask() {
      Link link = links.get(targets.ask());
      long began = System.nanoTime();
      CallOptions bounded = options;
      if (isHeld) {
        link.held.incrementAndGet();
      } else if (targets.several()) {
        Deadline silent = Deadline.after(silentAfter.toNanos(), TimeUnit.NANOSECONDS);
        Deadline last = options.getDeadline();
        bounded = options.withDeadline(last == null ? silent : silent.minimum(last));
      }
      CompletableFuture<R> answer = new CompletableFuture<>();
      answer.whenComplete((found, failure) -> ended(link, began, found, failure));
      send(link.newCall(method, bounded, headers), message, answer);
    }

    private void ended(Link link, long began, R answer, Throwable failure) {
      if (isHeld) {
        link.held.decrementAndGet();
      }
      Status status = link.status(answer, failure);
      Metadata trailers = failure == null ? new Metadata() : Status.trailersFromThrowable(failure);
      if (status.isOk()) {
        targets.answered();
      } else if (goesOn(link, began, status, trailers)) {
        return;
      }
      // The end of this call's context is none of the listener's.
      caller.run(
          () -> {
            if (status.isOk()) {
              listener.onHeaders(new Metadata());
              listener.onMessage(answer);
            }
            listener.onClose(status, trailers);
          });
      context.close();
    }

    /** Moves on to the next target, if that can help, and returns whether it does. */
    private boolean goesOn(Link link, long began, Status status, Metadata trailers) {
      Deadline deadline = options.getDeadline();
      if (!targets.several()
          || OF_CALLER.contains(status.getCode())
          || context.isCancelled()
          || isClosed
          || (deadline != null && deadline.isExpired())) {
        return false;
      }
      long now = System.nanoTime();
      if (now - began > failoverWait.toNanos()) { // It was held by one that answered until then.
        awaySince = now;
      }
      Duration silent = isLate(status) ? silentAfter : Duration.ZERO;
      Duration pauseMax = targets.moveOn(link.target, trailers.get(LEADER), now, silent);
      if (now - awaySince > failoverWait.toNanos()) {
        return false;
      }
      Duration pause = Duration.ofNanos(ThreadLocalRandom.current().nextLong(pauseMax.toNanos()));
      after(pause, context.wrap(this::ask));
      return true;
    }
  }

  /** Is the connection to one scheduler, which all calls share. */
  private final class Link {
    final String target;
    /** The number of Admits that it holds. */
    final AtomicInteger held = new AtomicInteger();

    private final Supplier<ManagedChannel> connect;
    /** The number of unanswered probes in a row. */
    private final AtomicInteger missed = new AtomicInteger();

    private ManagedChannel channel;
    private long triedAt;

    Link(String target, Supplier<ManagedChannel> connect) {
      this.target = target;
      this.connect = connect;
      this.channel = connect.get();
    }

    /** Returns a call with the credentials of this client, and the latest term that it knows. */
    <Q, R> ClientCall<Q, R> newCall(
        MethodDescriptor<Q, R> method, CallOptions options, Metadata headers) {
      Metadata sent = new Metadata();
      sent.merge(headers);
      if (token != null) {
        sent.put(AUTHORIZATION, "Bearer " + token);
      }
      if (fence.latest() != 0) {
        sent.put(TERM, Long.toUnsignedString(fence.latest()));
      }
      return MetadataUtils.newAttachHeadersInterceptor(sent)
          .interceptCall(method, options, ready());
    }

    /**
     * Returns how an attempt has ended. An answer of a scheduler that leads no more is dropped: its
     * status is UNAVAILABLE.
     */
    Status status(Object answer, Throwable failure) {
      if (failure != null) {
        return Status.fromThrowable(failure);
      }
      Message message = (Message) answer;
      FieldDescriptor field = message.getDescriptorForType().findFieldByName("leadership");
      if (field == null || fence.obeys((Leadership) message.getField(field))) {
        return Status.OK;
      }
      return Status.UNAVAILABLE.withDescription(
          target + " answers under a term that is over: " + message.getField(field));
    }

    /**
     * Asks for a sign of life while it holds calls, and hangs up if there is none. Each probe has
     * its own deadline, so a process that stood still loses one probe at most.
     */
    void probe(Duration step) {
      if (held.get() == 0) {
        missed.set(0);
        return;
      }
      send(
              newCall(SchedulerServiceGrpc.getProgressMethod(), within(step), new Metadata()),
              ProgressRequest.getDefaultInstance(),
              new CompletableFuture<ProgressResponse>())
          .whenComplete(
              (answer, failure) -> {
                Status status = status(answer, failure);
                boolean isMissed = isLate(status) || (failure == null && !status.isOk());
                if (missed.updateAndGet(many -> isMissed ? many + 1 : 0) == PROBES_MAX) {
                  targets.moveOn(target, "", System.nanoTime(), silentAfter);
                  hangUp();
                }
              });
    }

    /** Ends the calls; the next one connects again, unless this is closed. */
    private synchronized void hangUp() {
      missed.set(0);
      if (!channel.isShutdown()) {
        channel.shutdownNow();
        channel = connect.get();
      }
    }

    synchronized void close() {
      channel.shutdownNow();
    }

    private synchronized ManagedChannel ready() {
      long now = System.nanoTime();
      if (now - triedAt > RECONNECT_NANOS
          && channel.getState(false) == ConnectivityState.TRANSIENT_FAILURE) {
        triedAt = now;
        channel.resetConnectBackoff();
      }
      return channel;
    }
  }
}
