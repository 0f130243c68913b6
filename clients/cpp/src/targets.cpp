#include "targets.h"

#include <algorithm>
#include <stdexcept>

namespace schedsvc {
namespace {

constexpr milliseconds kNamedFor{500};
/// The same name shortens the pauses again after this time, as a dead leader may be named.
constexpr milliseconds kNamedAgain{2'000};

std::string stripped(const std::string& text) {
  constexpr auto kBlank = " \t";
  const auto first = text.find_first_not_of(kBlank);
  return first == std::string::npos
             ? ""
             : text.substr(first, text.find_last_not_of(kBlank) + 1 - first);
}

}  // namespace

Targets::Targets(const std::string& list) {
  for (std::size_t at = 0; at <= list.size();) {
    const auto end = std::min(list.find(',', at), list.size());
    const std::string target = stripped(list.substr(at, end - at));
    if (target.empty() || std::find(all_.begin(), all_.end(), target) != all_.end()) {
      throw std::invalid_argument("schedsvc: target \"" + target + "\" of \"" + list +
                                  "\" is empty or listed twice");
    }
    all_.push_back(target);
    at = end + 1;
  }
  if (all_.size() > kTargetsMax) {
    throw std::invalid_argument("schedsvc: " + std::to_string(all_.size()) +
                                " targets are listed; list at most " +
                                std::to_string(kTargetsMax));
  }
  current_ = all_.front();
}

std::string Targets::ask() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

void Targets::answered() {
  const std::lock_guard lock(mutex_);
  failed_.clear();
  silent_until_.clear();
}

milliseconds Targets::move_on(const std::string& failed, const std::string& leader,
                              Clock::time_point now, milliseconds silent) {
  const std::lock_guard lock(mutex_);
  if (failed == current_ && several()) {
    failed_.insert(failed);
    if (silent.count() > 0) {
      silent_until_[failed] = now + silent;
    }
    choose(failed, leader, now);
  }
  return now < quick_until_ ? kNamedPauseMax : kPauseMax;
}

void Targets::choose(const std::string& failed, const std::string& leader, Clock::time_point now) {
  std::vector<std::string> ring = all_;
  std::rotate(ring.begin(), std::find(ring.begin(), ring.end(), failed) + 1, ring.end());
  current_ = ring.front();
  ring.erase(std::remove_if(ring.begin(), ring.end(),
                            [&](const std::string& target) {
                              const auto found = silent_until_.find(target);
                              return found != silent_until_.end() && found->second > now;
                            }),
             ring.end());
  const bool is_followed = failed_.count(leader) == 0 &&
                           std::find(ring.begin(), ring.end(), leader) != ring.end();
  if (is_followed) {
    current_ = leader;
    if (leader != named_ || now - named_since_ >= kNamedAgain) {
      named_ = leader;
      named_since_ = now;
      quick_until_ = now + kNamedFor;
    }
  } else if (!ring.empty()) {
    current_ = ring.front();
  }
  if (failed_.size() == all_.size()) {
    failed_.clear();
  }
}

bool Fence::obeys(const v1::Leadership& leadership) {
  const std::lock_guard lock(mutex_);
  if (leadership.term() > term_) {
    term_ = leadership.term();
    leader_ = leadership.leader();
  }
  if (leadership.term() == 0) {
    return !is_strict_ || term_ == 0;
  }
  return leadership.term() == term_ && leadership.leader() == leader_;
}

std::uint64_t Fence::latest() const {
  const std::lock_guard lock(mutex_);
  return term_;
}

std::shared_ptr<Fence> Fence::of(std::vector<std::string> all) {
  static std::mutex mutex;
  static std::map<std::vector<std::string>, std::shared_ptr<Fence>> fences;
  std::sort(all.begin(), all.end());
  const std::lock_guard lock(mutex);
  auto found = fences.find(all);
  if (found == fences.end()) {
    if (fences.size() >= kFencesMax) {
      fences.erase(fences.begin());
    }
    found = fences.emplace(all, std::make_shared<Fence>(all.size() > 1)).first;
  }
  return found->second;
}

}  // namespace schedsvc
