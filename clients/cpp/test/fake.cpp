#include "fake.h"

#include <algorithm>
#include <thread>

#include <gtest/gtest.h>

namespace fake {

std::string Call::value(const std::string& key) const {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : found->second;
}

std::size_t State::count(const std::string& method) const {
  return static_cast<std::size_t>(std::count_if(
      calls.begin(), calls.end(), [&](const Call& call) { return call.method == method; }));
}

std::size_t State::live() const {
  return static_cast<std::size_t>(std::count_if(
      leases.begin(), leases.end(), [](const auto& each) { return each.second.ends.empty(); }));
}

Scheduler::Scheduler(std::uint64_t first) : first_(first) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(static_cast<v1::SchedulerService::Service*>(this));
  builder.RegisterService(static_cast<v1::ExplainService::Service*>(this));
  server_ = builder.BuildAndStart();
  target_ = "127.0.0.1:" + std::to_string(port);
}

Scheduler::~Scheduler() { stop(); }

void Scheduler::stop() { server_->Shutdown(std::chrono::system_clock::now()); }

void Scheduler::until(const std::function<bool(const State&)>& is_so) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!with(is_so)) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "it does not come";
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void Scheduler::wait_for_cancel(grpc::ServerContext& context) {
  while (!context.IsCancelled()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

grpc::Status Scheduler::hold(grpc::ServerContext& context, const v1::AdmitRequest& request) {
  wait_for_cancel(context);
  with([&](State& state) { state.withdrawn.push_back(request.request_id()); });
  return grpc::Status::CANCELLED;
}

v1::Grant Scheduler::grant_to(const v1::AdmitRequest& request) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, lease] : state_.leases) {
    if (lease.request.request_id() == request.request_id()) {
      return lease.grant;
    }
  }
  const std::uint64_t id = first_ + state_.leases.size();
  Lease& lease = state_.leases[id];
  lease.request = request;
  lease.grant.set_lease_id(id);
  lease.grant.set_pool("main");
  lease.grant.set_pool_epoch(7);
  lease.grant.set_ttl_ms(state_.ttl.count());
  lease.grant.set_reserved_tokens(64);
  return lease.grant;
}

grpc::Status Scheduler::begin(grpc::ServerContext& context, const std::string& method) {
  std::string leader;
  bool hangs = false;
  {
    const std::lock_guard lock(mutex_);
    Call& call = state_.calls.emplace_back();
    call.method = method;
    for (const auto& [key, value] : context.client_metadata()) {
      call.metadata.emplace(std::string(key.data(), key.size()),
                            std::string(value.data(), value.size()));
    }
    if (auto& failures = state_.failures[method]; !failures.empty()) {
      const auto code = failures.front();
      failures.pop_front();
      return {code, "as the test asked"};
    }
    leader = state_.leader;
    hangs = state_.hangs;
  }
  if (!leader.empty()) {
    context.AddTrailingMetadata("schedsvc-leader", leader);
    return {grpc::StatusCode::UNAVAILABLE, "another scheduler leads"};
  }
  if (hangs && method != "Admit") {
    wait_for_cancel(context);
    return grpc::Status::CANCELLED;
  }
  return grpc::Status::OK;
}

template <class Response>
void Scheduler::sign(Response& response) {
  const std::lock_guard lock(mutex_);
  if (state_.leadership) {
    *response.mutable_leadership() = *state_.leadership;
  }
}

grpc::Status Scheduler::Admit(grpc::ServerContext* context, const v1::AdmitRequest* request,
                              v1::AdmitResponse* response) {
  with([&](State& state) { state.admits.push_back(*request); });
  if (const auto status = begin(*context, "Admit"); !status.ok()) {
    return status;
  }
  const auto [decide, hangs] =
      with([](State& state) { return std::pair(state.decide, state.hangs); });
  if (hangs) {
    wait_for_cancel(*context);
    return grpc::Status::CANCELLED;
  }
  if (decide) {
    if (const auto status = decide(*context, *request, *response)) {
      sign(*response);
      return *status;
    }
  }
  response->set_outcome(v1::OUTCOME_GRANTED);
  *response->mutable_grant() = grant_to(*request);
  sign(*response);
  return grpc::Status::OK;
}

grpc::Status Scheduler::Progress(grpc::ServerContext* context, const v1::ProgressRequest* request,
                                 v1::ProgressResponse* response) {
  if (const auto status = begin(*context, "Progress"); !status.ok()) {
    return status;
  }
  with([&](State& state) {
    for (const v1::LeaseProgress& report : request->leases()) {
      v1::LeaseStatus& status = *response->add_leases();
      status.set_lease_id(report.lease_id());
      status.set_state(v1::LEASE_STATE_UNKNOWN);
      if (const auto lease = state.leases.find(report.lease_id()); lease != state.leases.end()) {
        lease->second.reports.push_back(report);
        status.set_state(lease->second.state);
      }
    }
  });
  sign(*response);
  return grpc::Status::OK;
}

grpc::Status Scheduler::Complete(grpc::ServerContext* context, const v1::CompleteRequest* request,
                                 v1::CompleteResponse* response) {
  if (const auto status = begin(*context, "Complete"); !status.ok()) {
    return status;
  }
  if (const auto completing = with([](State& state) { return state.completing; })) {
    completing();
  }
  const bool is_known = with([&](State& state) {
    const auto lease = state.leases.find(request->lease_id());
    if (lease == state.leases.end()) {
      return false;
    }
    lease->second.ends.push_back(*request);
    const v1::CompleteRequest& first = lease->second.ends.front();
    response->set_outcome(first.outcome());
    response->set_input_tokens(first.input_tokens());
    response->set_output_tokens(first.output_tokens());
    return true;
  });
  sign(*response);
  return is_known ? grpc::Status::OK
                  : grpc::Status(grpc::StatusCode::NOT_FOUND, "the lease is unknown");
}

grpc::Status Scheduler::Stats(grpc::ServerContext* context, const v1::StatsRequest*,
                              v1::StatsResponse*) {
  return begin(*context, "Stats");
}

grpc::Status Scheduler::Explain(grpc::ServerContext* context, const v1::ExplainRequest* request,
                                v1::ExplainResponse* response) {
  if (const auto status = begin(*context, "Explain"); !status.ok()) {
    return status;
  }
  with([&](State& state) {
    for (const auto& [id, lease] : state.leases) {
      if (lease.request.request_id() == request->request_id()) {
        response->add_requests()->set_state(lease.ends.empty() ? v1::REQUEST_STATE_LIVE
                                                               : v1::REQUEST_STATE_ENDED);
      }
    }
  });
  return grpc::Status::OK;
}

}  // namespace fake
