#include "stop.h"

namespace schedsvc {

void Stop::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  break_off();
}

void Stop::break_off() {
  const std::lock_guard lock(mutex_);
  for (grpc::ClientContext* context : calls_) {
    context->TryCancel();
  }
}

bool Stop::is_stopped() const {
  const std::lock_guard lock(mutex_);
  return is_stopped_;
}

bool Stop::is_busy() const {
  const std::lock_guard lock(mutex_);
  return !calls_.empty();
}

Stop::Call::Call(Stop& stop, grpc::ClientContext& context) : stop_(stop), context_(context) {
  const std::lock_guard lock(stop.mutex_);
  stop.calls_.insert(&context);
  if (stop.is_stopped_) {
    context.TryCancel();
  }
}

Stop::Call::~Call() {
  const std::lock_guard lock(stop_.mutex_);
  stop_.calls_.erase(&context_);
}

}  // namespace schedsvc
