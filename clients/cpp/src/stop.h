#pragma once

#include <mutex>
#include <unordered_set>

#include <grpcpp/client_context.h>

namespace schedsvc {

/// Ends calls that are under way in other threads.
class Stop {
 public:
  /// Ends the calls under way, and each one that begins later.
  void stop();
  /// Ends the calls under way.
  void break_off();
  bool is_stopped() const;
  /// Returns whether a call is under way.
  bool is_busy() const;

  /// Has a call under way while it lives.
  class Call {
   public:
    Call(Stop& stop, grpc::ClientContext& context);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

   private:
    Stop& stop_;
    grpc::ClientContext& context_;
  };

 private:
  mutable std::mutex mutex_;
  bool is_stopped_ = false;
  std::unordered_set<grpc::ClientContext*> calls_;
};

}  // namespace schedsvc
