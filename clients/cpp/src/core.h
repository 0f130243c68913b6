#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include <schedsvc/scheduler.h>

#include "keeper.h"
#include "links.h"
#include "stop.h"

namespace schedsvc {

/// Bound one attempt to end a lease, and the pauses between attempts.
constexpr milliseconds kEndTimeout{5'000};
constexpr milliseconds kEndBackoffMin{50};
constexpr milliseconds kRenewBackoffMin{100};

/// Is what a Scheduler and its Admissions share.
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const std::string& targets, Options options);

  Verdict admit(v1::AdmitRequest request, const CallOptions& options);
  std::optional<CallError> call(const Unary& unary, const CallOptions& options);
  bool shutdown(milliseconds wait);

  /// Sends the end of a lease once, and repeats it later until the scheduler has it, or the lease
  /// has surely expired.
  void deliver(const std::shared_ptr<Lease>& lease, milliseconds timeout, milliseconds backoff);

 private:
  using Leases = Keeper::Leases;

  Verdict judge(const v1::AdmitRequest& request, const CallOptions& options);
  std::optional<CallError> ask(const v1::AdmitRequest& request, v1::AdmitResponse& response,
                               const CallOptions& options, Stop& stop);
  std::shared_ptr<Lease> open(const v1::AdmitRequest& request, const v1::AdmitResponse& response);
  void close(const std::shared_ptr<Lease>& lease, Books books);
  void return_unused(const std::shared_ptr<Lease>& lease, milliseconds timeout);
  void give_back(const v1::AdmitRequest& request, milliseconds timeout);
  void renew(const Leases& leases);
  bool begin();
  void finish();

  std::mutex mutex_;
  std::condition_variable idle_;
  std::set<std::shared_ptr<Lease>> leases_;  // That have not ended.
  int asking_ = 0;  // Admits under way, and grants that may have to be returned later.
  bool is_closed_ = false;
  Stop admits_;  // Ends Admits.
  Stop calls_;  // Ends all other calls.
  Links links_;
  Keeper keeper_;  // Is the last one, because its thread uses the others.
};

}  // namespace schedsvc
