#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <schedsvc/v1/leader.pb.h>

namespace schedsvc {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kTargetsMax = 16;
constexpr std::size_t kFencesMax = 1024;
/// The longest pause before the next attempt, and for a time after the leader was named.
constexpr milliseconds kPauseMax{200};
constexpr milliseconds kNamedPauseMax{20};

/// Decides which of several schedulers a client asks.
class Targets {
 public:
  /// Reads a list that is separated by commas.
  explicit Targets(const std::string& list);

  const std::vector<std::string>& all() const { return all_; }
  bool several() const { return all_.size() > 1; }
  /// Returns the target to ask now.
  std::string ask() const;
  /// Notes that the current target serves this client.
  void answered();
  /// Leaves a target that failed. The next one is the leader that it named, if that one is in the
  /// list and has not failed itself. A target that gave no answer is passed over for the time
  /// `silent` while others answer. There is no effect if another call has moved on already. Returns
  /// the longest pause before the next attempt.
  milliseconds move_on(const std::string& failed, const std::string& leader, Clock::time_point now,
                       milliseconds silent);

 private:
  void choose(const std::string& failed, const std::string& leader, Clock::time_point now);

  std::vector<std::string> all_;
  mutable std::mutex mutex_;
  std::string current_;
  std::set<std::string> failed_;
  std::map<std::string, Clock::time_point> silent_until_;
  std::string named_;
  Clock::time_point named_since_;
  Clock::time_point quick_until_;
};

/// Keeps the highest leadership that this process has seen. The term is compared first. An equal
/// term of another leader, and a lower term, are not obeyed. With several targets an answer without
/// a leadership counts as term 0.
class Fence {
 public:
  explicit Fence(bool is_strict) : is_strict_(is_strict) {}
  /// Returns whether an answer under this leadership has an effect, and notes a higher one.
  bool obeys(const v1::Leadership& leadership);
  /// Returns the highest term.
  std::uint64_t latest() const;
  /// Returns this process's fence for the schedulers of a list, in whatever order.
  static std::shared_ptr<Fence> of(std::vector<std::string> all);

 private:
  const bool is_strict_;
  mutable std::mutex mutex_;
  std::uint64_t term_ = 0;
  std::string leader_;
};

}  // namespace schedsvc
