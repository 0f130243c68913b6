#include <schedsvc/scheduler.h>

#include <utility>

#include "core.h"

namespace schedsvc {

Withdrawal::Withdrawal() : stop_(std::make_shared<Stop>()) {}

void Withdrawal::withdraw() const { stop_->stop(); }

bool Withdrawal::is_withdrawn() const { return stop_->is_stopped(); }

Scheduler::Scheduler(const std::string& targets, Options options) {
  // Admissions may live longer than their Scheduler.
  const auto core = std::make_shared<Core>(targets, std::move(options));
  core_ = {core.get(), [core](Core*) { core->shutdown(kShutdownWait); }};
}

Verdict Scheduler::admit(const v1::AdmitRequest& request, const CallOptions& options) {
  return core_->admit(request, options);
}

bool Scheduler::shutdown(std::chrono::milliseconds wait) { return core_->shutdown(wait); }

std::optional<CallError> Scheduler::make(const Unary& unary, const CallOptions& options) {
  return core_->call(unary, options);
}

}  // namespace schedsvc
