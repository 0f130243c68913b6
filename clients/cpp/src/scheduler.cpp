#include <schedsvc/scheduler.h>

#include <utility>

#include "core.h"

namespace schedsvc {

Withdrawal::Withdrawal() : stop_(std::make_shared<Stop>()) {}

void Withdrawal::withdraw() const { stop_->stop(); }

bool Withdrawal::is_withdrawn() const { return stop_->is_stopped(); }

Scheduler::Scheduler(const std::string& targets, Options options)
    : core_(std::make_shared<Core>(targets, std::move(options))) {}

Scheduler& Scheduler::operator=(Scheduler&& other) noexcept {
  if (this != &other) {
    if (core_ != nullptr) {
      shutdown();
    }
    core_ = std::move(other.core_);
  }
  return *this;
}

Scheduler::~Scheduler() {
  if (core_ != nullptr) {
    shutdown();
  }
}

Verdict Scheduler::admit(const v1::AdmitRequest& request, const CallOptions& options) {
  return core_->admit(request, options);
}

bool Scheduler::shutdown(std::chrono::milliseconds wait) { return core_->shutdown(wait); }

std::optional<CallError> Scheduler::make(const Unary& unary, const CallOptions& options) {
  return core_->call(unary, options);
}

}  // namespace schedsvc
