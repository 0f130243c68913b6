#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <schedsvc/admission.h>

#include "targets.h"

namespace schedsvc {

class Core;

/// Is the state of one granted lease. Its core and its Admission share it.
class Lease : public std::enable_shared_from_this<Lease> {
 public:
  Lease(std::shared_ptr<Core> core, std::string request_id, const v1::AdmitResponse& response);

  const std::string request_id;
  const v1::Grant grant;
  const std::chrono::microseconds queue_duration;
  /// Is the pause after the next renewal that fails; only the thread that renews has it.
  milliseconds renew_backoff;

  milliseconds ttl() const { return milliseconds(grant.ttl_ms()); }
  void report(const Totals& totals);
  /// Returns what a renewal states; nothing if it needs no more renewals.
  std::optional<v1::LeaseProgress> progress() const;
  std::optional<std::string> lost() const;
  void on_lost(std::function<void()> stop);
  void lose(v1::LeaseState state);

  /// Begins to end the lease; returns false if that has begun. The totals of a lease that was not
  /// used are 0.
  bool begin_end(v1::Outcome outcome, bool is_unused);
  v1::CompleteRequest end() const;
  /// Returns when a lease whose end has begun has surely expired.
  Clock::time_point expired() const;
  void finish(Books books);
  /// Ends the lease, and waits for its books.
  Books settle(v1::Outcome outcome, bool is_unused, milliseconds wait);

 private:
  const std::shared_ptr<Core> core_;
  // It is locked before the other one. The thread that renews calls `stop_` under it, so that an
  // end waits for that call, unless it is made there.
  std::recursive_mutex losing_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  Totals totals_;  // As far as they are known.
  std::function<void()> stop_;
  std::optional<std::string> lost_;
  std::optional<v1::CompleteRequest> end_;
  Clock::time_point ended_at_;
  std::optional<Books> books_;
};

}  // namespace schedsvc
