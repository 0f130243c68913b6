package io.github.schedsvc.client;

import com.google.common.util.concurrent.Futures;
import com.google.common.util.concurrent.ListenableFuture;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.github.schedsvc.v1.Leadership;
import io.github.schedsvc.v1.ProgressRequest;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.Contexts;
import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Function;

/**
 * Makes unary calls. With several targets it asks one after the other, until the deadline of the
 * call, and for at most a set time without one that leads.
 */
final class Calls {
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
  private final Function<String, ManagedChannelBuilder<?>> connect;
  private final Map<String, Link> links = new HashMap<>();
  volatile boolean isClosed;

  Calls(Scheduler.Builder options) {
    this.targets = options.targets;
    this.fence = Targets.Fence.of(targets.all);
    this.token = options.token;
    this.failoverWait = options.failoverWait;
    this.silentAfter = options.silentAfter;
    this.connect = options.connect;
    targets.all.forEach(target -> links.put(target, new Link(target)));
    if (targets.several()) {
      probe();
    }
  }

  static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  /** Makes a call, which the context ends. It fails with a {@link CallException}. */
  <Q, R> CompletableFuture<R> call(
      MethodDescriptor<Q, R> method, Q request, CallOptions options, Context context) {
    if (method.getType() != MethodDescriptor.MethodType.UNARY) {
      throw Status.UNIMPLEMENTED.withDescription("only unary calls are made").asRuntimeException();
    }
    Call<Q, R> call = new Call<>(method, request, options, context);
    context.run(call::attempt);
    return call.answer;
  }

  /** Makes a call of this client's own, which no context of a caller ends. */
  <Q, R> CompletableFuture<R> ask(MethodDescriptor<Q, R> method, Q request) {
    return call(method, request, within(OWN_DEADLINE), Context.ROOT);
  }

  /**
   * Runs work later, also if this is closed then: it finds the channels closed. All of the JVM's
   * delays share the thread, so the work must not wait.
   */
  static void after(Duration pause, Runnable work) {
    CompletableFuture.delayedExecutor(pause.toNanos(), TimeUnit.NANOSECONDS, Runnable::run)
        .execute(work);
  }

  private static CallOptions within(Duration time) {
    return CallOptions.DEFAULT.withDeadlineAfter(time.toNanos(), TimeUnit.NANOSECONDS);
  }

  void close() {
    isClosed = true;
    links.values().forEach(Link::hangUp);
  }

  private void probe() {
    if (!isClosed) {
      Duration step = silentAfter.dividedBy(PROBES_MAX);
      links.values().forEach(link -> link.probe(step));
      after(step, this::probe);
    }
  }

  /** Is one call, whose attempts follow each other. */
  private final class Call<Q, R> {
    final CompletableFuture<R> answer = new CompletableFuture<>();

    private final MethodDescriptor<Q, R> method;
    private final Q request;
    private final CallOptions options;
    private final Context context;
    private long awaySince = System.nanoTime();

    Call(MethodDescriptor<Q, R> method, Q request, CallOptions options, Context context) {
      this.method = method;
      this.request = request;
      this.options = options;
      this.context = context;
    }

    void attempt() {
      Link link = links.get(targets.ask());
      long began = System.nanoTime();
      CallOptions bounded = options;
      // An Admit may be held for long, so it is watched. Others are answered at once.
      String held = SchedulerServiceGrpc.getAdmitMethod().getFullMethodName();
      boolean isHeld = method.getFullMethodName().equals(held);
      if (isHeld) {
        link.held.incrementAndGet();
      } else if (targets.several()) {
        Deadline silent = Deadline.after(silentAfter.toNanos(), TimeUnit.NANOSECONDS);
        Deadline last = options.getDeadline();
        bounded = options.withDeadline(last == null ? silent : silent.minimum(last));
      }
      CompletableFuture<R> sent = link.send(method, request, bounded);
      sent.whenComplete(
          (found, failure) -> {
            if (isHeld) {
              link.held.decrementAndGet();
            }
            // The end of the context is none of those who wait for the answer.
            if (failure == null) {
              targets.answered();
              Context.ROOT.run(() -> answer.complete(found));
            } else if (!goesOn(link, began, failure)) {
              boolean isEnded = context.isCancelled(); // Whatever an attempt met in that moment.
              Throwable why =
                  isEnded ? Contexts.statusFromCancelled(context).asRuntimeException() : failure;
              Context.ROOT.run(() -> answer.completeExceptionally(CallException.of(why)));
            }
          });
    }

    /** Moves on to the next target, if that can help, and returns whether it does. */
    private boolean goesOn(Link link, long began, Throwable failure) {
      Status.Code code = Status.fromThrowable(failure).getCode();
      Deadline deadline = options.getDeadline();
      if (!targets.several()
          || OF_CALLER.contains(code)
          || context.isCancelled()
          || isClosed
          || (deadline != null && deadline.isExpired())) {
        return false;
      }
      long now = System.nanoTime();
      if (now - began > failoverWait.toNanos()) { // It was held by one that answered until then.
        awaySince = now;
      }
      Metadata trailers = Status.trailersFromThrowable(failure);
      String leader = trailers == null ? null : trailers.get(LEADER);
      Duration silent = code == Status.Code.DEADLINE_EXCEEDED ? silentAfter : Duration.ZERO;
      Duration pauseMax = targets.moveOn(link.target, leader, now, silent);
      if (now - awaySince > failoverWait.toNanos()) {
        return false;
      }
      Duration pause = Duration.ofNanos(ThreadLocalRandom.current().nextLong(pauseMax.toNanos()));
      after(pause, context.wrap(this::attempt));
      return true;
    }
  }

  /** Is the connection to one scheduler, which all calls share. */
  private final class Link {
    final String target;
    /** The number of Admits that it holds. */
    final AtomicInteger held = new AtomicInteger();

    /** The number of unanswered probes in a row. */
    private final AtomicInteger missed = new AtomicInteger();

    private ManagedChannel channel;
    private long triedAt;

    Link(String target) {
      this.target = target;
      this.channel = connect.apply(target).build();
    }

    /**
     * Makes one attempt, with the credentials of this client, and the latest term that it knows. An
     * answer of a scheduler that leads no more is dropped: its status is UNAVAILABLE.
     */
    <Q, R> CompletableFuture<R> send(
        MethodDescriptor<Q, R> method, Q request, CallOptions options) {
      Metadata headers = new Metadata();
      if (token != null) {
        headers.put(AUTHORIZATION, "Bearer " + token);
      }
      if (fence.latest() != 0) {
        headers.put(TERM, Long.toUnsignedString(fence.latest()));
      }
      ClientCall<Q, R> call =
          MetadataUtils.newAttachHeadersInterceptor(headers)
              .interceptCall(method, options, ready());
      ListenableFuture<R> sent = ClientCalls.futureUnaryCall(call, request);
      return CompletableFuture.supplyAsync(
          () -> obeyed(Futures.getUnchecked(sent)), done -> sent.addListener(done, Runnable::run));
    }

    private <R> R obeyed(R answer) {
      Message message = (Message) answer;
      FieldDescriptor field = message.getDescriptorForType().findFieldByName("leadership");
      if (field == null || fence.obeys((Leadership) message.getField(field))) {
        return answer;
      }
      String why = target + " answers under a term that is over: " + message.getField(field);
      throw Status.UNAVAILABLE.withDescription(why).asRuntimeException();
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
      MethodDescriptor<ProgressRequest, ?> method = SchedulerServiceGrpc.getProgressMethod();
      send(method, ProgressRequest.getDefaultInstance(), within(step))
          .whenComplete(
              (answer, failure) -> {
                boolean isMissed = failure != null && CallException.of(failure).isPassing();
                if (missed.updateAndGet(many -> isMissed ? many + 1 : 0) == PROBES_MAX) {
                  targets.moveOn(target, "", System.nanoTime(), silentAfter);
                  hangUp();
                }
              });
    }

    /** Ends the calls; the next one connects again, unless this is closed. */
    synchronized void hangUp() {
      missed.set(0);
      channel.shutdownNow();
      if (!isClosed) {
        channel = connect.apply(target).build();
      }
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
