/// A client of the schedsvc scheduler.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <schedsvc/admission.h>
#include <schedsvc/errors.h>
#include <schedsvc/v1/scheduler.grpc.pb.h>

namespace schedsvc {

class Core;
class Stop;

/// Withdraws calls, from any thread. Copies withdraw the same calls.
class Withdrawal {
 public:
  Withdrawal();
  /// Ends the calls that were given it, and those that will be, with CANCELLED.
  void withdraw() const;
  bool is_withdrawn() const;
  const std::shared_ptr<Stop>& stop() const { return stop_; }

 private:
  std::shared_ptr<Stop> stop_;
};

/// Says more about one call.
struct CallOptions {
  /// Is the call's own deadline, from now; absent: none.
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<Withdrawal> withdrawal;
  /// Is sent with the call.
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Configures a Scheduler. The defaults suit one scheduler without TLS.
struct Options {
  /// Is the bearer token of this caller; empty: none.
  std::string token;
  /// Makes the connection TLS, as grpc::SslCredentials does; null: without TLS.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  /// Is passed to the channels.
  grpc::ChannelArguments arguments;
  /// Makes the channel to a target, interceptors included.
  std::function<std::shared_ptr<grpc::Channel>(
      const std::string&, const std::shared_ptr<grpc::ChannelCredentials>&,
      const grpc::ChannelArguments&)>
      connect = grpc::CreateCustomChannel;
  /// Is how long a call looks for a target that leads, if there are several.
  std::chrono::milliseconds failover_wait{5'000};
  /// Is the silence after which a client leaves one of several targets.
  std::chrono::milliseconds silent_after{1'500};
};

/// Is what the scheduler says to a request, or why it could not say it.
using Verdict = std::variant<Admission, Refused, CallError>;

/// Is one unary call, whatever its messages are. The template below makes it.
struct Unary {
  std::string method;
  /// The scheduler may hold it for long, so it is watched. Others are answered at once.
  bool is_held = false;
  std::function<grpc::Status(const std::shared_ptr<grpc::Channel>&, grpc::ClientContext&)> attempt;
  /// Returns the leadership of the answer; null: it has none.
  std::function<const v1::Leadership*()> leadership;
};

namespace detail {

template <class Response, class = void>
constexpr bool kHasLeadership = false;
template <class Response>
constexpr bool
    kHasLeadership<Response, std::void_t<decltype(std::declval<Response>().leadership())>> =
        std::is_same_v<std::decay_t<decltype(std::declval<Response>().leadership())>,
                       v1::Leadership>;

/// Makes a call of a method of a generated stub.
template <class Stub, class Request, class Response>
Unary unary(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const Request& request, Response& response) {
  Unary made;
  made.method = Response::descriptor()->name();
  made.method.erase(made.method.rfind("Response"));
  made.is_held = std::is_same_v<Response, v1::AdmitResponse>;
  made.attempt = [&request, &response, method](const std::shared_ptr<grpc::Channel>& channel,
                                               grpc::ClientContext& context) {
    response.Clear();
    Stub stub(channel);
    return (stub.*method)(&context, request, &response);
  };
  made.leadership = [&response]() -> const v1::Leadership* {
    if constexpr (kHasLeadership<Response>) {
      return &response.leadership();
    }
    return nullptr;
  };
  return made;
}

}  // namespace detail

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
  [[nodiscard]] Verdict admit(const v1::AdmitRequest& request, const CallOptions& options = {});

  /// Makes any unary call of the contract, with the credentials and the failover of this client:
  ///
  ///     scheduler.call(&schedsvc::v1::SchedulerService::Stub::Stats, schedsvc::v1::StatsRequest())
  template <class Stub, class Request, class Response>
  [[nodiscard]] std::variant<Response, CallError> call(
      grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      const Request& request, const CallOptions& options = {}) {
    Response response;
    if (auto error = make(detail::unary(method, request, response), options)) {
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
