#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <schedsvc/scheduler.h>

#include "stop.h"
#include "targets.h"

namespace schedsvc {

/// After this number of unanswered probes in a row a scheduler that holds a call is silent.
constexpr int kProbesMax = 3;

/// Returns a random part of a duration.
milliseconds randomly(milliseconds most);

/// Makes unary calls, each target by one channel that all calls share. With several targets it asks
/// one after the other, until the deadline of the call, and for at most a set time without one that
/// leads.
class Links {
 public:
  Links(const std::string& targets, Options options);
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  ~Links();

  /// Makes a call that its own withdrawal ends, and `stop`.
  std::optional<CallError> call(const Unary& unary, const CallOptions& options, Stop& stop);

 private:
  struct Link {
    std::shared_ptr<grpc::Channel> channel;
    Stop held;  // Has the calls that may be held for long.
  };
  struct Answer {
    grpc::Status status;
    std::string leader;
    bool is_stale = false;  // It came under a term that is over.
  };
  using Deadline = std::optional<Clock::time_point>;

  Answer attempt(const std::string& target, const Unary& unary, const CallOptions& options,
                 Deadline deadline, Stop& stop);
  void authorise(grpc::ClientContext& context, const CallOptions& options) const;
  std::shared_ptr<grpc::Channel> channel(const std::string& target);
  void hang_up(const std::string& target);
  void watch();
  bool holds_any() const;
  int probe(const std::string& target, int missed);

  const Options options_;
  Targets targets_;
  const std::shared_ptr<Fence> fence_;
  mutable std::mutex mutex_;  // Guards the channels, and what follows.
  std::map<std::string, Link> links_;
  std::condition_variable changed_;
  bool is_stopped_ = false;
  Stop probes_;
  std::thread watching_;  // Runs if there are several targets.
};

}  // namespace schedsvc
