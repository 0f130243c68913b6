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
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.Supplier;

/** Is the connection to one scheduler, which all calls share. */
final class Link {
  private static final Metadata.Key<String> AUTHORIZATION = key("authorization");
  private static final Metadata.Key<String> TERM = key("schedsvc-term");
  /** A lost connection is tried again after this time; gRPC alone would wait for up to 2 min. */
  private static final long RECONNECT_NANOS = TimeUnit.MILLISECONDS.toNanos(100);

  final String target;
  private final Supplier<ManagedChannel> connect;
  private final Fence fence;
  private final String token;
  private ManagedChannel channel;
  private long triedAt;
  private boolean isClosed;

  Link(String target, Supplier<ManagedChannel> connect, Fence fence, String token) {
    this.target = target;
    this.connect = connect;
    this.fence = fence;
    this.token = token;
    this.channel = connect.get();
  }

  static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  /** Starts a unary call. An answer of a scheduler that leads no more is dropped. */
  <Q, R> ClientCall<Q, R> start(
      MethodDescriptor<Q, R> method,
      CallOptions options,
      Metadata headers,
      Consumer<Attempt<R>> ended) {
    Metadata sent = new Metadata();
    sent.merge(headers);
    if (token != null) {
      sent.put(AUTHORIZATION, "Bearer " + token);
    }
    if (fence.latest() != 0) {
      sent.put(TERM, Long.toUnsignedString(fence.latest()));
    }
    ClientCall<Q, R> call = ready().newCall(method, options);
    call.start(new Answer<>(ended), sent);
    call.request(2);
    return call;
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

  /** Holds what became of one call. */
  static final class Attempt<R> {
    Status status = Status.OK;
    Metadata trailers = new Metadata();
    Metadata headers = new Metadata();
    R message;
    /** The answer came under a term that is over. */
    boolean isStale;

    /** Returns whether the scheduler gave no sign of life in time. */
    boolean isSilent() {
      return isStale || status.getCode() == Status.Code.DEADLINE_EXCEEDED;
    }
  }

  private final class Answer<R> extends ClientCall.Listener<R> {
    private final Consumer<Attempt<R>> ended;
    private final Attempt<R> attempt = new Attempt<>();

    Answer(Consumer<Attempt<R>> ended) {
      this.ended = ended;
    }

    @Override
    public void onHeaders(Metadata headers) {
      attempt.headers = headers;
    }

    @Override
    public void onMessage(R message) {
      attempt.message = message;
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      attempt.status = status;
      attempt.trailers = trailers;
      if (status.isOk() && attempt.message instanceof Message) {
        checkTerm((Message) attempt.message);
      }
      ended.accept(attempt);
    }

    private void checkTerm(Message message) {
      FieldDescriptor field = message.getDescriptorForType().findFieldByName("leadership");
      if (field != null && !fence.obeys((Leadership) message.getField(field))) {
        attempt.isStale = true;
        attempt.status =
            Status.UNAVAILABLE.withDescription(
                target + " answers under a term that is over: " + message.getField(field));
      }
    }
  }
}
