package io.github.schedsvc.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.BadRequest.FieldViolation;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;

/** Says that a call failed. It is gRPC's exception, with the details of the contract. */
public final class CallException extends StatusRuntimeException {
  private static final long serialVersionUID = 1;

  private CallException(Throwable failure) {
    super(
        Status.fromThrowable(failure).withCause(failure), Status.trailersFromThrowable(failure));
  }

  /** Reads a failure, such as that of a generated stub. */
  public static CallException of(Throwable failure) {
    return failure instanceof CallException ? (CallException) failure : new CallException(failure);
  }

  /** Returns the fields of the request that were wrong. */
  public List<FieldViolation> fields() {
    return detail(BadRequest.class, BadRequest.getDefaultInstance()).getFieldViolationsList();
  }

  /** Returns zero if the scheduler did not state a time. */
  public Duration retryAfter() {
    RetryInfo retry = detail(RetryInfo.class, RetryInfo.getDefaultInstance());
    return Duration.ofSeconds(retry.getRetryDelay().getSeconds(), retry.getRetryDelay().getNanos());
  }

  /** Returns whether the same call may succeed later. */
  boolean isPassing() {
    Status.Code code = getStatus().getCode();
    return code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
  }

  /** Returns a detail of the failure, if it has one that can be read. */
  private <M extends Message> M detail(Class<M> kind, M absent) {
    try {
      for (Any detail : StatusProto.fromThrowable(this).getDetailsList()) {
        if (detail.is(kind)) {
          return detail.unpack(kind);
        }
      }
    } catch (InvalidProtocolBufferException e) {
      return absent; // The status counts all the same.
    }
    return absent;
  }
}
