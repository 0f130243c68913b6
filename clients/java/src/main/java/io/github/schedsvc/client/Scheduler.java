package io.github.schedsvc.client;

import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.AdmitResponse;
import io.github.schedsvc.v1.ExplainRequest;
import io.github.schedsvc.v1.ExplainServiceGrpc;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.RequestState;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannelBuilder;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.BiConsumer;
import java.util.function.Consumer;

/**
 * Is a client of one scheduler, or of several of which one leads. It is safe for use by many
 * threads, and it connects at the first call.
 *
 * <pre>{@code
 * try (Scheduler scheduler = Scheduler.builder("a:7600,b:7600").build();
 *     Admission admission = scheduler.admit(request)) {
 *   ...
 *   admission.complete(Totals.of(512, 97));
 * }
 * }</pre>
 */
public final class Scheduler implements AutoCloseable {
  /** The number of prefix hashes of one request; the scheduler refuses more. */
  private static final int PREFIX_HASHES_MAX = 4096;

  private static final Duration CLOSE_WAIT = Duration.ofSeconds(10);

  final Timer timer = new Timer();
  private final FailoverChannel channel;
  /** How to end what is under way: requests that wait, and admissions. */
  private final Map<Object, Runnable> ends = new HashMap<>();

  private boolean isClosed;

  private Scheduler(Builder builder) {
    Fence fence = Fence.of(builder.targets.all());
    channel =
        new FailoverChannel(
            builder.targets,
            target -> new Link(target, () -> builder.channel(target).build(), fence, builder.token),
            timer,
            builder.failoverWait,
            builder.silentAfter);
  }

  /**
   * Begins a client. A target is "host:port". Several targets, separated by commas, are the leader
   * and its standbys.
   */
  public static Builder builder(String targets) {
    return new Builder(targets);
  }

  /**
   * Returns a channel on which generated stubs make each unary call of the contract, with the
   * credentials and the failover of this client.
   */
  public Channel channel() {
    return channel;
  }

  /**
   * Asks for one request, and waits for the verdict. Interrupt the thread or cancel its gRPC {@link
   * Context} to withdraw the request; a grant that is on its way then is returned. An empty request
   * id is made up.
   *
   * @throws RefusedException if the scheduler refuses the request
   * @throws CallException if the call fails
   * @throws IllegalStateException if this client is closed
   */
  public Admission admit(AdmitRequest request) throws RefusedException, InterruptedException {
    CompletableFuture<Admission> admitted = admitAsync(request);
    try {
      return admitted.get();
    } catch (InterruptedException e) {
      admitted.cancel(true);
      admitted.thenAccept(Admission::giveBack); // If it was granted in this moment.
      throw e;
    } catch (ExecutionException e) {
      if (e.getCause() instanceof RefusedException) {
        throw (RefusedException) e.getCause();
      }
      throw (RuntimeException) e.getCause();
    }
  }

  /**
   * Asks for one request. The future fails as {@link #admit} does. Cancel it, not one that was
   * derived from it, to withdraw the request.
   */
  public CompletableFuture<Admission> admitAsync(AdmitRequest request) {
    int hashes = request.getPrefixBlockHashesCount();
    if (hashes > PREFIX_HASHES_MAX) {
      return failed(
          Status.INVALID_ARGUMENT,
          "prefix_block_hashes: has %d hashes; at most %d are allowed",
          hashes,
          PREFIX_HASHES_MAX);
    }
    if (Context.current().isCancelled()) {
      return failed(Status.CANCELLED, "its context was cancelled");
    }
    AdmitRequest asked =
        request.getRequestId().isEmpty()
            ? request.toBuilder().setRequestId(UUID.randomUUID().toString()).build()
            : request;
    CompletableFuture<Admission> admitted = new CompletableFuture<>();
    ClientCall<AdmitRequest, AdmitResponse> call =
        channel.newCall(SchedulerServiceGrpc.getAdmitMethod(), CallOptions.DEFAULT);
    Runnable withdraw = () -> admitted.completeExceptionally(closed());
    if (!begin(admitted, withdraw)) {
      finish(admitted);
      return CompletableFuture.failedFuture(closed());
    }
    start(call, asked, (response, failure) -> settle(asked, admitted, response, failure));
    admitted.whenComplete((admission, failure) -> call.cancel("it was withdrawn", failure));
    return admitted;
  }

  /**
   * Withdraws what waits, cancels what runs, waits for at most 10 s until the scheduler knows of
   * every end, and hangs up. If the scheduler is away, leases last for their TTL and its grace.
   */
  @Override
  public void close() {
    close(CLOSE_WAIT);
  }

  /**
   * Closes this client as {@link #close()} does.
   *
   * @param most the longest wait for the ends
   * @return whether the scheduler knows of every end
   */
  public boolean close(Duration most) {
    List<Runnable> open;
    synchronized (ends) {
      isClosed = true;
      open = List.copyOf(ends.values());
    }
    open.forEach(Runnable::run);
    boolean isDone = awaitEnds(most);
    timer.close();
    channel.close();
    return isDone;
  }

  private boolean awaitEnds(Duration most) {
    long until = System.nanoTime() + most.toNanos();
    synchronized (ends) {
      try {
        for (long left = most.toNanos(); !ends.isEmpty() && left > 0; ) {
          TimeUnit.NANOSECONDS.timedWait(ends, left);
          left = until - System.nanoTime();
        }
      } catch (InterruptedException e) {
        Thread.currentThread().interrupt();
      }
      return ends.isEmpty();
    }
  }

  /** Makes a call of this client's own, which no context of a caller cancels. */
  <Q, R> CompletableFuture<R> ask(MethodDescriptor<Q, R> method, Q request, CallOptions options) {
    CompletableFuture<R> answer = new CompletableFuture<>();
    BiConsumer<R, CallException> ended =
        (response, failure) -> {
          if (failure != null) {
            answer.completeExceptionally(failure);
          } else {
            answer.complete(response);
          }
        };
    Context.current().fork().run(() -> start(channel.newCall(method, options), request, ended));
    return answer;
  }

  /** Notes how to end what begins; returns false once this client is closed. */
  private boolean begin(Object key, Runnable end) {
    synchronized (ends) {
      ends.put(key, end);
      return !isClosed;
    }
  }

  void finish(Object key) {
    synchronized (ends) {
      ends.remove(key);
      ends.notifyAll();
    }
  }

  private void settle(
      AdmitRequest asked,
      CompletableFuture<Admission> admitted,
      AdmitResponse response,
      CallException failure) {
    if (failure != null) {
      Status.Code code = failure.getStatus().getCode();
      if (code == Status.Code.CANCELLED || code == Status.Code.DEADLINE_EXCEEDED) {
        giveBack(asked, () -> finish(admitted));
      } else {
        finish(admitted);
      }
      admitted.completeExceptionally(failure);
    } else if (response.getOutcome() != Outcome.OUTCOME_GRANTED) {
      finish(admitted);
      admitted.completeExceptionally(new RefusedException(asked.getRequestId(), response));
    } else {
      Admission admission = new Admission(this, asked.getRequestId(), response);
      boolean isOpen = begin(admission, () -> admission.cancel(Totals.UNKNOWN));
      if (!admitted.complete(admission) || !isOpen) {
        admission.giveBack();
      }
      finish(admitted);
    }
  }

  /**
   * Returns a grant that was on its way when its request was withdrawn: a repeat gets the same one.
   * The lease of a grant that cannot be returned expires.
   */
  private void giveBack(AdmitRequest request, Runnable done) {
    ExplainRequest question =
        ExplainRequest.newBuilder()
            .setRequestId(request.getRequestId())
            .setTenant(request.getTenant())
            .build();
    ask(ExplainServiceGrpc.getExplainMethod(), question, Admission.endOptions())
        .thenCompose(
            found -> {
              if (found.getRequestsList().stream()
                  .noneMatch(story -> story.getState() == RequestState.REQUEST_STATE_LIVE)) {
                return CompletableFuture.completedFuture(null);
              }
              AdmitRequest again = request.toBuilder().setQueueTtlMs(1).build();
              return ask(
                      SchedulerServiceGrpc.getAdmitMethod(), again, Admission.endOptions())
                  .thenCompose(
                      response ->
                          response.hasGrant()
                              ? new Admission(this, request.getRequestId(), response).giveBack()
                              : CompletableFuture.completedFuture(null));
            })
        .whenComplete((books, failure) -> done.run());
  }

  private static <Q, R> void start(
      ClientCall<Q, R> call, Q request, BiConsumer<R, CallException> ended) {
    ClientCalls.asyncUnaryCall(
        call,
        request,
        new StreamObserver<R>() {
          private R answer;

          @Override
          public void onNext(R response) {
            answer = response;
          }

          @Override
          public void onError(Throwable failure) {
            ended.accept(null, CallException.of(failure));
          }

          @Override
          public void onCompleted() {
            ended.accept(answer, null);
          }
        });
  }

  private static IllegalStateException closed() {
    return new IllegalStateException("the Scheduler is closed");
  }

  private static CompletableFuture<Admission> failed(Status status, String why, Object... values) {
    Status described = status.withDescription(String.format(why, values));
    return CompletableFuture.failedFuture(CallException.of(described.asRuntimeException()));
  }

  /** Sets a client up. Its defaults suit one scheduler without TLS. */
  public static final class Builder {
    private final Targets targets;
    private String token;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private Consumer<ManagedChannelBuilder<?>> configure = channel -> {};
    private Duration failoverWait = Duration.ofSeconds(5);
    private Duration silentAfter = Duration.ofMillis(1500);

    private Builder(String targets) {
      this.targets = Targets.parse(targets);
    }

    /** Sends this bearer token with each call. */
    public Builder token(String token) {
      this.token = token;
      return this;
    }

    /** Connects with these credentials; {@link io.grpc.TlsChannelCredentials} make it TLS. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** Configures the channel to each target: interceptors and all else that gRPC knows. */
    public Builder configure(Consumer<ManagedChannelBuilder<?>> configure) {
      this.configure = configure;
      return this;
    }

    /** Bounds how long a call looks for a target that leads, if there are several: 5 s. */
    public Builder failoverWait(Duration failoverWait) {
      this.failoverWait = failoverWait;
      return this;
    }

    /** Sets the silence after which one of several targets is left: 1.5 s. */
    public Builder silentAfter(Duration silentAfter) {
      this.silentAfter = silentAfter;
      return this;
    }

    /** Makes the client. */
    public Scheduler build() {
      return new Scheduler(this);
    }

    private ManagedChannelBuilder<?> channel(String target) {
      ManagedChannelBuilder<?> channel = Grpc.newChannelBuilder(target, credentials);
      configure.accept(channel);
      return channel;
    }
  }
}
