#include <schedsvc/scheduler.h>

#include <absl/status/status.h>
#include <absl/strings/match.h>
#include <google/protobuf/util/time_util.h>
#include <schedsvc/client/details.pb.h>

namespace schedsvc {
namespace {

/// Reads a detail of this name, whatever package our message of it has.
template <class Message>
bool unpack(const google::protobuf::Any& detail, const char* name, Message& message) {
  return absl::EndsWith(detail.type_url(), name) && message.ParseFromString(detail.value());
}

}  // namespace

CallError::CallError(std::string of, const grpc::Status& status)
    : method(std::move(of)), code(status.error_code()), message(status.error_message()) {
  client::Status sent;
  sent.ParseFromString(status.error_details());  // If it cannot be read, there are no details.
  for (const google::protobuf::Any& detail : sent.details()) {
    if (client::BadRequest wrong; unpack(detail, "/google.rpc.BadRequest", wrong)) {
      for (const auto& field : wrong.field_violations()) {
        fields.push_back({field.field(), field.description()});
      }
    } else if (client::RetryInfo retry; unpack(detail, "/google.rpc.RetryInfo", retry)) {
      retry_after = std::chrono::milliseconds(
          google::protobuf::util::TimeUtil::DurationToMilliseconds(retry.retry_delay()));
    }
  }
}

std::string CallError::code_name() const {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::string CallError::text() const {
  std::string why;
  for (const FieldViolation& wrong : fields) {
    why += (why.empty() ? "" : "; ") + wrong.field + ": " + wrong.description;
  }
  return "schedsvc: " + method + ": " + code_name() + ": " + (fields.empty() ? message : why);
}

Refused::Refused(std::string id, const v1::AdmitResponse& response)
    : request_id(std::move(id)),
      outcome(v1::Outcome_IsValid(response.outcome()) ? response.outcome()
                                                      : v1::OUTCOME_UNSPECIFIED),
      refusal(response.refusal()),
      retry_after(refusal.retry_after_ms()),
      queue_duration(response.queue_duration_us()) {}

std::string Refused::text() const {
  return "schedsvc: refused: " + v1::Outcome_Name(outcome) + ": " + refusal.message();
}

}  // namespace schedsvc
