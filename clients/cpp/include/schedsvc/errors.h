/// Refusals and failures of calls, as values.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <grpcpp/support/status.h>
#include <schedsvc/v1/scheduler.pb.h>

namespace schedsvc {

/// Names a field of a request that was wrong.
struct FieldViolation {
  std::string field;
  std::string description;
};

/// Says that a call failed.
struct CallError {
  std::string method;
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  std::string message;
  std::vector<FieldViolation> fields;
  /// Is 0 if the scheduler did not state it.
  std::chrono::milliseconds retry_after{0};
  /// Is the target of the leader, if a scheduler that does not lead named it.
  std::string leader;

  /// Returns the code as gRPC's documents spell it.
  std::string code_name() const;
  /// Returns one sentence for a person; it names the fields that were wrong.
  std::string text() const;
};

/// Is the scheduler's verdict that a request does not run.
struct Refused {
  std::string request_id;
  /// Is OUTCOME_UNSPECIFIED if a later version of the contract gave the reason.
  v1::Outcome outcome = v1::OUTCOME_UNSPECIFIED;
  /// Has a sentence for a person, and the limits of the tenant.
  v1::Refusal refusal;
  /// Is the earliest sensible retry; 0 says that a retry cannot help.
  std::chrono::milliseconds retry_after{0};
  std::chrono::microseconds queue_duration{0};

  /// Returns the outcome, and the scheduler's sentence.
  std::string text() const;
};

}  // namespace schedsvc
