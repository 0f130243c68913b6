/// The right of one request to run on an engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include <schedsvc/errors.h>
#include <schedsvc/v1/scheduler.pb.h>

namespace schedsvc {

class Lease;

/// Are running totals of a request, never differences. An absent one is not known.
struct Totals {
  std::optional<std::int64_t> input_tokens;
  std::optional<std::int64_t> cached_input_tokens;
  std::optional<std::int64_t> output_tokens;
};

/// Is what a lease was charged at its end, or why the scheduler did not say it.
using Books = std::variant<v1::CompleteResponse, CallError>;

/// Is a granted request, and can only be moved. It is renewed in the background until it ends. Its
/// end of scope cancels what has not ended, and waits for that for a second at most. Several
/// threads can call its functions, but not move or destroy it.
class [[nodiscard]] Admission {
 public:
  /// Is how long an end waits for the scheduler. The client repeats the end behind it, until the
  /// lease has surely expired.
  static constexpr std::chrono::milliseconds kEndWait{10'000};

  explicit Admission(const std::shared_ptr<Lease>& lease);

  /// Returns the id by which Explain knows the request.
  const std::string& request_id() const;
  /// Returns the lease, its pool, and what is reserved.
  const v1::Grant& grant() const;
  std::chrono::microseconds queue_duration() const;

  /// Returns the reason if the scheduler no longer knows the lease as live: stop the engine's work.
  std::optional<std::string> lost() const;
  /// Calls a function once the lease is lost, at once if it is. It runs in the thread that renews,
  /// so it must not wait. It is not called after the end of the lease, and no longer runs then.
  void on_lost(std::function<void()> stop);

  /// Notes running totals. They are sent with the next renewal and with the end, so it costs
  /// nothing to call it for every token.
  void report(const Totals& totals);

  /// Ends the lease as done. The first end counts: another one returns the books of that one.
  Books complete(const Totals& totals = {}, std::chrono::milliseconds wait = kEndWait);
  /// Ends the lease before it was done. Without totals the request is charged for its time.
  Books cancel(const Totals& totals = {}, std::chrono::milliseconds wait = kEndWait);
  /// Cancels a lease whose request the engine never had. It costs nothing.
  Books give_back(std::chrono::milliseconds wait = kEndWait);

 private:
  /// Is null only after a move. Its deleter cancels the lease.
  std::unique_ptr<Lease, std::function<void(Lease*)>> lease_;
};

}  // namespace schedsvc
