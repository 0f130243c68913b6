#pragma once

#include <string>

#include <schedsvc/errors.h>

namespace schedsvc {

/// Reads the details of a failed call.
CallError call_error(const std::string& method, const grpc::Status& status);

Refused refused(const std::string& request_id, const v1::AdmitResponse& response);

/// Returns whether the same call may succeed later.
bool is_passing(grpc::StatusCode code);

/// Returns whether every scheduler would answer so.
bool is_of_caller(grpc::StatusCode code);

}  // namespace schedsvc
