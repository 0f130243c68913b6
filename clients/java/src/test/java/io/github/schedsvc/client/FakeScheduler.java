package io.github.schedsvc.client;

import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.AdmitResponse;
import io.github.schedsvc.v1.CompleteRequest;
import io.github.schedsvc.v1.CompleteResponse;
import io.github.schedsvc.v1.ExplainRequest;
import io.github.schedsvc.v1.ExplainResponse;
import io.github.schedsvc.v1.ExplainServiceGrpc;
import io.github.schedsvc.v1.Grant;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.LeaseStatus;
import io.github.schedsvc.v1.Leadership;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.ProgressRequest;
import io.github.schedsvc.v1.ProgressResponse;
import io.github.schedsvc.v1.Refusal;
import io.github.schedsvc.v1.RequestState;
import io.github.schedsvc.v1.RequestStory;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.github.schedsvc.v1.StatsRequest;
import io.github.schedsvc.v1.StatsResponse;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;

/**
 * Is a scheduler inside a test. It grants at once, unless the test sets it otherwise, and keeps
 * what it was sent. Its lock guards all of it.
 */
public final class FakeScheduler implements AutoCloseable {
  /** Answers an Admit. */
  public interface Decision {
    void decide(AdmitRequest request, ServerCallStreamObserver<AdmitResponse> answer);
  }

  /** Holds what is known of one lease. */
  public static final class Lease {
    public final AdmitRequest request;
    public final Grant grant;
    public final List<LeaseProgress> reports = new ArrayList<>();
    public final List<CompleteRequest> ends = new ArrayList<>();

    /** The number of its state in the contract. */
    public int state = 2;

    Lease(AdmitRequest request, Grant grant) {
      this.request = request;
      this.grant = grant;
    }
  }

  public final List<String> calls = new ArrayList<>();
  public final List<Metadata> headers = new ArrayList<>();
  public final List<AdmitRequest> admits = new ArrayList<>();
  public final List<String> withdrawn = new ArrayList<>();
  public final Map<Long, Lease> leases = new TreeMap<>();
  public Decision decision = this::grant;
  public boolean hangs;
  public Leadership leadership = Leadership.getDefaultInstance();

  /** The target of the leader, if this one does not lead. */
  public String leader = "";

  public long ttlMs = 30_000;
  private final Map<String, Deque<Status.Code>> failures = new HashMap<>();
  private final long firstLease;
  private final Server server;

  /** Starts a scheduler that numbers its leases from the first. */
  public FakeScheduler(long firstLease) {
    this.firstLease = firstLease;
    try {
      server =
          Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
              .intercept(new Script())
              .addService(new Scheduling())
              .addService(new Explaining())
              .build()
              .start();
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  public String target() {
    return "127.0.0.1:" + server.getPort();
  }

  /** Breaks all calls. */
  @Override
  public void close() {
    server.shutdownNow();
    try {
      server.awaitTermination(1, TimeUnit.MINUTES);
    } catch (InterruptedException e) {
      throw new IllegalStateException(e);
    }
  }

  /** Waits until something is so. */
  public synchronized void until(BooleanSupplier isSo) {
    long end = System.nanoTime() + TimeUnit.MINUTES.toNanos(1);
    while (!isSo.getAsBoolean()) {
      if (System.nanoTime() > end) {
        throw new AssertionError("it does not come");
      }
      try {
        wait(1);
      } catch (InterruptedException e) {
        throw new IllegalStateException(e);
      }
    }
  }

  /** Lets the next calls of a method fail. */
  public synchronized void fail(String method, Status.Code code, int count) {
    failures
        .computeIfAbsent(method, name -> new ArrayDeque<>())
        .addAll(Collections.nCopies(count, code));
  }

  public synchronized void failNoMore(String method) {
    failures.remove(method);
  }

  public synchronized int count(String method) {
    return Collections.frequency(calls, method);
  }

  /** Returns the number of leases that have not ended. */
  public synchronized long live() {
    return leases.values().stream().filter(lease -> lease.ends.isEmpty()).count();
  }

  /** Grants a request; a repeat gets the same grant. */
  public synchronized void grant(
      AdmitRequest request, ServerCallStreamObserver<AdmitResponse> answer) {
    answer(
        answer,
        AdmitResponse.newBuilder()
            .setOutcome(Outcome.OUTCOME_GRANTED)
            .setGrant(grantTo(request))
            .setLeadership(leadership)
            .build());
  }

  /** Returns the grant of a request; a repeat gets the same one. */
  public synchronized Grant grantTo(AdmitRequest request) {
    for (Lease lease : leases.values()) {
      if (lease.request.getRequestId().equals(request.getRequestId())) {
        return lease.grant;
      }
    }
    Grant grant =
        Grant.newBuilder()
            .setLeaseId(firstLease + leases.size())
            .setPool("main")
            .setPoolEpoch(1)
            .setTtlMs(ttlMs)
            .setReservedTokens(64)
            .build();
    leases.put(grant.getLeaseId(), new Lease(request, grant));
    return grant;
  }

  /** Waits until the client withdraws the request. */
  public void hold(AdmitRequest request, ServerCallStreamObserver<AdmitResponse> answer) {
    // The fake has noted how a withdrawal is seen.
  }

  /** Returns a decision that refuses. */
  public static Decision refusal(int outcome, Refusal refusal) {
    AdmitResponse verdict =
        AdmitResponse.newBuilder().setOutcomeValue(outcome).setRefusal(refusal).build();
    return (request, answer) -> answer(answer, verdict);
  }

  static <R> void answer(StreamObserver<R> answer, R response) {
    answer.onNext(response);
    answer.onCompleted();
  }

  /** Notes each call, and answers it as the test asks. */
  private final class Script implements ServerInterceptor {
    @Override
    public <Q, R> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, R> call, Metadata given, ServerCallHandler<Q, R> next) {
      synchronized (FakeScheduler.this) {
        String method = call.getMethodDescriptor().getBareMethodName();
        calls.add(method);
        headers.add(given);
        Deque<Status.Code> codes = failures.get(method);
        if (codes != null && !codes.isEmpty()) {
          call.close(codes.poll().toStatus().withDescription("as the test asks"), new Metadata());
          return new ServerCall.Listener<>() {};
        }
        if (!leader.isEmpty()) {
          Metadata trailers = new Metadata();
          trailers.put(Calls.key("schedsvc-leader"), leader);
          call.close(Status.UNAVAILABLE.withDescription("another scheduler leads"), trailers);
          return new ServerCall.Listener<>() {};
        }
        return hangs && !method.equals("Admit")
            ? new ServerCall.Listener<>() {}
            : next.startCall(call, given);
      }
    }
  }

  private final class Scheduling extends SchedulerServiceGrpc.SchedulerServiceImplBase {
    @Override
    public void admit(AdmitRequest request, StreamObserver<AdmitResponse> answer) {
      ServerCallStreamObserver<AdmitResponse> call =
          (ServerCallStreamObserver<AdmitResponse>) answer;
      Decision decided;
      synchronized (FakeScheduler.this) {
        admits.add(request);
        decided = hangs ? FakeScheduler.this::hold : decision;
        call.setOnCancelHandler(
            () -> {
              synchronized (FakeScheduler.this) {
                withdrawn.add(request.getRequestId());
              }
            });
      }
      decided.decide(request, call);
    }

    @Override
    public void progress(ProgressRequest request, StreamObserver<ProgressResponse> answer) {
      synchronized (FakeScheduler.this) {
        ProgressResponse.Builder response =
            ProgressResponse.newBuilder().setLeadership(leadership);
        for (LeaseProgress report : request.getLeasesList()) {
          Lease lease = leases.get(report.getLeaseId());
          if (lease != null) {
            lease.reports.add(report);
          }
          response.addLeases(
              LeaseStatus.newBuilder()
                  .setLeaseId(report.getLeaseId())
                  .setStateValue(lease == null ? 1 : lease.state));
        }
        answer(answer, response.build());
      }
    }

    @Override
    public void complete(CompleteRequest request, StreamObserver<CompleteResponse> answer) {
      synchronized (FakeScheduler.this) {
        Lease lease = leases.get(request.getLeaseId());
        if (lease == null) {
          answer.onError(Status.NOT_FOUND.withDescription("no such lease").asException());
          return;
        }
        lease.ends.add(request);
        CompleteRequest first = lease.ends.get(0);
        answer(
            answer,
            CompleteResponse.newBuilder()
                .setOutcome(first.getOutcome())
                .setInputTokens(first.getInputTokens())
                .setOutputTokens(first.getOutputTokens())
                .setLeadership(leadership)
                .build());
      }
    }

    @Override
    public void stats(StatsRequest request, StreamObserver<StatsResponse> answer) {
      answer(answer, StatsResponse.getDefaultInstance());
    }
  }

  private final class Explaining extends ExplainServiceGrpc.ExplainServiceImplBase {
    @Override
    public void explain(ExplainRequest request, StreamObserver<ExplainResponse> answer) {
      synchronized (FakeScheduler.this) {
        ExplainResponse.Builder response = ExplainResponse.newBuilder();
        for (Lease lease : leases.values()) {
          if (lease.request.getRequestId().equals(request.getRequestId())) {
            response.addRequests(
                RequestStory.newBuilder()
                    .setState(
                        lease.ends.isEmpty()
                            ? RequestState.REQUEST_STATE_LIVE
                            : RequestState.REQUEST_STATE_ENDED));
          }
        }
        answer(answer, response.build());
      }
    }
  }
}
