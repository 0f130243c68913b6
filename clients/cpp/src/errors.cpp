#include "errors.h"

#include <schedsvc/client/details.pb.h>

namespace schedsvc {
namespace {

/// Reads a detail of this name, whatever package our message of it has.
template <class Message>
bool unpack(const google::protobuf::Any& detail, const std::string& name, Message& message) {
  const std::string& url = detail.type_url();
  return url.substr(url.rfind('/') + 1) == name && message.ParseFromString(detail.value());
}

}  // namespace

CallError call_error(const std::string& method, const grpc::Status& status) {
  CallError error;
  error.method = method;
  error.code = status.error_code();
  error.message = status.error_message();
  client::Status sent;
  sent.ParseFromString(status.error_details());  // If it cannot be read, there are no details.
  for (const google::protobuf::Any& detail : sent.details()) {
    if (client::BadRequest wrong; unpack(detail, "google.rpc.BadRequest", wrong)) {
      for (const auto& field : wrong.field_violations()) {
        error.fields.push_back({field.field(), field.description()});
      }
    } else if (client::RetryInfo retry; unpack(detail, "google.rpc.RetryInfo", retry)) {
      error.retry_after = std::chrono::seconds(retry.retry_delay().seconds()) +
                          std::chrono::duration_cast<std::chrono::milliseconds>(
                              std::chrono::nanoseconds(retry.retry_delay().nanos()));
    }
  }
  return error;
}

std::string CallError::code_name() const {
  static const char* const kNames[] = {
      "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
      "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
      "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"};
  const bool is_known = code >= 0 && code <= grpc::StatusCode::UNAUTHENTICATED;
  return is_known ? kNames[code] : std::to_string(code);
}

std::string CallError::text() const {
  std::string why;
  for (const FieldViolation& wrong : fields) {
    why += (why.empty() ? "" : "; ") + wrong.field + ": " + wrong.description;
  }
  return "schedsvc: " + method + ": " + code_name() + ": " + (fields.empty() ? message : why);
}

Refused refused(const std::string& request_id, const v1::AdmitResponse& response) {
  Refused found;
  found.request_id = request_id;
  found.outcome =
      v1::Outcome_IsValid(response.outcome()) ? response.outcome() : v1::OUTCOME_UNSPECIFIED;
  found.refusal = response.refusal();
  found.retry_after = std::chrono::milliseconds(response.refusal().retry_after_ms());
  found.queue_duration = std::chrono::microseconds(response.queue_duration_us());
  return found;
}

std::string Refused::text() const {
  return "schedsvc: refused: " + v1::Outcome_Name(outcome) + ": " + refusal.message();
}

bool is_passing(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::DEADLINE_EXCEEDED;
}

bool is_of_caller(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::ALREADY_EXISTS:
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return true;
    default:
      return false;
  }
}

}  // namespace schedsvc
