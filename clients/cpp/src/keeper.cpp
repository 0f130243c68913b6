#include "keeper.h"

#include <algorithm>
#include <utility>

namespace schedsvc {

Keeper::Keeper(std::function<void(const Leases&)> renew)
    : renew_(std::move(renew)), thread_([this] { run(); }) {}

Keeper::~Keeper() { stop(); }

void Keeper::renew_at(Clock::time_point due, std::shared_ptr<Lease> lease) {
  const std::lock_guard lock(mutex_);
  if (!is_stopped_) {
    renewals_.emplace(due, std::move(lease));
    changed_.notify_one();
  }
}

bool Keeper::at(Clock::time_point due, std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  if (!is_stopped_) {
    jobs_.emplace(due, std::move(job));
    changed_.notify_one();
  }
  return !is_stopped_;
}

void Keeper::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  renewals_.clear();
  jobs_.clear();
}

void Keeper::run() {
  std::unique_lock lock(mutex_);
  while (!is_stopped_) {
    auto due = Clock::time_point::max();
    for (const auto& next : {renewals_.empty() ? due : renewals_.begin()->first,
                             jobs_.empty() ? due : jobs_.begin()->first}) {
      due = std::min(due, next);
    }
    if (due == Clock::time_point::max()) {
      changed_.wait(lock);
    } else if (const auto now = Clock::now(); due > now) {
      changed_.wait_until(lock, due);
    } else {
      step(lock, now);
    }
  }
}

void Keeper::step(std::unique_lock<std::mutex>& lock, Clock::time_point now) {
  if (!renewals_.empty() && renewals_.begin()->first <= now) {
    Leases batch;
    while (!renewals_.empty() && renewals_.begin()->first <= now && batch.size() < kBatchMax) {
      batch.push_back(std::move(renewals_.extract(renewals_.begin()).mapped()));
    }
    lock.unlock();
    renew_(batch);
  } else {
    const std::function<void()> job = std::move(jobs_.extract(jobs_.begin()).mapped());
    lock.unlock();
    job();
  }
  lock.lock();
}

}  // namespace schedsvc
