#include "lease.h"

#include <algorithm>
#include <utility>

#include "core.h"

namespace schedsvc {
namespace {

constexpr milliseconds kCloseWait{1'000};
/// The scheduler keeps an expired lease for this time: past it a Complete is no longer repeated.
constexpr milliseconds kLeaseGrace{20'000};
constexpr std::int64_t kTokensMax = std::int64_t{1} << 27;

/// Brings a total within the limits of the contract: a scheduler refuses the whole report
/// otherwise, and the lease of a Complete would live until its TTL.
std::int64_t within(std::int64_t total) {
  return std::clamp(total, std::int64_t{0}, kTokensMax);
}

/// Returns a message that states the totals of a lease.
template <class Message>
Message stated(const v1::Grant& grant, const Totals& totals) {
  Message message;
  message.set_lease_id(grant.lease_id());
  message.set_pool_epoch(grant.pool_epoch());
  if (totals.input_tokens) {
    message.set_input_tokens(*totals.input_tokens);
  }
  if (totals.cached_input_tokens) {
    message.set_cached_input_tokens(*totals.cached_input_tokens);
  }
  if (totals.output_tokens) {
    message.set_output_tokens(*totals.output_tokens);
  }
  return message;
}

}  // namespace

Lease::Lease(std::shared_ptr<Core> core, std::string id, const v1::AdmitResponse& response)
    : request_id(std::move(id)),
      grant(response.grant()),
      queue_duration(response.queue_duration_us()),
      renew_backoff(kRenewBackoffMin),
      core_(std::move(core)) {}

void Lease::report(const Totals& totals) {
  const std::lock_guard lock(mutex_);
  if (totals.input_tokens) {
    totals_.input_tokens = within(*totals.input_tokens);
  }
  if (totals.cached_input_tokens) {
    totals_.cached_input_tokens = within(*totals.cached_input_tokens);
  }
  if (totals.output_tokens) {
    totals_.output_tokens = within(*totals.output_tokens);
  }
}

std::optional<v1::LeaseProgress> Lease::progress() const {
  const std::lock_guard lock(mutex_);
  return end_ ? std::nullopt : std::optional(stated<v1::LeaseProgress>(grant, totals_));
}

std::optional<std::string> Lease::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Lease::on_lost(std::function<void()> stop) {
  const std::lock_guard losing(losing_);
  {
    const std::lock_guard lock(mutex_);
    if (!lost_) {
      stop_ = std::move(stop);
      return;
    }
  }
  stop();
}

void Lease::lose(v1::LeaseState state) {
  const std::lock_guard losing(losing_);
  std::function<void()> stop;
  {
    const std::lock_guard lock(mutex_);
    if (end_) {
      return;
    }
    lost_ = "schedsvc: lease " + std::to_string(grant.lease_id()) + " is " +
            v1::LeaseState_Name(state);
    stop = std::move(stop_);
  }
  if (stop) {
    stop();
  }
}

bool Lease::begin_end(v1::Outcome outcome, bool is_unused) {
  const std::lock_guard losing(losing_);
  const std::lock_guard lock(mutex_);
  if (end_) {
    return false;
  }
  ended_at_ = Clock::now();
  stop_ = nullptr;
  end_ = stated<v1::CompleteRequest>(grant, is_unused ? Totals{0, 0, 0} : totals_);
  end_->set_outcome(outcome);
  return true;
}

v1::CompleteRequest Lease::end() const {
  const std::lock_guard lock(mutex_);
  return *end_;
}

Clock::time_point Lease::expired() const {
  const std::lock_guard lock(mutex_);
  return ended_at_ + ttl() + kLeaseGrace;
}

void Lease::finish(Books books) {
  const std::lock_guard lock(mutex_);
  books_ = std::move(books);
  finished_.notify_all();
}

Books Lease::settle(v1::Outcome outcome, bool is_unused, milliseconds wait) {
  const auto until = Clock::now() + wait;
  if (begin_end(outcome, is_unused)) {
    core_->deliver(shared_from_this(), std::min(wait, kEndTimeout), kEndBackoffMin);
  }
  std::unique_lock lock(mutex_);
  if (finished_.wait_until(lock, until, [this] { return books_.has_value(); })) {
    return *books_;
  }
  CallError error;
  error.method = "Complete";
  error.code = grpc::StatusCode::DEADLINE_EXCEEDED;
  error.message = "the scheduler has not answered yet; the client repeats the end";
  return error;
}

Admission::Admission(const std::shared_ptr<Lease>& lease)
    : lease_(lease.get(), [lease](Lease*) {
        lease->settle(v1::OUTCOME_CANCELLED, false, kCloseWait);
      }) {}

const std::string& Admission::request_id() const { return lease_->request_id; }

const v1::Grant& Admission::grant() const { return lease_->grant; }

std::chrono::microseconds Admission::queue_duration() const { return lease_->queue_duration; }

std::optional<std::string> Admission::lost() const { return lease_->lost(); }

void Admission::on_lost(std::function<void()> stop) { lease_->on_lost(std::move(stop)); }

void Admission::report(const Totals& totals) { lease_->report(totals); }

Books Admission::complete(const Totals& totals, std::chrono::milliseconds wait) {
  report(totals);
  return lease_->settle(v1::OUTCOME_COMPLETED, false, wait);
}

Books Admission::cancel(const Totals& totals, std::chrono::milliseconds wait) {
  report(totals);
  return lease_->settle(v1::OUTCOME_CANCELLED, false, wait);
}

Books Admission::give_back(std::chrono::milliseconds wait) {
  return lease_->settle(v1::OUTCOME_CANCELLED, true, wait);
}

}  // namespace schedsvc
