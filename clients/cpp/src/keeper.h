#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "targets.h"

namespace schedsvc {

class Lease;

/// Does in one thread what is due: renewals, several at once, and other jobs.
class Keeper {
 public:
  using Leases = std::vector<std::shared_ptr<Lease>>;

  /// The longest entry of a Progress has 40 bytes, and the least limit of a message is 1 KiB.
  static constexpr std::size_t kBatchMax = 24;

  explicit Keeper(std::function<void(const Leases&)> renew);
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  ~Keeper();

  /// Renews a lease then, if the thread has not stopped. O(log n).
  void renew_at(Clock::time_point due, std::shared_ptr<Lease> lease);
  /// Does a job then. Returns false if the thread has stopped. O(log n).
  bool at(Clock::time_point due, std::function<void()> job);
  /// Waits for what it does, and drops what is left.
  void stop();

 private:
  void run();
  /// Does what is due, without the lock: renewals before any other job, however many wait.
  void step(std::unique_lock<std::mutex>& lock, Clock::time_point now);

  const std::function<void(const Leases&)> renew_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, std::shared_ptr<Lease>> renewals_;
  std::multimap<Clock::time_point, std::function<void()>> jobs_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace schedsvc
