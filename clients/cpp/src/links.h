#pragma once

#include <absl/random/random.h>
#include <absl/strings/match.h>
#include <schedsvc/scheduler.h>

#include <thread>

#include "targets.h"

namespace schedsvc {

/// After this number of unanswered probes in a row a scheduler that holds a call is silent.
constexpr int kProbesMax = 3;

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
    if (targets_.several()) {
      watch_ = std::async(std::launch::async, [this] { watch(); });
    }
  }

  ~Links() {
    stop_.set_value();
    probes_.withdraw();
  }

  /// Makes a call that its own withdrawal ends, and `stop`.
  std::optional<CallError> call(const Unary& unary, const CallOptions& options, Withdrawal& stop) {
    auto away_since = Clock::now();
    const auto deadline = options.timeout ? away_since + *options.timeout : kNever;
    const auto is_given_up = [&] {
      // gRPC may end a call a moment before its deadline.
      return deadline - Clock::now() < milliseconds(1) || stop.is_withdrawn() ||
             (options.withdrawal && options.withdrawal->is_withdrawn());
    };
    while (true) {
      const std::string target = targets_.ask();
      const auto began = Clock::now();
      const Answer answer = attempt(target, unary, options, deadline, stop);
      if (answer.status.ok()) {
        targets_.answered();
        return std::nullopt;
      }
      const std::string& named = unary.response->GetDescriptor()->name();
      CallError error(named.substr(0, named.rfind("Response")), answer.status);
      error.leader = answer.leader;
      if (!targets_.several() || is_of_caller(error.code) || is_given_up()) {
        return error;
      }
      const auto now = Clock::now();
      const bool is_silent = error.code == grpc::StatusCode::DEADLINE_EXCEEDED;
      if (now - began > options_.failover_wait) {  // It was held by one that answered until then.
        away_since = now;
      }
      const auto pause = randomly(targets_.move_on(
          target, error.leader, now, is_silent ? options_.silent_after : milliseconds(0)));
      if (now - away_since > options_.failover_wait) {
        return error;
      }
      std::this_thread::sleep_until(std::min(now + pause, deadline));
      if (is_given_up()) {
        return error;
      }
    }
  }

 private:
  struct Link {
    std::shared_ptr<grpc::Channel> channel;
    Withdrawal held;  // Ends the calls that may be held for long.
    int missed = 0;  // Probes in a row.
  };
  struct Answer {
    grpc::Status status;
    std::string leader;
    bool is_stale = false;  // It came under a term that is over.
  };

  static constexpr auto kNever = Clock::time_point::max();

  /// Returns whether every scheduler would answer so.
  static bool is_of_caller(grpc::StatusCode code) {
    using grpc::StatusCode;
    static const std::set<StatusCode> kOfCaller = {
        StatusCode::INVALID_ARGUMENT, StatusCode::OUT_OF_RANGE,    StatusCode::ALREADY_EXISTS,
        StatusCode::NOT_FOUND,        StatusCode::UNAUTHENTICATED, StatusCode::PERMISSION_DENIED,
        StatusCode::RESOURCE_EXHAUSTED};
    return kOfCaller.count(code) > 0;
  }

  /// Returns whether a target is on this host by its name. gRPC would ask the proxy of the
  /// environment even for a loopback address.
  static bool is_local(const std::string& target) {
    const auto begins = [&target](const char* part) { return absl::StartsWith(target, part); };
    return begins("unix:") || begins("unix-abstract:") || begins("localhost:") ||
           begins("127.") || begins("ipv4:127.") || begins("[::1]:") ||
           begins("dns:///localhost:");
  }

  Answer attempt(const std::string& target, const Unary& unary, const CallOptions& options,
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
    const auto link = link_to(target);
    const auto stopped = stop.hold(context);
    const auto withdrawn = options.withdrawal ? options.withdrawal->hold(context) : nullptr;
    const auto held = is_held ? link->held.hold(context) : nullptr;
    Answer answer;
    answer.status = unary.attempt(link->channel, &context);
    const auto& trailer = context.GetServerTrailingMetadata();
    if (const auto leader = trailer.find("schedsvc-leader"); leader != trailer.end()) {
      answer.leader.assign(leader->second.data(), leader->second.size());
    }
    if (answer.status.ok()) {
      check_term(target, *unary.response, answer);
    }
    return answer;
  }

  /// Drops an answer of a scheduler that leads no more.
  void check_term(const std::string& target, const google::protobuf::Message& response,
                  Answer& answer) {
    const auto* field = response.GetDescriptor()->FindFieldByName("leadership");
    if (field == nullptr) {
      return;
    }
    const auto& leadership = dynamic_cast<const v1::Leadership&>(
        response.GetReflection()->GetMessage(response, field));
    if (!fence_->obeys(leadership)) {
      answer.is_stale = true;
      answer.status = {grpc::StatusCode::UNAVAILABLE,
                       absl::StrCat(target, " answers under term ", leadership.term(), ", but ",
                                    fence_->latest(), " is known")};
    }
  }

  std::shared_ptr<Link> link_to(const std::string& target) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Link>& link = links_[target];
    if (link == nullptr) {
      grpc::ChannelArguments arguments = options_.arguments;
      arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
      arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
      arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);  // It bounds an attempt.
      // After a silence a new channel must not get the connection that has become silent.
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      if (is_local(target)) {
        arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
      }
      link = std::make_shared<Link>();
      link->channel = options_.connect(target, options_.credentials, arguments);
    }
    return link;
  }

  /// Asks schedulers for signs of life while they hold calls, and hangs up after too many probes
  /// without an answer. Each probe has its own deadline, so a process that stood still loses one
  /// probe at most.
  void watch() {
    const auto step = options_.silent_after / kProbesMax;
    const auto stopped = stop_.get_future();
    auto due = Clock::now() + step;
    while (stopped.wait_until(due) == std::future_status::timeout) {
      due = Clock::now() + step;
      std::unique_lock lock(mutex_);
      const auto links = links_;
      lock.unlock();
      for (const auto& [target, link] : links) {
        if (!link->held.holds_any() || !is_silent(target, due)) {
          link->missed = 0;
        } else if (++link->missed == kProbesMax) {
          targets_.move_on(target, "", Clock::now(), options_.silent_after);
          lock.lock();
          links_.erase(target);
          lock.unlock();
          link->held.withdraw();
        }
      }
    }
  }

  bool is_silent(const std::string& target, Clock::time_point due) {
    const v1::ProgressRequest nothing;
    v1::ProgressResponse response;
    const auto probe = unary(&v1::SchedulerService::Stub::Progress, nothing, response);
    const Answer answer = attempt(target, probe, {}, due, probes_);
    return answer.is_stale || answer.status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  }

  const Options options_;
  Targets targets_;
  const std::shared_ptr<Fence> fence_;
  std::mutex mutex_;  // Guards the links.
  std::map<std::string, std::shared_ptr<Link>> links_;
  Withdrawal probes_;
  std::promise<void> stop_;
  std::future<void> watch_;  // Is the last one, because its destructor waits for the thread.
};

}  // namespace schedsvc
