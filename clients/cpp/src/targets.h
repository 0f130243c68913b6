#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <absl/algorithm/container.h>
#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <schedsvc/v1/leader.pb.h>

namespace schedsvc {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kTargetsMax = 16;
constexpr std::size_t kFencesMax = 1024;
/// The longest pause before the next attempt, and for a time after the leader was named.
constexpr milliseconds kPauseMax{200};
constexpr milliseconds kNamedPauseMax{20};
constexpr milliseconds kNamedFor{500};
/// The same name shortens the pauses again after this time, as a dead leader may be named.
constexpr milliseconds kNamedAgain{2'000};

/// Decides which of several schedulers a client asks.
class Targets {
 public:
  /// Reads a list that is separated by commas.
  explicit Targets(const std::string& list) {
    for (const auto part : absl::StrSplit(list, ',')) {
      const std::string target(absl::StripAsciiWhitespace(part));
      if (target.empty() || absl::c_linear_search(all_, target)) {
        throw std::invalid_argument(absl::StrCat("schedsvc: target \"", target, "\" of \"", list,
                                                 "\" is empty or listed twice"));
      }
      all_.push_back(target);
    }
    if (all_.size() > kTargetsMax) {
      throw std::invalid_argument(absl::StrCat("schedsvc: ", all_.size(),
                                               " targets are listed; list at most ", kTargetsMax));
    }
    current_ = all_.front();
  }

  const std::vector<std::string>& all() const { return all_; }
  bool several() const { return all_.size() > 1; }

  /// Returns the target to ask now.
  std::string ask() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }

  /// Notes that the current target serves this client.
  void answered() {
    const std::lock_guard lock(mutex_);
    failed_.clear();
    silent_until_.clear();
  }

  /// Leaves a target that failed. The next one is the leader that it named, if that one is in the
  /// list and has not failed itself. A target that gave no answer is passed over for the time
  /// `silent` while others answer. There is no effect if another call has moved on already. Returns
  /// the longest pause before the next attempt.
  milliseconds move_on(const std::string& failed, const std::string& leader, Clock::time_point now,
                       milliseconds silent) {
    const std::lock_guard lock(mutex_);
    if (failed == current_ && several()) {
      failed_.insert(failed);
      auto& silent_until = silent_until_[failed];
      silent_until = std::max(silent_until, now + silent);
      choose(leader, now);
    }
    return now - named_since_ < kNamedFor ? kNamedPauseMax : kPauseMax;
  }

 private:
  void choose(const std::string& leader, Clock::time_point now) {
    std::vector<std::string> ring = all_;
    std::rotate(ring.begin(), absl::c_find(ring, current_) + 1, ring.end());
    const auto answers = [&](const auto& target) { return silent_until_[target] <= now; };
    std::stable_partition(ring.begin(), ring.end(), answers);
    current_ = ring.front();
    if (absl::c_linear_search(ring, leader) && failed_.count(leader) == 0 && answers(leader)) {
      current_ = leader;
      if (leader != named_ || now - named_since_ >= kNamedAgain) {
        named_ = leader;
        named_since_ = now;
      }
    }
    if (failed_.size() == all_.size()) {
      failed_.clear();
    }
  }

  std::vector<std::string> all_;
  mutable std::mutex mutex_;
  std::string current_;
  std::set<std::string> failed_;
  std::map<std::string, Clock::time_point> silent_until_;
  std::string named_;
  Clock::time_point named_since_;
};

/// Keeps the highest leadership that this process has seen. The term is compared first. An equal
/// term of another leader, and a lower term, are not obeyed. With several targets an answer without
/// a leadership counts as term 0.
class Fence {
 public:
  explicit Fence(bool is_strict) : is_strict_(is_strict) {}

  /// Returns this process's fence for the schedulers of a list, in whatever order.
  static std::shared_ptr<Fence> of(const std::vector<std::string>& all) {
    static std::mutex mutex;
    static std::map<std::set<std::string>, std::shared_ptr<Fence>> fences;
    const std::set<std::string> key(all.begin(), all.end());
    const std::lock_guard lock(mutex);
    if (fences.count(key) == 0 && fences.size() >= kFencesMax) {
      fences.erase(fences.begin());
    }
    return fences.try_emplace(key, std::make_shared<Fence>(key.size() > 1)).first->second;
  }

  /// Returns whether an answer under this leadership has an effect, and notes a higher one.
  bool obeys(const v1::Leadership& leadership) {
    const std::lock_guard lock(mutex_);
    if (leadership.term() > term_) {
      term_ = leadership.term();
      leader_ = leadership.leader();
    }
    return leadership.term() == 0 ? !is_strict_ || term_ == 0
                                  : leadership.term() == term_ && leadership.leader() == leader_;
  }

  /// Returns the highest term.
  std::uint64_t latest() const { return term_; }

 private:
  const bool is_strict_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> term_{0};
  std::string leader_;
};

}  // namespace schedsvc
