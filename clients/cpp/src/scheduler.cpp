#include <schedsvc/scheduler.h>

#include <condition_variable>
#include <shared_mutex>

#include <absl/status/status.h>
#include <absl/strings/str_format.h>
#include <google/protobuf/util/time_util.h>
#include <schedsvc/client/details.pb.h>
#include <schedsvc/v1/explain.grpc.pb.h>

#include "links.h"

namespace schedsvc {
namespace {

using Stub = v1::SchedulerService::Stub;

/// The scheduler refuses more prefix hashes of one request.
constexpr int kPrefixHashesMax = 4'096;
constexpr std::int64_t kTokensMax = std::int64_t{1} << 27;
/// Bounds one attempt to end a lease.
constexpr milliseconds kEndTimeout{5'000};
constexpr milliseconds kBackoffMax{2'000};
/// The scheduler keeps an expired lease for this time: past it a Complete is no longer repeated.
constexpr milliseconds kLeaseGrace{20'000};
/// Bounds how long the end of scope waits, and a withdrawn Admit for the return of its grant.
constexpr milliseconds kCloseWait{1'000};

/// The scheduler no longer knows such a lease as live. A state of a later version is no reason to
/// stop.
constexpr v1::LeaseState kLost[] = {v1::LEASE_STATE_UNKNOWN, v1::LEASE_STATE_VOID,
                                    v1::LEASE_STATE_ENDED};

CallError cancelled(const char* method, const char* why) {
  return {method, {grpc::StatusCode::CANCELLED, why}};
}

/// Returns the time between two renewals: two may be lost before a lease is.
milliseconds usual_pause(const Admission& lease) {
  return std::max(milliseconds(lease.grant.ttl_ms() / 3), milliseconds(1));
}

/// Copies the totals that are set, within the limits of the contract: a scheduler refuses the whole
/// report otherwise, and the lease of a Complete would live until its TTL.
void note(const Totals& totals, google::protobuf::Message& to) {
  for (const char* name : {"input_tokens", "cached_input_tokens", "output_tokens"}) {
    const auto* from = Totals::descriptor()->FindFieldByName(name);
    if (totals.GetReflection()->HasField(totals, from)) {
      const std::int64_t total = totals.GetReflection()->GetInt64(totals, from);
      to.GetReflection()->SetInt64(&to, to.GetDescriptor()->FindFieldByName(name),
                                   std::clamp(total, std::int64_t{0}, kTokensMax));
    }
  }
}

/// Reads a detail of this name, whatever package our message of it has.
template <class Message>
bool unpack(const google::protobuf::Any& detail, const char* name, Message& message) {
  return absl::EndsWith(detail.type_url(), name) && message.ParseFromString(detail.value());
}

}  // namespace

CallError::CallError(std::string of, const grpc::Status& status)
    : method(std::move(of)), code(status.error_code()), message(status.error_message()) {
  client::Status sent;
  sent.ParseFromString(status.error_details());  // If it cannot be read, there are no details.
  for (const google::protobuf::Any& detail : sent.details()) {
    if (client::BadRequest wrong; unpack(detail, "/google.rpc.BadRequest", wrong)) {
      for (const auto& field : wrong.field_violations()) {
        fields.push_back({field.field(), field.description()});
      }
    } else if (client::RetryInfo retry; unpack(detail, "/google.rpc.RetryInfo", retry)) {
      retry_after = std::chrono::milliseconds(
          google::protobuf::util::TimeUtil::DurationToMilliseconds(retry.retry_delay()));
    }
  }
}

std::string CallError::code_name() const {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::string CallError::text() const {
  std::string why;
  for (const FieldViolation& wrong : fields) {
    why += (why.empty() ? "" : "; ") + wrong.field + ": " + wrong.description;
  }
  return "schedsvc: " + method + ": " + code_name() + ": " + (fields.empty() ? message : why);
}

std::string Refused::text() const {
  return "schedsvc: refused: " + v1::Outcome_Name(outcome) + ": " + refusal.message();
}

/// Is what a Scheduler and its Admissions share. One thread renews all leases and repeats ends.
class Core : public std::enable_shared_from_this<Core> {
 public:
  using Lease = std::shared_ptr<Admission>;

  Core(const std::string& targets, Options options) : links_(targets, std::move(options)) {}

  std::optional<CallError> call(const Unary& unary, const CallOptions& options) {
    return links_.call(unary, options, calls_);
  }

  Verdict admit(v1::AdmitRequest& request, const CallOptions& options) {
    if (const int hashes = request.prefix_block_hashes_size(); hashes > kPrefixHashesMax) {
      const auto why = absl::StrCat("prefix_block_hashes: has ", hashes, " hashes; at most ",
                                    kPrefixHashesMax, " are allowed");
      return CallError("Admit", {grpc::StatusCode::INVALID_ARGUMENT, why});
    }
    if (request.request_id().empty()) {
      thread_local absl::BitGen random;
      const auto half = [] { return absl::Uniform<std::uint64_t>(random); };
      request.set_request_id(absl::StrFormat("%016x%016x", half(), half()));
    }
    if (const char* why = withdrawn(options)) {
      return cancelled("Admit", why);
    }
    const std::shared_lock asking(asking_);
    v1::AdmitResponse response;
    const auto error = links_.call(unary(&Stub::Admit, request, response), options, admits_);
    const char* why = withdrawn(options);
    if (!error && response.outcome() != v1::OUTCOME_GRANTED) {
      const bool is_known = v1::Outcome_IsValid(response.outcome());
      return Refused{request.request_id(), is_known ? response.outcome() : v1::OUTCOME_UNSPECIFIED,
                     response.refusal(), milliseconds(response.refusal().retry_after_ms()),
                     std::chrono::microseconds(response.queue_duration_us())};
    }
    if (!error && why == nullptr) {
      const auto lease = open(request, response);
      return Lease(lease.get(),
                   [lease](Admission*) { lease->end(v1::OUTCOME_CANCELLED, {}, kCloseWait); });
    }
    if (why != nullptr || error->code == grpc::StatusCode::CANCELLED ||
        error->code == grpc::StatusCode::DEADLINE_EXCEEDED) {
      give_back(request);
    }
    return why == nullptr ? *error : cancelled("Admit", why);
  }

  bool shutdown(milliseconds wait) {
    const auto until = Clock::now() + wait;
    admits_.withdraw();
    std::unique_lock lock(mutex_);
    const auto open = leases_;
    lock.unlock();
    for (const auto& lease : open) {
      lease->end(v1::OUTCOME_CANCELLED, {}, std::chrono::ceil<milliseconds>(until - Clock::now()));
    }
    std::unique_lock idle(asking_, until);
    lock.lock();
    const bool is_idle =
        changed_.wait_until(lock, until, [this] { return leases_.empty(); }) && idle;
    calls_.withdraw();
    changed_.notify_all();
    lock.unlock();
    keeper_.wait();
    if (!idle) {
      idle.lock();
    }
    lock.lock();
    while (!leases_.empty()) {
      close(*leases_.begin(), cancelled("Complete", "the Scheduler was shut down"));
    }
    renewals_.clear();
    ends_.clear();
    return is_idle;
  }

  /// Sends the end of a lease once, and repeats it later until the scheduler has it, or the lease
  /// has surely expired.
  void deliver(const Lease& lease, milliseconds timeout) {
    v1::CompleteResponse response;
    const auto error = call(unary(&Stub::Complete, *lease->end_, response), {timeout, {}, {}});
    const auto pause = lease->backoff_ / 2 + randomly(lease->backoff_ / 2);
    lease->backoff_ = std::min(2 * lease->backoff_, kBackoffMax);
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (error && is_passing(error->code) && now < lease->expiry_ && !calls_.is_withdrawn()) {
      ends_.emplace(now + pause, lease);
    } else {
      close(lease, error ? Books(*error) : Books(response));
    }
    changed_.notify_all();
  }

 private:
  using Queue = std::multimap<Clock::time_point, Lease>;

  /// Returns why an Admit was withdrawn; null: it was not.
  const char* withdrawn(const CallOptions& options) const {
    if (admits_.is_withdrawn()) {
      return "the Scheduler was shut down";
    }
    return options.withdrawal && options.withdrawal->is_withdrawn() ? "it was withdrawn" : nullptr;
  }

  Lease open(const v1::AdmitRequest& request, const v1::AdmitResponse& response) {
    const auto lease =
        std::make_shared<Admission>(shared_from_this(), request.request_id(), response);
    const std::lock_guard lock(mutex_);
    leases_.insert(lease);
    renewals_.emplace(Clock::now() + usual_pause(*lease), lease);
    changed_.notify_all();
    return lease;
  }

  /// Its caller holds the lock.
  void close(Lease lease, Books books) {
    if (leases_.erase(lease) > 0) {
      lease->books_.set_value(std::move(books));
    }
  }

  /// Returns a grant that was on its way when its request was withdrawn. The lease of one that
  /// cannot be returned expires.
  void give_back(v1::AdmitRequest& request) {
    v1::ExplainRequest question;
    question.set_request_id(request.request_id());
    question.set_tenant(request.tenant());
    v1::ExplainResponse found;
    const CallOptions options{kCloseWait, {}, {}};
    call(unary(&v1::ExplainService::Stub::Explain, question, found), options);
    const auto is_live = [](const auto& story) { return story.state() == v1::REQUEST_STATE_LIVE; };
    request.set_queue_ttl_ms(1);  // A repeat gets the same grant.
    v1::AdmitResponse response;
    if (absl::c_any_of(found.requests(), is_live) &&
        !call(unary(&Stub::Admit, request, response), options) && response.has_grant()) {
      open(request, response)->give_back(kCloseWait);
    }
  }

  /// Takes what is due out of a queue; null: nothing is. Its caller holds the lock.
  static Lease take(Queue& queue) {
    const bool is_due = !queue.empty() && queue.begin()->first <= Clock::now();
    return is_due ? queue.extract(queue.begin()).mapped() : nullptr;
  }

  /// Does what is due: renewals before any end, however many wait.
  void keep() {
    const auto next = [](const Queue& queue) {
      return queue.empty() ? Clock::now() + std::chrono::hours(1) : queue.begin()->first;
    };
    std::unique_lock lock(mutex_);
    while (!calls_.is_withdrawn()) {
      changed_.wait_until(lock, std::min(next(renewals_), next(ends_)));
      const Lease running = take(renewals_);
      const Lease ended = running ? nullptr : take(ends_);
      lock.unlock();
      if (running) {
        renew(running);
      } else if (ended) {
        deliver(ended, kEndTimeout);
      }
      lock.lock();
    }
  }

  /// Sends what is known of the totals, unless the lease needs no more renewals.
  void renew(const Lease& lease) {
    const auto began = Clock::now();
    const auto usual = usual_pause(*lease);
    v1::ProgressRequest request;
    v1::ProgressResponse response;
    std::unique_lock reporting(lease->mutex_);
    if (lease->end_ || lease->lost_) {
      return;
    }
    *request.add_leases() = lease->report_;
    reporting.unlock();
    const auto error = call(unary(&Stub::Progress, request, response), {usual, {}, {}});
    for (const v1::LeaseStatus& status : response.leases()) {
      if (!error && absl::c_linear_search(kLost, status.state())) {
        lease->lose(status.state());
      }
    }
    const std::lock_guard lock(mutex_);
    renewals_.emplace(error ? Clock::now() + usual / 8 : began + usual, lease);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Lease> leases_;  // That have not ended.
  Queue renewals_;
  Queue ends_;  // To be repeated.
  std::shared_timed_mutex asking_;  // Is shared by the Admits under way.
  Withdrawal admits_;  // Ends Admits.
  Withdrawal calls_;  // Ends all other calls, and the thread.
  Links links_;
  // It is the last one, because its thread uses the others.
  std::future<void> keeper_ = std::async(std::launch::async, [this] { keep(); });
};

Admission::Admission(std::shared_ptr<Core> core, std::string id, const v1::AdmitResponse& response)
    : request_id(std::move(id)),
      grant(response.grant()),
      queue_duration(response.queue_duration_us()),
      core_(std::move(core)) {
  report_.set_lease_id(grant.lease_id());
  report_.set_pool_epoch(grant.pool_epoch());
}

void Admission::report(const Totals& totals) {
  const std::lock_guard lock(mutex_);
  note(totals, report_);
}

std::optional<std::string> Admission::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Admission::on_lost(std::function<void()> stop) {
  const std::lock_guard losing(losing_);
  if (lost()) {
    stop();
  } else {
    stop_ = std::move(stop);
  }
}

void Admission::lose(v1::LeaseState state) {
  const std::lock_guard losing(losing_);
  std::unique_lock lock(mutex_);
  if (end_) {
    return;
  }
  lost_ = absl::StrCat("schedsvc: lease ", grant.lease_id(), " is ", v1::LeaseState_Name(state));
  lock.unlock();
  if (const auto stop = std::exchange(stop_, nullptr)) {
    stop();
  }
}

Books Admission::give_back(milliseconds wait) {
  Totals nothing;
  nothing.set_input_tokens(0);
  nothing.set_cached_input_tokens(0);
  nothing.set_output_tokens(0);
  return end(v1::OUTCOME_CANCELLED, nothing, wait);
}

/// Ends the lease if that has not begun, and waits for its books.
Books Admission::end(v1::Outcome outcome, const Totals& totals, milliseconds wait) {
  const auto until = Clock::now() + wait;
  std::unique_lock losing(losing_);
  std::unique_lock lock(mutex_);
  const bool begins = !end_.has_value();
  if (begins) {
    stop_ = nullptr;
    expiry_ = Clock::now() + milliseconds(grant.ttl_ms()) + kLeaseGrace;
    note(totals, report_);
    end_.emplace();
    end_->set_lease_id(grant.lease_id());
    end_->set_pool_epoch(grant.pool_epoch());
    end_->set_outcome(outcome);
    note(report_, *end_);
  }
  lock.unlock();
  losing.unlock();
  if (begins) {
    core_->deliver(shared_from_this(), std::min(wait, kEndTimeout));
  }
  if (ended_.wait_until(until) == std::future_status::ready) {
    return ended_.get();
  }
  return CallError("Complete", {grpc::StatusCode::DEADLINE_EXCEEDED,
                                "the scheduler has not answered yet; the client repeats the end"});
}

std::shared_ptr<void> Withdrawal::hold(grpc::ClientContext& context) {
  const std::lock_guard lock(mutex_);
  calls_.insert(&context);
  if (is_withdrawn_) {
    context.TryCancel();
  }
  return {&context, [this](grpc::ClientContext* ended) {
            const std::lock_guard erasing(mutex_);
            calls_.erase(ended);
          }};
}

Scheduler::Scheduler(const std::string& targets, Options options) {
  // Admissions may live longer than their Scheduler.
  const auto core = std::make_shared<Core>(targets, std::move(options));
  core_ = {core.get(), [core](Core*) { core->shutdown(kShutdownWait); }};
}

Verdict Scheduler::admit(v1::AdmitRequest request, const CallOptions& options) {
  return core_->admit(request, options);
}

bool Scheduler::shutdown(milliseconds wait) { return core_->shutdown(wait); }

std::optional<CallError> Scheduler::make(const Unary& unary, const CallOptions& options) {
  return core_->call(unary, options);
}

}  // namespace schedsvc
