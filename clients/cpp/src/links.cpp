#include "links.h"

#include <algorithm>
#include <random>

#include "errors.h"

namespace schedsvc {
namespace {

/// Returns whether a target is on this host by its name. gRPC would ask the proxy of the
/// environment even for a loopback address.
bool is_local(const std::string& target) {
  const auto begins = [&target](const char* part) { return target.rfind(part, 0) == 0; };
  return begins("unix:") || begins("unix-abstract:") || begins("localhost:") || begins("127.") ||
         begins("ipv4:127.") || begins("[::1]:") || begins("dns:///localhost:");
}

bool is_over(const std::optional<Clock::time_point>& deadline) {
  // gRPC may end a call a moment before its deadline.
  return deadline && *deadline - Clock::now() < milliseconds(1);
}

}  // namespace

milliseconds randomly(milliseconds most) {
  thread_local std::minstd_rand random(std::random_device{}());
  return milliseconds(std::uniform_int_distribution<milliseconds::rep>(0, most.count())(random));
}

Links::Links(const std::string& targets, Options options)
    : options_(std::move(options)), targets_(targets), fence_(Fence::of(targets_.all())) {
  for (const std::string& target : targets_.all()) {
    links_[target];
  }
  if (targets_.several()) {
    watching_ = std::thread([this] { watch(); });
  }
}

Links::~Links() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  changed_.notify_all();
  probes_.stop();
  if (watching_.joinable()) {
    watching_.join();
  }
}

std::optional<CallError> Links::call(const Unary& unary, const CallOptions& options, Stop& stop) {
  Deadline deadline;
  if (options.timeout) {
    deadline = Clock::now() + *options.timeout;
  }
  const auto is_given_up = [&] {
    return is_over(deadline) || stop.is_stopped() ||
           (options.withdrawal && options.withdrawal->is_withdrawn());
  };
  for (auto away_since = Clock::now();;) {
    const std::string target = targets_.ask();
    const auto began = Clock::now();
    const Answer answer = attempt(target, unary, options, deadline, stop);
    if (answer.status.ok()) {
      targets_.answered();
      return std::nullopt;
    }
    CallError error = call_error(unary.method, answer.status);
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
    std::this_thread::sleep_until(std::min(now + pause, deadline.value_or(now + pause)));
    if (is_given_up()) {
      return error;
    }
  }
}

Links::Answer Links::attempt(const std::string& target, const Unary& unary,
                             const CallOptions& options, Deadline deadline, Stop& stop) {
  grpc::ClientContext context;
  authorise(context, options);
  const bool is_watched = targets_.several() && unary.is_held;
  if (targets_.several() && !unary.is_held) {
    const auto silent = Clock::now() + options_.silent_after;
    deadline = std::min(deadline.value_or(silent), silent);
  }
  if (deadline) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::system_clock::duration>(
                             *deadline - Clock::now()));
  }
  const Stop::Call stopped(stop, context);
  std::optional<Stop::Call> withdrawn;
  if (options.withdrawal) {
    withdrawn.emplace(*options.withdrawal->stop(), context);
  }
  std::optional<Stop::Call> held;
  if (is_watched) {
    held.emplace(links_.at(target).held, context);
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  Answer answer;
  answer.status = unary.attempt(channel(target), context);
  const auto& trailer = context.GetServerTrailingMetadata();
  if (const auto leader = trailer.find("schedsvc-leader"); leader != trailer.end()) {
    answer.leader.assign(leader->second.data(), leader->second.size());
  }
  const v1::Leadership* leadership = answer.status.ok() ? unary.leadership() : nullptr;
  if (leadership != nullptr && !fence_->obeys(*leadership)) {
    answer.is_stale = true;
    answer.status = grpc::Status(
        grpc::StatusCode::UNAVAILABLE,
        target + " answers under term " + std::to_string(leadership->term()) + ", but " +
            std::to_string(fence_->latest()) + " is known");
  }
  return answer;
}

void Links::authorise(grpc::ClientContext& context, const CallOptions& options) const {
  for (const auto& [key, value] : options.metadata) {
    context.AddMetadata(key, value);
  }
  if (!options_.token.empty()) {
    context.AddMetadata("authorization", "Bearer " + options_.token);
  }
  if (const auto term = fence_->latest(); term > 0) {
    context.AddMetadata("schedsvc-term", std::to_string(term));
  }
}

std::shared_ptr<grpc::Channel> Links::channel(const std::string& target) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<grpc::Channel>& channel = links_.at(target).channel;
  if (channel == nullptr) {
    grpc::ChannelArguments arguments = options_.arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);  // It bounds an attempt.
    // After a silence a new channel must not get the connection that has become silent.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    if (is_local(target)) {
      arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    }
    const auto credentials =
        options_.credentials ? options_.credentials : grpc::InsecureChannelCredentials();
    channel = options_.connect(target, credentials, arguments);
  }
  return channel;
}

void Links::hang_up(const std::string& target) {
  {
    const std::lock_guard lock(mutex_);
    links_.at(target).channel = nullptr;
  }
  links_.at(target).held.break_off();
}

/// Asks schedulers for signs of life while they hold calls.
void Links::watch() {
  const auto step = options_.silent_after / kProbesMax;
  std::map<std::string, int> missed;
  std::unique_lock lock(mutex_);
  auto due = Clock::now() + step;
  while (!is_stopped_) {
    if (!holds_any()) {
      changed_.wait(lock);
      missed.clear();
      due = Clock::now() + step;
    } else if (changed_.wait_until(lock, due, [this] { return is_stopped_; })) {
      return;
    } else {
      due = Clock::now() + step;
      lock.unlock();
      for (const std::string& target : targets_.all()) {
        missed[target] = links_.at(target).held.is_busy() ? probe(target, missed[target]) : 0;
      }
      lock.lock();
    }
  }
}

bool Links::holds_any() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link.second.held.is_busy(); });
}

/// Hangs up after too many unanswered probes, and returns their new number. Each probe has its own
/// deadline, so a process that stood still loses one probe at most.
int Links::probe(const std::string& target, int missed) {
  const auto now = Clock::now();
  if (missed == kProbesMax) {
    targets_.move_on(target, "", now, options_.silent_after);
    hang_up(target);
    missed = 0;
  }
  const v1::ProgressRequest nothing;
  v1::ProgressResponse response;
  const auto unary = detail::unary(&v1::SchedulerService::Stub::Progress, nothing, response);
  const Answer answer =
      attempt(target, unary, {}, now + options_.silent_after / kProbesMax, probes_);
  const bool is_silent =
      answer.is_stale || answer.status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  return is_silent ? missed + 1 : 0;
}

}  // namespace schedsvc
