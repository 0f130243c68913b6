#pragma once

#include <absl/random/random.h>
#include <absl/strings/match.h>
#include <schedsvc/scheduler.h>

#include <thread>

#include "targets.h"

namespace schedsvc {

/// After this number of unanswered probes in a row a scheduler that holds a call is silent.
constexpr int kProbesMax = 3;

/// Every scheduler would answer so.
constexpr grpc::StatusCode kOfCaller[] = {
    grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::OUT_OF_RANGE,
    grpc::StatusCode::ALREADY_EXISTS,   grpc::StatusCode::NOT_FOUND,
    grpc::StatusCode::UNAUTHENTICATED,  grpc::StatusCode::PERMISSION_DENIED,
    grpc::StatusCode::RESOURCE_EXHAUSTED};

/// Returns whether the same call may succeed later. To a probe it is no sign of life: a scheduler
/// that answers so leads no more.
inline bool is_passing(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::DEADLINE_EXCEEDED;
}

/// Returns a random part of a duration.
inline milliseconds randomly(milliseconds most) {
  thread_local absl::BitGen random;
  return milliseconds(absl::Uniform(absl::IntervalClosed, random, 0, most.count()));
}

/// Makes unary calls, each target by one channel that all calls share. With several targets it asks
/// one after the other, until the deadline of the call, and for at most a set time without one that
/// leads.
class Links {
 public:
  Links(const std::string& targets, Options options)
      : options_(std::move(options)), targets_(targets), fence_(Fence::of(targets_.all())) {
    for (const std::string& target : targets_.all()) {
      links_[target] = connect(target);
    }
    watch_ = std::async(std::launch::async, [this] { watch(); });
  }

  ~Links() {
    stop_.set_value();
    probes_.withdraw();
  }

  /// Makes a call that its own withdrawal ends, and `stop`.
  std::optional<CallError> call(const Unary& unary, const CallOptions& options, Withdrawal& stop) {
    auto away_since = Clock::now();
    const auto deadline = options.timeout ? away_since + *options.timeout : kNever;
    while (true) {
      const std::string target = targets_.ask();
      const auto began = Clock::now();
      const CallError error = attempt(target, unary, options, deadline, stop);
      const auto now = Clock::now();
      if (error.code == grpc::StatusCode::OK) {
        targets_.answered();
        return std::nullopt;
      }
      // gRPC may end a call a moment before its deadline.
      if (!targets_.several() || absl::c_linear_search(kOfCaller, error.code) ||
          deadline - now < milliseconds(1) || stop.is_withdrawn() ||
          (options.withdrawal && options.withdrawal->is_withdrawn())) {
        return error;
      }
      if (now - began > options_.failover_wait) {  // It was held by one that answered until then.
        away_since = now;
      }
      const bool is_silent = error.code == grpc::StatusCode::DEADLINE_EXCEEDED;
      const auto pause = randomly(targets_.move_on(
          target, error.leader, now, is_silent ? options_.silent_after : milliseconds(0)));
      if (now - away_since > options_.failover_wait) {
        return error;
      }
      std::this_thread::sleep_until(std::min(now + pause, deadline));
    }
  }

 private:
  struct Link {
    const std::shared_ptr<grpc::Channel> channel;
    Withdrawal held;  // Ends the calls that may be held for long.
    int missed = 0;   // Probes in a row.
  };

  static constexpr auto kNever = Clock::time_point::max();

  /// Makes a call at one target; the code is OK if that answers, and leads.
  CallError attempt(const std::string& target, const Unary& unary, const CallOptions& options,
                    Clock::time_point deadline, Withdrawal& stop) {
    grpc::ClientContext context;
    for (const auto& [key, value] : options.metadata) {
      context.AddMetadata(key, value);
    }
    if (!options_.token.empty()) {
      context.AddMetadata("authorization", "Bearer " + options_.token);
    }
    if (const auto term = fence_->latest(); term > 0) {
      context.AddMetadata("schedsvc-term", std::to_string(term));
    }
    // An Admit may be held for long, so it is watched. Others are answered at once.
    const bool is_held = unary.response->GetDescriptor() == v1::AdmitResponse::descriptor();
    if (targets_.several() && !is_held) {
      deadline = std::min(deadline, Clock::now() + options_.silent_after);
    }
    if (deadline != kNever) {
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::ceil<milliseconds>(deadline - Clock::now()));
    }
    const auto link = std::atomic_load(&links_.at(target));
    const auto stopped = stop.hold(context);
    const auto withdrawn = options.withdrawal ? options.withdrawal->hold(context) : nullptr;
    const auto held = is_held ? link->held.hold(context) : nullptr;
    const grpc::Status status = unary.attempt(link->channel, &context);
    const std::string& named = unary.response->GetDescriptor()->name();
    CallError error(named.substr(0, named.rfind("Response")), status);
    const auto& trailer = context.GetServerTrailingMetadata();
    if (const auto leader = trailer.find("schedsvc-leader"); leader != trailer.end()) {
      error.leader.assign(leader->second.data(), leader->second.size());
    }
    if (status.ok() && !is_obeyed(*unary.response)) {
      error.code = grpc::StatusCode::UNAVAILABLE;
      error.message = absl::StrCat(target, " answers under a term that is over, for ",
                                   fence_->latest(), " is known");
    }
    return error;
  }

  /// Returns whether an answer counts: one of a scheduler that leads no more does not.
  bool is_obeyed(const google::protobuf::Message& response) {
    const auto* field = response.GetDescriptor()->FindFieldByName("leadership");
    return field == nullptr || fence_->obeys(dynamic_cast<const v1::Leadership&>(
                                   response.GetReflection()->GetMessage(response, field)));
  }

  std::shared_ptr<Link> connect(const std::string& target) const {
    grpc::ChannelArguments arguments = options_.arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);  // It bounds an attempt.
    // After a silence a new channel must not get the connection that has become silent.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    // gRPC would ask the proxy of the environment, even for a loopback address.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return std::shared_ptr<Link>(
        new Link{options_.connect(target, options_.credentials, arguments), {}});
  }

  /// Asks several schedulers for signs of life while they hold calls, and hangs up after too many
  /// probes without an answer. Each probe has its own deadline, so a process that stood still loses
  /// one probe at most.
  void watch() {
    const auto step = options_.silent_after / kProbesMax;
    const auto stopped = stop_.get_future();
    const v1::ProgressRequest nothing;
    v1::ProgressResponse response;
    const auto probe = unary(&v1::SchedulerService::Stub::Progress, nothing, response);
    auto due = Clock::now() + step;
    while (targets_.several() && stopped.wait_until(due) == std::future_status::timeout) {
      due = Clock::now() + step;
      for (auto& [target, link] : links_) {
        const bool is_missed = link->held.holds_any() &&
                               is_passing(attempt(target, probe, {}, due, probes_).code);
        link->missed = is_missed ? link->missed + 1 : 0;
        if (link->missed == kProbesMax) {
          targets_.move_on(target, "", Clock::now(), options_.silent_after);
          std::atomic_exchange(&link, connect(target))->held.withdraw();
        }
      }
    }
  }

  const Options options_;
  Targets targets_;
  const std::shared_ptr<Fence> fence_;
  std::map<std::string, std::shared_ptr<Link>> links_;  // Each is read and changed atomically.
  Withdrawal probes_;
  std::promise<void> stop_;
  std::future<void> watch_;  // Is the last one, because its destructor waits for the thread.
};

}  // namespace schedsvc
