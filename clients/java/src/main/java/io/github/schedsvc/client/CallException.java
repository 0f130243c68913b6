package io.github.schedsvc.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
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

  private final transient List<FieldViolation> fields;
  private final Duration retryAfter;

  private CallException(Throwable failure, List<FieldViolation> fields, Duration retryAfter) {
    super(
        Status.fromThrowable(failure).withCause(failure), Status.trailersFromThrowable(failure));
    this.fields = fields;
    this.retryAfter = retryAfter;
  }

  /** Reads the details of a failure, such as that of a generated stub. */
  public static CallException of(Throwable failure) {
    if (failure instanceof CallException) {
      return (CallException) failure;
    }
    List<FieldViolation> fields = List.of();
    Duration retryAfter = Duration.ZERO;
    try {
      for (Any detail :
          StatusProto.fromStatusAndTrailers(
                  Status.fromThrowable(failure), Status.trailersFromThrowable(failure))
              .getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          fields = detail.unpack(BadRequest.class).getFieldViolationsList();
        } else if (detail.is(RetryInfo.class)) {
          com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
          retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
        }
      }
    } catch (InvalidProtocolBufferException e) {
      failure.addSuppressed(e); // The status counts all the same.
    }
    return new CallException(failure, fields, retryAfter);
  }

  /** Returns the fields of the request that were wrong. */
  public List<FieldViolation> fields() {
    return fields == null ? List.of() : fields;
  }

  /** Returns zero if the scheduler did not state a time. */
  public Duration retryAfter() {
    return retryAfter;
  }

  /** Returns whether the same call may succeed later. */
  boolean isPassing() {
    Status.Code code = getStatus().getCode();
    return code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
  }
}
