#include <schedsvc/scheduler.h>

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "fake.h"
#include "links.h"
#include "requests.h"

namespace schedsvc {
namespace {

using fake::State;
using grpc::StatusCode;
using requests::admit;
using requests::as;
using requests::charged;
using requests::request;
using requests::stats;
using std::chrono::milliseconds;

/// Has two schedulers. The leases of the first are 1 and up, those of the other 101 and up.
class Failover : public testing::Test {
 protected:
  fake::Scheduler a{1};
  fake::Scheduler b{101};
  const std::string both = a.target() + "," + b.target();
};

Options silent_after(milliseconds silence) {
  Options options;
  options.silent_after = silence;
  return options;
}

v1::Leadership leadership(std::uint64_t term, const std::string& leader) {
  v1::Leadership made;
  made.set_term(term);
  made.set_leader(leader);
  return made;
}

TEST_F(Failover, GoesToTheNextTargetIfTheFirstIsAway) {
  a.stop();
  Scheduler scheduler(both);
  auto admission = admit(scheduler);
  EXPECT_EQ(admission->grant.lease_id(), 101u);
  charged(admission->complete());
}

TEST_F(Failover, TakesTheRequestIdOfAHeldCallAlong) {
  a.with([](State& s) { s.hangs = true; });
  Scheduler scheduler(both, silent_after(std::chrono::minutes(1)));
  auto stops = std::async(std::launch::async, [this] {
    a.until([](const State& s) { return !s.admits.empty(); });
    a.stop();
  });
  const auto admission = admit(scheduler);
  stops.get();
  EXPECT_EQ(admission->grant.lease_id(), 101u);
  a.with([&](State& s) { EXPECT_EQ(s.admits[0].request_id(), admission->request_id); });
  b.with([&](State& s) { EXPECT_EQ(s.admits[0].request_id(), admission->request_id); });
}

TEST_F(Failover, LeavesASilentSchedulerForTheNext) {
  a.with([](State& s) { s.hangs = true; });
  {
    Scheduler scheduler(both, silent_after(milliseconds(150)));
    EXPECT_EQ(admit(scheduler)->grant.lease_id(), 101u);
    a.with([](State& s) { EXPECT_GE(s.count("Progress"), std::size_t{kProbesMax}); });
    b.with([](State& s) { EXPECT_EQ(s.count("Admit"), 1u); });
  }
  // The other calls have their own deadlines.
  Scheduler scheduler(both, silent_after(milliseconds(150)));
  as<v1::StatsResponse>(stats(scheduler));
  a.with([](State& s) { EXPECT_EQ(s.count("Stats"), 1u); });
  b.with([](State& s) { EXPECT_EQ(s.count("Stats"), 1u); });
}

TEST_F(Failover, StaysWithASchedulerThatAnswersProbes) {
  std::promise<void> release;
  auto released = release.get_future().share();
  a.with([released](State& s) {
    s.decide = [released](grpc::ServerContext&, const v1::AdmitRequest&,
                          v1::AdmitResponse&) -> std::optional<grpc::Status> {
      released.wait();
      return std::nullopt;
    };
  });
  Scheduler scheduler(both, silent_after(milliseconds(900)));
  auto releases = std::async(std::launch::async, [&] {
    a.until([](const State& s) { return s.count("Progress") >= 5; });
    release.set_value();
  });
  EXPECT_EQ(admit(scheduler)->grant.lease_id(), 1u);
  b.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
}

TEST_F(Failover, LeavesASchedulerWhoseTermIsOverWhileItHoldsACall) {
  a.with([](State& s) { s.leadership = leadership(6, "a/1"); });
  Scheduler scheduler(both, silent_after(milliseconds(150)));
  charged(admit(scheduler)->cancel());
  a.with([this](State& s) {
    s.leadership = leadership(5, "a/0");
    s.decide = [this](grpc::ServerContext& context, const v1::AdmitRequest& asked,
                      v1::AdmitResponse&) { return a.hold(context, asked); };
  });
  b.with([](State& s) { s.leadership = leadership(7, "b/1"); });
  EXPECT_EQ(admit(scheduler)->grant.lease_id(), 101u);
}

TEST_F(Failover, LeavesASchedulerThatIsUnavailableWhileItHoldsACall) {
  a.with([this](State& s) {
    s.failures["Progress"] = std::deque<StatusCode>(1'000, StatusCode::UNAVAILABLE);
    s.decide = [this](grpc::ServerContext& context, const v1::AdmitRequest& asked,
                      v1::AdmitResponse&) { return a.hold(context, asked); };
  });
  Scheduler scheduler(both, silent_after(milliseconds(150)));
  EXPECT_EQ(admit(scheduler)->grant.lease_id(), 101u);
}

TEST_F(Failover, AsksTheNamedLeaderIfItIsInTheList) {
  fake::Scheduler c(201);
  a.with([&c](State& s) { s.leader = c.target(); });
  Scheduler scheduler(both + "," + c.target());
  as<v1::StatsResponse>(stats(scheduler));
  b.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
  a.with([](State& s) { s.leader = ""; });
  c.with([](State& s) {
    EXPECT_EQ(s.calls.size(), 1u);
    s.leader = "192.0.2.1:7600";
  });
  as<v1::StatsResponse>(stats(scheduler));
  a.with([](State& s) { EXPECT_EQ(s.calls.size(), 2u); });
  b.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
}

TEST_F(Failover, TakesAnAnswerAboutTheCallerAsFinal) {
  a.with([](State& s) { s.failures["Stats"] = {StatusCode::UNAUTHENTICATED}; });
  Scheduler scheduler(both);
  EXPECT_EQ(as<CallError>(stats(scheduler)).code, StatusCode::UNAUTHENTICATED);
  b.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
}

TEST_F(Failover, EndsWithTheDeadlineOfTheCall) {
  a.stop();
  b.stop();
  Options options;
  options.failover_wait = std::chrono::hours(1);
  Scheduler scheduler(both, options);
  CallOptions bounded;
  bounded.timeout = milliseconds(300);
  const auto code = as<CallError>(stats(scheduler, bounded)).code;
  EXPECT_TRUE(code == StatusCode::UNAVAILABLE || code == StatusCode::DEADLINE_EXCEEDED) << code;
}

TEST_F(Failover, GivesUpAfterItsWaitWithoutALeader) {
  a.stop();
  b.stop();
  Options options;
  options.failover_wait = milliseconds(300);
  Scheduler scheduler(both, options);
  EXPECT_EQ(as<CallError>(scheduler.admit(request())).code, StatusCode::UNAVAILABLE);
}

TEST_F(Failover, EndsWithTheWithdrawalOfTheCall) {
  a.stop();
  b.stop();
  Options options;
  options.failover_wait = std::chrono::hours(1);
  Scheduler scheduler(both, options);
  CallOptions withdrawn;
  withdrawn.withdrawal = std::make_shared<Withdrawal>();
  auto asks = std::async(std::launch::async, [&] {
    return as<CallError>(scheduler.admit(request(), withdrawn));
  });
  withdrawn.withdrawal->withdraw();
  EXPECT_EQ(asks.get().code, StatusCode::CANCELLED);
}

/// Has leaderships that a client which knows the term 5 of a/1 does not obey.
class Stale : public Failover,
              public testing::WithParamInterface<std::optional<std::pair<int, const char*>>> {
 protected:
  std::optional<v1::Leadership> stale() const {
    return GetParam() ? std::optional(leadership(GetParam()->first, GetParam()->second))
                      : std::nullopt;
  }
};

TEST_P(Stale, GrantIsDropped) {
  a.with([](State& s) { s.leadership = leadership(5, "a/1"); });
  b.with([this](State& s) { s.leadership = stale(); });
  Options options;
  options.failover_wait = milliseconds(300);
  Scheduler scheduler(both, options);
  charged(admit(scheduler)->cancel());
  a.with([this](State& s) { s.leader = b.target(); });
  EXPECT_EQ(as<CallError>(scheduler.admit(request())).code, StatusCode::UNAVAILABLE);
  b.with([](State& s) {
    ASSERT_FALSE(s.admits.empty());
    EXPECT_EQ(s.calls[0].value("schedsvc-term"), "5");
    s.leadership = leadership(6, "b/2");
  });
  EXPECT_GE(admit(scheduler)->grant.lease_id(), 101u);
}

TEST_P(Stale, StateAndEndOfALeaseHaveNoEffect) {
  a.with([](State& s) {
    s.ttl = milliseconds(60);
    s.leadership = leadership(5, "a/1");
  });
  b.with([this](State& s) { s.leadership = stale(); });
  Options options;
  options.failover_wait = std::chrono::minutes(1);
  Scheduler scheduler(both, options);
  auto admission = admit(scheduler);
  b.with([](State& s) { s.leases[1].state = v1::LEASE_STATE_VOID; });
  a.with([this](State& s) { s.leader = b.target(); });
  b.until([](const State& s) { return s.leases.at(1).reports.size() >= 2; });
  EXPECT_FALSE(admission->lost());
  auto leads = std::async(std::launch::async, [this] {
    b.until([](const State& s) { return s.leases.at(1).ends.size() >= 2; });
    a.with([](State& s) {
      EXPECT_TRUE(s.leases[1].ends.empty());
      s.leader = "";
    });
  });
  EXPECT_EQ(charged(admission->complete()).leadership().leader(), "a/1");
  a.with([](State& s) { EXPECT_EQ(s.leases[1].ends.size(), 1u); });
}

INSTANTIATE_TEST_SUITE_P(Terms, Stale,
                         testing::Values(std::pair(4, "b/1"), std::pair(5, "b/1"), std::nullopt));

}  // namespace
}  // namespace schedsvc
