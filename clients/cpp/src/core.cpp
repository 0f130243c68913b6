#include "core.h"

#include <algorithm>
#include <random>
#include <thread>
#include <unordered_map>

#include <schedsvc/v1/explain.grpc.pb.h>

#include "errors.h"
#include "lease.h"

namespace schedsvc {
namespace {

/// The scheduler refuses more prefix hashes of one request.
constexpr int kPrefixHashesMax = 4'096;
constexpr milliseconds kEndBackoffMax{2'000};
/// Bounds how long a withdrawn Admit looks for a grant that was on its way; the rest goes on behind
/// it.
constexpr milliseconds kGiveBackTimeout{1'000};
constexpr milliseconds kGiveBackPause{20};

CallError failed(const char* method, grpc::StatusCode code, const std::string& message) {
  return call_error(method, grpc::Status(code, message));
}

std::string new_request_id() {
  std::random_device random;
  std::string id;
  for (int at = 0; at < 32; ++at) {
    id += "0123456789abcdef"[random() % 16];
  }
  return id;
}

milliseconds usual_pause(const Lease& lease) {
  return std::max(lease.ttl() / 3, milliseconds(1));
}

/// Returns whether the scheduler no longer knows a lease as live. A state of a later version is no
/// reason to stop.
bool is_lost(v1::LeaseState state) {
  return state == v1::LEASE_STATE_UNKNOWN || state == v1::LEASE_STATE_VOID ||
         state == v1::LEASE_STATE_ENDED;
}

}  // namespace

Core::Core(const std::string& targets, Options options)
    : links_(targets, std::move(options)), keeper_([this](const Leases& due) { renew(due); }) {}

std::optional<CallError> Core::call(const Unary& unary, const CallOptions& options) {
  return links_.call(unary, options, calls_);
}

Verdict Core::admit(v1::AdmitRequest request, const CallOptions& options) {
  if (request.prefix_block_hashes_size() > kPrefixHashesMax) {
    return failed("Admit", grpc::StatusCode::INVALID_ARGUMENT,
                  "prefix_block_hashes: has " + std::to_string(request.prefix_block_hashes_size()) +
                      " hashes; at most " + std::to_string(kPrefixHashesMax) + " are allowed");
  }
  if (options.withdrawal && options.withdrawal->is_withdrawn()) {
    return failed("Admit", grpc::StatusCode::CANCELLED, "it was withdrawn before it was sent");
  }
  if (request.request_id().empty()) {
    request.set_request_id(new_request_id());
  }
  if (!begin()) {
    return failed("Admit", grpc::StatusCode::CANCELLED, "the Scheduler was shut down");
  }
  Verdict verdict = judge(request, options);
  finish();
  return verdict;
}

Verdict Core::judge(const v1::AdmitRequest& request, const CallOptions& options) {
  v1::AdmitResponse response;
  auto error = ask(request, response, options, admits_);
  if (!error && response.outcome() != v1::OUTCOME_GRANTED) {
    return refused(request.request_id(), response);
  }
  const bool is_closed = admits_.is_stopped();
  const bool is_withdrawn =
      is_closed || (options.withdrawal && options.withdrawal->is_withdrawn());
  if (!error) {
    const auto lease = open(request, response);
    if (!is_withdrawn) {
      return Admission(lease);
    }
    return_unused(lease, kGiveBackTimeout);
  } else if (is_withdrawn || error->code == grpc::StatusCode::CANCELLED ||
             error->code == grpc::StatusCode::DEADLINE_EXCEEDED) {
    give_back(request, kGiveBackTimeout);
  }
  if (!is_withdrawn) {
    return *std::move(error);
  }
  return failed("Admit", grpc::StatusCode::CANCELLED,
                is_closed ? "the Scheduler was shut down" : "it was withdrawn");
}

std::optional<CallError> Core::ask(const v1::AdmitRequest& request, v1::AdmitResponse& response,
                                   const CallOptions& options, Stop& stop) {
  return links_.call(detail::unary(&v1::SchedulerService::Stub::Admit, request, response), options,
                     stop);
}

std::shared_ptr<Lease> Core::open(const v1::AdmitRequest& request,
                                  const v1::AdmitResponse& response) {
  auto lease = std::make_shared<Lease>(shared_from_this(), request.request_id(), response);
  {
    const std::lock_guard lock(mutex_);
    leases_.insert(lease);
  }
  keeper_.renew_at(Clock::now() + usual_pause(*lease), lease);
  return lease;
}

void Core::close(const std::shared_ptr<Lease>& lease, Books books) {
  lease->finish(std::move(books));
  const std::lock_guard lock(mutex_);
  leases_.erase(lease);
  idle_.notify_all();
}

void Core::return_unused(const std::shared_ptr<Lease>& lease, milliseconds timeout) {
  if (lease->begin_end(v1::OUTCOME_CANCELLED, true)) {
    deliver(lease, timeout, kEndBackoffMin);
  }
}

void Core::deliver(const std::shared_ptr<Lease>& lease, milliseconds timeout,
                   milliseconds backoff) {
  CallOptions options;
  options.timeout = timeout;
  const v1::CompleteRequest request = lease->end();
  v1::CompleteResponse response;
  auto error =
      call(detail::unary(&v1::SchedulerService::Stub::Complete, request, response), options);
  if (!error) {
    close(lease, std::move(response));
    return;
  }
  const auto now = Clock::now();
  const auto repeat = [this, lease, next = std::min(2 * backoff, kEndBackoffMax)] {
    deliver(lease, kEndTimeout, next);
  };
  if (!is_passing(error->code) || now > lease->expired() ||
      !keeper_.at(now + backoff / 2 + randomly(backoff / 2), repeat)) {
    close(lease, *std::move(error));
  }
}

/// Returns a grant that was on its way when its request was withdrawn. The lease of one that cannot
/// be returned expires.
void Core::give_back(const v1::AdmitRequest& request, milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  CallOptions options;
  options.timeout = timeout;
  v1::ExplainRequest question;
  question.set_request_id(request.request_id());
  question.set_tenant(request.tenant());
  while (Clock::now() < until) {
    v1::ExplainResponse found;
    if (call(detail::unary(&v1::ExplainService::Stub::Explain, question, found), options)) {
      break;
    }
    const auto is = [&found](v1::RequestState state) {
      return std::any_of(found.requests().begin(), found.requests().end(),
                         [state](const auto& story) { return story.state() == state; });
    };
    if (is(v1::REQUEST_STATE_LIVE)) {
      v1::AdmitRequest again = request;  // A repeat gets the same grant.
      again.set_queue_ttl_ms(1);
      v1::AdmitResponse response;
      if (!ask(again, response, options, calls_) && response.outcome() == v1::OUTCOME_GRANTED) {
        return_unused(open(again, response), timeout);
      }
      return;
    }
    if (!is(v1::REQUEST_STATE_QUEUED)) {
      return;
    }
    std::this_thread::sleep_for(kGiveBackPause);  // The withdrawal has not arrived yet.
  }
  if (timeout < kEndTimeout) {
    {
      const std::lock_guard lock(mutex_);
      ++asking_;
    }
    const auto later = [this, request] {
      give_back(request, kEndTimeout);
      finish();
    };
    if (!keeper_.at(Clock::now(), later)) {
      finish();
    }
  }
}

/// Reports the totals every third of the TTL, so that two renewals may be lost before a lease is.
void Core::renew(const Leases& leases) {
  const auto began = Clock::now();
  Leases renewed;
  v1::ProgressRequest request;
  CallOptions options;
  for (const auto& lease : leases) {
    if (const auto progress = lease->progress()) {
      *request.add_leases() = *progress;
      renewed.push_back(lease);
      const auto usual = usual_pause(*lease);
      options.timeout = std::min(options.timeout.value_or(usual), usual);
    }
  }
  if (renewed.empty()) {
    return;
  }
  v1::ProgressResponse response;
  const bool is_failed =
      call(detail::unary(&v1::SchedulerService::Stub::Progress, request, response), options)
          .has_value();
  std::unordered_map<std::uint64_t, v1::LeaseState> states;
  for (const v1::LeaseStatus& status : response.leases()) {
    states[status.lease_id()] = status.state();
  }
  for (const auto& lease : renewed) {
    const auto usual = usual_pause(*lease);
    const auto found = states.find(lease->grant.lease_id());
    if (is_failed && lease->renew_backoff < usual) {
      keeper_.renew_at(Clock::now() + lease->renew_backoff, lease);
      lease->renew_backoff *= 2;
    } else if (!is_failed && found != states.end() && is_lost(found->second)) {
      lease->lose(found->second);
    } else {
      lease->renew_backoff = kRenewBackoffMin;
      keeper_.renew_at(began + usual, lease);
    }
  }
}

bool Core::begin() {
  const std::lock_guard lock(mutex_);
  asking_ += is_closed_ ? 0 : 1;
  return !is_closed_;
}

void Core::finish() {
  const std::lock_guard lock(mutex_);
  --asking_;
  idle_.notify_all();
}

bool Core::shutdown(milliseconds wait) {
  const auto until = Clock::now() + wait;
  admits_.stop();
  std::set<std::shared_ptr<Lease>> open;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    open = leases_;
  }
  for (const auto& lease : open) {
    if (lease->begin_end(v1::OUTCOME_CANCELLED, false)) {
      keeper_.at(Clock::now(), [=] { deliver(lease, kEndTimeout, kEndBackoffMin); });
    }
  }
  bool is_idle = false;
  {
    std::unique_lock lock(mutex_);
    is_idle = idle_.wait_until(lock, until, [this] { return asking_ == 0 && leases_.empty(); });
    open = leases_;
  }
  calls_.stop();
  keeper_.stop();
  for (const auto& lease : open) {
    close(lease, failed("Complete", grpc::StatusCode::CANCELLED, "the Scheduler was shut down"));
  }
  return is_idle;
}

}  // namespace schedsvc
