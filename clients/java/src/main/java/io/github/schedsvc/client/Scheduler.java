package io.github.schedsvc.client;

import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.AdmitResponse;
import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.ExplainRequest;
import io.github.schedsvc.v1.ExplainServiceGrpc;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.RequestState;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannelBuilder;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * Is a client of one scheduler, or of several of which one leads. It is safe for use by many
 * threads, and it connects at the first call.
 *
 * <pre>{@code
 * try (Scheduler scheduler = Scheduler.builder("a:7600,b:7600").build();
 *     Admission admission = scheduler.admit(request)) {
 *   ...
 *   admission.complete(LeaseProgress.newBuilder().setInputTokens(512).setOutputTokens(97).build());
 * }
 * }</pre>
 */
public final class Scheduler implements AutoCloseable {
  /** The number of prefix hashes of one request; the scheduler refuses more. */
  private static final int PREFIX_HASHES_MAX = 4096;

  private static final Duration CLOSE_WAIT = Duration.ofSeconds(10);

  final Calls calls;
  /** Has the requests that wait and the admissions, each with how to end it. */
  private final Map<CompletableFuture<?>, Runnable> ends = new ConcurrentHashMap<>();

  private volatile boolean isClosed;

  private Scheduler(Builder builder) {
    calls = new Calls(builder);
  }

  /**
   * Begins a client. A target is "host:port". Several targets, separated by commas, are the leader
   * and its standbys.
   */
  public static Builder builder(String targets) {
    return new Builder(targets);
  }

  /**
   * Makes any unary call of the contract, with the credentials and the failover of this client. The
   * deadline of the options bounds it, and the caller's gRPC {@link Context} ends it. The future
   * fails with a {@link CallException}.
   *
   * <pre>{@code
   * scheduler.call(SchedulerServiceGrpc.getStatsMethod(), request, CallOptions.DEFAULT)
   * }</pre>
   *
   * @throws io.grpc.StatusRuntimeException if the method has a stream
   */
  public <Q, R> CompletableFuture<R> call(
      MethodDescriptor<Q, R> method, Q request, CallOptions options) {
    return calls.call(method, request, options, Context.current());
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
      String why = "prefix_block_hashes: has %d hashes; at most %d are allowed";
      return failed(Status.INVALID_ARGUMENT, String.format(why, hashes, PREFIX_HASHES_MAX));
    }
    if (Context.current().isCancelled()) {
      return failed(Status.CANCELLED, "its context was cancelled");
    }
    AdmitRequest asked =
        request.getRequestId().isEmpty()
            ? request.toBuilder().setRequestId(UUID.randomUUID().toString()).build()
            : request;
    CompletableFuture<Admission> admitted = new CompletableFuture<>();
    CompletableFuture<Object> settled = new CompletableFuture<>();
    begin(settled, () -> admitted.completeExceptionally(closed()));
    if (isClosed) {
      settled.complete(null);
      return CompletableFuture.failedFuture(closed());
    }
    Context.CancellableContext context = Context.current().withCancellation();
    MethodDescriptor<AdmitRequest, AdmitResponse> method = SchedulerServiceGrpc.getAdmitMethod();
    settle(calls.call(method, asked, CallOptions.DEFAULT, context), asked, admitted)
        .whenComplete((nothing, failure) -> settled.complete(null));
    admitted.whenComplete((admission, failure) -> context.cancel(failure));
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
    isClosed = true;
    List.copyOf(ends.values()).forEach(Runnable::run);
    CompletableFuture<?>[] open = ends.keySet().toArray(new CompletableFuture<?>[0]);
    boolean areDone = await(CompletableFuture.allOf(open), most);
    calls.close();
    return areDone;
  }

  /** Returns whether work is done, or has failed, before the time is over or an interrupt comes. */
  static boolean await(CompletableFuture<?> work, Duration most) {
    try {
      return work.handle((result, failure) -> true)
          .completeOnTimeout(false, most.toNanos(), TimeUnit.NANOSECONDS)
          .get();
    } catch (InterruptedException | ExecutionException e) { // Only the first one can come.
      Thread.currentThread().interrupt();
      return false;
    }
  }

  /** Notes what has begun, until it is done, and how to end it. */
  void begin(CompletableFuture<?> done, Runnable end) {
    ends.put(done, end);
    done.whenComplete((result, failure) -> ends.remove(done));
  }

  /** Hands a verdict on. The future is done when a grant that came too late is returned. */
  private CompletableFuture<CompleteResponse> settle(
      CompletableFuture<AdmitResponse> verdict,
      AdmitRequest asked,
      CompletableFuture<Admission> admitted) {
    CompletableFuture<CompleteResponse> nothing = CompletableFuture.completedFuture(null);
    String id = asked.getRequestId();
    return verdict
        .handle(
            (response, failure) -> {
              if (failure != null) {
                admitted.completeExceptionally(failure);
                Status.Code code = Status.fromThrowable(failure).getCode();
                boolean mayCross =
                    code == Status.Code.CANCELLED || code == Status.Code.DEADLINE_EXCEEDED;
                return mayCross ? giveBack(asked, admitted) : nothing;
              }
              if (response.getOutcome() != Outcome.OUTCOME_GRANTED) {
                admitted.completeExceptionally(new RefusedException(id, response));
                return nothing;
              }
              Admission admission = new Admission(this, id, response);
              return admitted.complete(admission) && !isClosed ? nothing : admission.giveBack();
            })
        .thenCompose(given -> given);
  }

  /**
   * Returns a grant that was on its way when its request was withdrawn: a repeat gets the same one.
   * The lease of a grant that cannot be returned expires.
   */
  private CompletableFuture<CompleteResponse> giveBack(
      AdmitRequest asked, CompletableFuture<Admission> admitted) {
    ExplainRequest question =
        ExplainRequest.newBuilder()
            .setRequestId(asked.getRequestId())
            .setTenant(asked.getTenant())
            .build();
    AdmitRequest again = asked.toBuilder().setQueueTtlMs(1).build();
    return calls
        .ask(ExplainServiceGrpc.getExplainMethod(), question)
        .thenCompose(
            found ->
                found.getRequestsList().stream()
                        .anyMatch(story -> story.getState() == RequestState.REQUEST_STATE_LIVE)
                    ? settle(
                        calls.ask(SchedulerServiceGrpc.getAdmitMethod(), again), again, admitted)
                    : CompletableFuture.completedFuture(null));
  }

  private static IllegalStateException closed() {
    return new IllegalStateException("the Scheduler is closed");
  }

  private static CompletableFuture<Admission> failed(Status status, String why) {
    Throwable failure = status.withDescription(why).asRuntimeException();
    return CompletableFuture.failedFuture(CallException.of(failure));
  }

  /** Sets a client up. Its defaults suit one scheduler without TLS. */
  public static final class Builder {
    final Targets targets;
    String token;
    Duration failoverWait = Duration.ofSeconds(5);
    Duration silentAfter = Duration.ofMillis(1500);
    Function<String, ManagedChannelBuilder<?>> connect =
        target -> Grpc.newChannelBuilder(target, InsecureChannelCredentials.create());

    private Builder(String targets) {
      this.targets = new Targets(targets);
    }

    /** Sends this bearer token with each call. */
    public Builder token(String token) {
      this.token = token;
      return this;
    }

    /**
     * Makes the channel to each target: for TLS by {@link Grpc#newChannelBuilder} with {@link
     * io.grpc.TlsChannelCredentials}, with interceptors and all else that gRPC knows.
     */
    public Builder connect(Function<String, ManagedChannelBuilder<?>> connect) {
      this.connect = connect;
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
  }
}
