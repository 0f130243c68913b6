#pragma once

#include <gtest/gtest.h>

#include <schedsvc/scheduler.h>

namespace requests {

inline schedsvc::v1::AdmitRequest request() {
  schedsvc::v1::AdmitRequest made;
  made.set_tenant("red");
  made.add_input_tokens(100);
  made.set_max_output_tokens(20);
  made.set_reports_progress(true);
  return made;
}

/// Returns what a verdict or a result has to be; throws what it is instead.
template <class Wanted, class Result>
Wanted as(Result&& result) {
  if (auto* found = std::get_if<Wanted>(&result)) {
    return std::move(*found);
  }
  if (const auto* error = std::get_if<schedsvc::CallError>(&result)) {
    throw std::runtime_error(error->text());
  }
  throw std::runtime_error("it is alternative " + std::to_string(result.index()));
}

inline std::shared_ptr<schedsvc::Admission> admit(schedsvc::Scheduler& scheduler) {
  return as<std::shared_ptr<schedsvc::Admission>>(scheduler.admit(request()));
}

inline schedsvc::v1::CompleteResponse charged(schedsvc::Books books) {
  return as<schedsvc::v1::CompleteResponse>(books);
}

inline auto stats(schedsvc::Scheduler& scheduler, const schedsvc::CallOptions& options = {}) {
  return scheduler.call(&schedsvc::v1::SchedulerService::Stub::Stats,
                        schedsvc::v1::StatsRequest(), options);
}

inline schedsvc::Totals totals(std::optional<std::int64_t> input,
                               std::optional<std::int64_t> cached,
                               std::optional<std::int64_t> output) {
  schedsvc::Totals made;
  if (input) {
    made.set_input_tokens(*input);
  }
  if (cached) {
    made.set_cached_input_tokens(*cached);
  }
  if (output) {
    made.set_output_tokens(*output);
  }
  return made;
}

}  // namespace requests
