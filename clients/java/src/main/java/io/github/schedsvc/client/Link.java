package io.github.schedsvc.client;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.github.schedsvc.v1.Leadership;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;

/** Is the connection to one scheduler, which all calls share. */
final class Link {
  private static final Metadata.Key<String> AUTHORIZATION = key("authorization");
  private static final Metadata.Key<String> TERM = key("schedsvc-term");
  /** A lost connection is tried again after this time; gRPC alone would wait for up to 2 min. */
  private static final long RECONNECT_NANOS = TimeUnit.MILLISECONDS.toNanos(100);

  final String target;
  /** The number of Admits that it holds. */
  final AtomicInteger held = new AtomicInteger();
  /** The number of unanswered probes in a row. */
  final AtomicInteger missed = new AtomicInteger();

  private final Supplier<ManagedChannel> connect;
  private final Fence fence;
  private final String token;
  private ManagedChannel channel;
  private long triedAt;
  private boolean isClosed;

  Link(String target, Scheduler.Builder options) {
    this.target = target;
    this.connect = () -> options.channel(target).build();
    this.fence = Fence.of(options.targets.all());
    this.token = options.token;
    this.channel = connect.get();
  }

  static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
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
    return MetadataUtils.newAttachHeadersInterceptor(sent).interceptCall(method, options, ready());
  }

  /**
   * Makes a unary call, which fails with a {@link CallException}. The executor of the call runs
   * each function that waits for the answer already: a blocking stub listens to that one alone.
   */
  static <Q, R> CompletableFuture<R> start(
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

  /** Returns the status of an answer: that of a scheduler that leads no more is dropped. */
  Status check(Object answer) {
    if (answer instanceof Message) {
      Message message = (Message) answer;
      FieldDescriptor field = message.getDescriptorForType().findFieldByName("leadership");
      if (field != null && !fence.obeys((Leadership) message.getField(field))) {
        return Status.UNAVAILABLE.withDescription(
            target + " answers under a term that is over: " + message.getField(field));
      }
    }
    return Status.OK;
  }

  /** Ends the calls at this target; the next one connects again. */
  synchronized void hangUp() {
    channel.shutdownNow();
    if (!isClosed) {
      channel = connect.get();
    }
  }

  synchronized void close() {
    isClosed = true;
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
