/// A client of the schedsvc scheduler.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <schedsvc/v1/scheduler.grpc.pb.h>

namespace schedsvc {

class Core;

/// Names a field of a request that was wrong.
struct FieldViolation {
  std::string field;
  std::string description;
};

/// Says that a call failed.
struct CallError {
  /// Reads the details of a failed call.
  CallError(std::string method, const grpc::Status& status);

  std::string method;
  grpc::StatusCode code;
  std::string message;
  std::vector<FieldViolation> fields;
  /// Is 0 if the scheduler did not state it.
  std::chrono::milliseconds retry_after{0};
  /// Is the target of the leader, if a scheduler that does not lead named it.
  std::string leader;

  /// Returns the code as gRPC's documents spell it.
  std::string code_name() const;
  /// Returns one sentence for a person; it names the fields that were wrong.
  std::string text() const;
};

/// Is the scheduler's verdict that a request does not run.
struct Refused {
  std::string request_id;
  /// Is OUTCOME_UNSPECIFIED if a later version of the contract gave the reason.
  v1::Outcome outcome;
  /// Has a sentence for a person, and the limits of the tenant.
  v1::Refusal refusal;
  /// Is the earliest sensible retry; 0 says that a retry cannot help.
  std::chrono::milliseconds retry_after;
  std::chrono::microseconds queue_duration;

  /// Returns the outcome, and the scheduler's sentence.
  std::string text() const;
};

/// Has running totals of a request, never differences. One that is not set is not known. The
/// client fills in the lease.
using Totals = v1::LeaseProgress;

/// Is what a lease was charged at its end, or why the scheduler did not say it.
using Books = std::variant<v1::CompleteResponse, CallError>;

/// Is a granted request. It is renewed in the background until it ends. Several threads can call
/// its functions.
class Admission : public std::enable_shared_from_this<Admission> {
 public:
  /// Is how long an end waits for the scheduler. The client repeats the end behind it, until the
  /// lease has surely expired.
  static constexpr std::chrono::milliseconds kEndWait{10'000};

  Admission(std::shared_ptr<Core> core, std::string request_id, const v1::AdmitResponse& response);

  /// Is the id by which Explain knows the request.
  const std::string request_id;
  /// Has the lease, its pool, and what is reserved.
  const v1::Grant grant;
  const std::chrono::microseconds queue_duration;

  /// Returns the reason if the scheduler no longer knows the lease as live: stop the engine's work.
  std::optional<std::string> lost() const;
  /// Calls a function once the lease is lost, at once if it is. It runs in the thread that renews,
  /// so it must not wait. It is not called after the end of the lease, and no longer runs then.
  void on_lost(std::function<void()> stop);

  /// Notes running totals. They are sent with the next renewal and with the end, so it costs
  /// nothing to call it for every token.
  void report(const Totals& totals);

  /// Ends the lease as done. The first end counts: another one returns the books of that one.
  Books complete(const Totals& totals = {}, std::chrono::milliseconds wait = kEndWait) {
    return end(v1::OUTCOME_COMPLETED, totals, wait);
  }
  /// Ends the lease before it was done. Without totals the request is charged for its time.
  Books cancel(const Totals& totals = {}, std::chrono::milliseconds wait = kEndWait) {
    return end(v1::OUTCOME_CANCELLED, totals, wait);
  }
  /// Cancels a lease whose request the engine never had. It costs nothing.
  Books give_back(std::chrono::milliseconds wait = kEndWait);

 private:
  friend class Core;

  void lose(v1::LeaseState state);
  Books end(v1::Outcome outcome, const Totals& totals, std::chrono::milliseconds wait);

  const std::shared_ptr<Core> core_;
  // It is locked before the other one. The thread that renews calls `stop_` under it, so that an
  // end waits for that call, unless it is made there.
  std::recursive_mutex losing_;
  mutable std::mutex mutex_;
  std::function<void()> stop_;
  std::optional<std::string> lost_;
  Totals report_;
  std::optional<v1::CompleteRequest> end_;
  // Is the longest pause after the next attempt to end the lease that fails.
  std::chrono::milliseconds backoff_{50};
  std::chrono::steady_clock::time_point expiry_;
  std::promise<Books> books_;
  const std::shared_future<Books> ended_{books_.get_future()};
};

/// Is what the scheduler says to a request, or why it could not say it. The end of the last pointer
/// to an admission cancels it, if it has not ended, and waits for that for a second at most.
using Verdict = std::variant<std::shared_ptr<Admission>, Refused, CallError>;

/// Withdraws calls, from any thread.
class Withdrawal {
 public:
  /// Ends the calls that were given it, and those that will be, with CANCELLED.
  void withdraw() {
    const std::lock_guard lock(mutex_);
    is_withdrawn_ = true;
    for (grpc::ClientContext* context : calls_) {
      context->TryCancel();
    }
  }
  bool is_withdrawn() const { return is_withdrawn_; }

 private:
  friend class Links;

  /// Lets it end a call while the pointer lives.
  [[nodiscard]] std::shared_ptr<void> hold(grpc::ClientContext& context);
  bool holds_any() const {
    const std::lock_guard lock(mutex_);
    return !calls_.empty();
  }

  std::atomic<bool> is_withdrawn_{false};
  mutable std::mutex mutex_;
  std::unordered_set<grpc::ClientContext*> calls_;
};

/// Says more about one call.
struct CallOptions {
  /// Is the call's own deadline, from now; absent: none.
  std::optional<std::chrono::milliseconds> timeout;
  /// May be that of several calls; null: none.
  std::shared_ptr<Withdrawal> withdrawal;
  /// Is sent with the call.
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Configures a Scheduler. The defaults suit one scheduler without TLS.
struct Options {
  /// Is the bearer token of this caller; empty: none.
  std::string token;
  /// Make the connection TLS if they are grpc::SslCredentials.
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  /// Is passed to the channels.
  grpc::ChannelArguments arguments;
  /// Makes the channel to a target, interceptors included.
  std::function<decltype(grpc::CreateCustomChannel)> connect = grpc::CreateCustomChannel;
  /// Is how long a call looks for a target that leads, if there are several.
  std::chrono::milliseconds failover_wait{5'000};
  /// Is the silence after which a client leaves one of several targets.
  std::chrono::milliseconds silent_after{1'500};
};

/// Is one unary call, whatever its messages are.
struct Unary {
  std::function<grpc::Status(const std::shared_ptr<grpc::Channel>&, grpc::ClientContext*)> attempt;
  const google::protobuf::Message* response;
};

/// Makes a call of a method of a generated stub.
template <class Stub, class Request, class Response>
Unary unary(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const Request& request, Response& response) {
  const auto attempt = [method, &request, &response](const auto& channel, auto* context) {
    return (Stub(channel).*method)(context, request, &response);
  };
  return {attempt, &response};
}

/// Is a client of one scheduler, or of several of which one leads. It can only be moved. Its
/// destructor shuts it down, which takes 10 s at most. Several threads can call its functions.
class Scheduler {
 public:
  static constexpr std::chrono::milliseconds kShutdownWait{10'000};

  /// Connects at the first call. The target is "host:port" or "unix:/path/of/socket". Several
  /// targets, separated by commas, are the leader and its standbys. Throws std::invalid_argument if
  /// one of them is empty or listed twice.
  explicit Scheduler(const std::string& targets, Options options = {});

  /// Asks for one request, and waits for the verdict. An empty request id is made up. A grant that
  /// is on its way when the call is withdrawn, or its time is over, is returned, for which this may
  /// take a second longer.
  [[nodiscard]] Verdict admit(v1::AdmitRequest request, const CallOptions& options = {});

  /// Makes any unary call of the contract, with the credentials and the failover of this client:
  ///
  ///     scheduler.call(&schedsvc::v1::SchedulerService::Stub::Stats, schedsvc::v1::StatsRequest())
  template <class Stub, class Request, class Response>
  [[nodiscard]] std::variant<Response, CallError> call(
      grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      const Request& request, const CallOptions& options = {}) {
    Response response;
    if (auto error = make(unary(method, request, response), options)) {
      return *std::move(error);
    }
    return response;
  }

  /// Withdraws what waits, cancels what runs, and waits until the scheduler knows of every end, or
  /// until the time is over. Then it hangs up. Returns false if leases may be open until they
  /// expire.
  bool shutdown(std::chrono::milliseconds wait = kShutdownWait);

 private:
  std::optional<CallError> make(const Unary& unary, const CallOptions& options);

  /// Is null only after a move. Its deleter shuts down.
  std::unique_ptr<Core, std::function<void(Core*)>> core_;
};

}  // namespace schedsvc
