// A scheduler inside a test. It answers as the test scripts it, and keeps what it was sent.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <schedsvc/scheduler.h>
#include <schedsvc/v1/explain.grpc.pb.h>

namespace fake {

namespace v1 = schedsvc::v1;
using std::chrono::milliseconds;

/// Is what the fake knows of one lease.
struct Lease {
  v1::AdmitRequest request;
  v1::Grant grant;
  std::vector<v1::LeaseProgress> reports;
  std::vector<v1::CompleteRequest> ends;
  v1::LeaseState state = v1::LEASE_STATE_LIVE;
};

struct Call {
  std::string method;
  std::multimap<std::string, std::string> metadata;

  std::string value(const std::string& key) const;
};

/// Is what a test changes, under the lock of `Scheduler::with`.
struct State {
  /// Answers an Admit; nothing: it is granted. The lock is not held.
  std::function<std::optional<grpc::Status>(grpc::ServerContext&, const v1::AdmitRequest&,
                                            v1::AdmitResponse&)>
      decide;
  /// Is called before each end, without the lock.
  std::function<void()> completing;
  /// Are the codes of the next calls of a method.
  std::map<std::string, std::deque<grpc::StatusCode>> failures;
  bool hangs = false;
  std::optional<v1::Leadership> leadership;
  /// Is the target of the leader, if it does not lead.
  std::string leader;
  milliseconds ttl{30'000};

  std::vector<Call> calls;
  std::vector<v1::AdmitRequest> admits;
  std::vector<std::string> withdrawn;
  std::map<std::uint64_t, Lease> leases;

  std::size_t count(const std::string& method) const;
  /// Returns the number of leases that have not ended.
  std::size_t live() const;
};

/// Grants at once, unless its state says otherwise.
class Scheduler final : public v1::SchedulerService::Service, public v1::ExplainService::Service {
 public:
  /// Numbers its leases from `first`.
  explicit Scheduler(std::uint64_t first = 1);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler() override;

  const std::string& target() const { return target_; }
  /// Breaks all calls.
  void stop();

  template <class Function>
  auto with(Function function) {
    const std::lock_guard lock(mutex_);
    return function(state_);
  }

  /// Waits until something is so; fails the test after a minute.
  void until(const std::function<bool(const State&)>& is_so);
  /// Waits until the client withdraws a request; it is an answer of `decide`.
  grpc::Status hold(grpc::ServerContext& context, const v1::AdmitRequest& request);
  /// Returns the grant of a request; a repeat gets the same one.
  v1::Grant grant_to(const v1::AdmitRequest& request);

  grpc::Status Admit(grpc::ServerContext*, const v1::AdmitRequest*, v1::AdmitResponse*) override;
  grpc::Status Progress(grpc::ServerContext*, const v1::ProgressRequest*,
                        v1::ProgressResponse*) override;
  grpc::Status Complete(grpc::ServerContext*, const v1::CompleteRequest*,
                        v1::CompleteResponse*) override;
  grpc::Status Stats(grpc::ServerContext*, const v1::StatsRequest*, v1::StatsResponse*) override;
  grpc::Status Explain(grpc::ServerContext*, const v1::ExplainRequest*,
                       v1::ExplainResponse*) override;

 private:
  grpc::Status begin(grpc::ServerContext& context, const std::string& method);
  void wait_for_cancel(grpc::ServerContext& context);
  template <class Response>
  void sign(Response& response);

  std::uint64_t first_;
  std::mutex mutex_;
  State state_;
  std::string target_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace fake
