#include <schedsvc/scheduler.h>

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "fake.h"
#include "requests.h"

namespace schedsvc {
namespace {

using fake::State;
using grpc::StatusCode;
using requests::admit;
using requests::as;
using requests::charged;
using requests::request;
using requests::totals;
using std::chrono::milliseconds;

std::deque<StatusCode> repeated(StatusCode code, std::size_t count) {
  return std::deque<StatusCode>(count, code);
}

TEST(Admission, RepeatsAnEndThatDoesNotArrive) {
  fake::Scheduler f;
  f.with([](State& s) {
    s.failures["Complete"] = repeated(StatusCode::UNAVAILABLE, 5);
    s.failures["Complete"].push_back(StatusCode::DEADLINE_EXCEEDED);
  });
  Scheduler scheduler(f.target());
  auto admission = admit(scheduler);
  const auto books = charged(admission->complete(totals({}, {}, 3)));
  EXPECT_EQ(books.output_tokens(), 3);
  EXPECT_EQ(books.outcome(), v1::OUTCOME_COMPLETED);
  for (int n = 0; n < 100; ++n) {
    EXPECT_EQ(charged(admission->cancel(totals({}, {}, 50))).output_tokens(), 3);
  }
  f.with([](State& s) {
    EXPECT_EQ(s.count("Complete"), 7u);
    EXPECT_EQ(s.leases[1].ends.size(), 1u);
    EXPECT_EQ(s.leases[1].ends[0].pool_epoch(), 7);
  });
}

TEST(Admission, CancelsAtItsEndOfScopeWhatHasNotEnded) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  {
    auto done = admit(scheduler);
    charged(done->complete());
    auto moved = admit(scheduler);
    auto here = std::move(moved);
    here->report(totals(100, {}, 5));
    auto other = admit(scheduler);
    other = std::move(here);  // The lease that it had ends.
    f.with([](State& s) { EXPECT_EQ(s.live(), 1u); });
  }
  f.with([](State& s) {
    EXPECT_EQ(s.count("Complete"), 3u);
    EXPECT_EQ(s.leases[1].ends[0].outcome(), v1::OUTCOME_COMPLETED);
    EXPECT_EQ(s.leases[2].ends[0].outcome(), v1::OUTCOME_CANCELLED);
    EXPECT_EQ(s.leases[2].ends[0].output_tokens(), 5);
    EXPECT_EQ(s.leases[3].ends[0].outcome(), v1::OUTCOME_CANCELLED);
    EXPECT_FALSE(s.leases[3].ends[0].has_output_tokens());
    EXPECT_EQ(s.live(), 0u);
  });
}

TEST(Admission, EndsWhenAnExceptionLeavesTheScope) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  try {
    const auto admission = admit(scheduler);
    throw std::runtime_error("the engine is away");
  } catch (const std::runtime_error&) {
    f.with([](State& s) { EXPECT_EQ(s.live(), 0u); });
  }
}

TEST(Admission, BringsTotalsWithinTheLimits) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  charged(admit(scheduler)->complete(totals(-1, -9, std::int64_t{1} << 40)));
  const auto end = f.with([](State& s) { return s.leases[1].ends[0]; });
  EXPECT_TRUE(end.has_input_tokens() && end.input_tokens() == 0);
  EXPECT_TRUE(end.has_cached_input_tokens() && end.cached_input_tokens() == 0);
  EXPECT_EQ(end.output_tokens(), std::int64_t{1} << 27);
}

TEST(Admission, DoesNotRepeatAnEndThatCannotSucceed) {
  fake::Scheduler f;
  f.with([](State& s) { s.failures["Complete"] = repeated(StatusCode::NOT_FOUND, 2); });
  Scheduler scheduler(f.target());
  const auto error = as<CallError>(admit(scheduler)->cancel());
  EXPECT_EQ(error.text(), "schedsvc: Complete: NOT_FOUND: as the test asked");
  f.with([](State& s) { EXPECT_EQ(s.count("Complete"), 1u); });
}

TEST(Admission, DoesNotWaitInItsDestructorForAnEndThatTakesLong) {
  fake::Scheduler f;
  f.with([](State& s) { s.failures["Complete"] = repeated(StatusCode::UNAVAILABLE, 10'000); });
  Scheduler scheduler(f.target());
  {
    auto admission = admit(scheduler);
    EXPECT_EQ(as<CallError>(admission->complete({}, milliseconds(20))).code,
              StatusCode::DEADLINE_EXCEEDED);
  }
  f.with([](State& s) {
    EXPECT_EQ(s.live(), 1u);
    s.failures["Complete"].clear();
  });
  f.until([](const State& s) { return s.live() == 0; });
  f.with([](State& s) { EXPECT_EQ(s.leases[1].ends[0].outcome(), v1::OUTCOME_COMPLETED); });
}

TEST(Admission, CostsNothingIfItIsGivenBack) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  auto admission = admit(scheduler);
  admission->report(totals(100, 16, 7));
  charged(admission->give_back());
  const auto end = f.with([](State& s) { return s.leases[1].ends[0]; });
  EXPECT_EQ(end.outcome(), v1::OUTCOME_CANCELLED);
  EXPECT_TRUE(end.has_input_tokens() && end.has_cached_input_tokens() && end.has_output_tokens());
  EXPECT_EQ(end.input_tokens() + end.cached_input_tokens() + end.output_tokens(), 0);
}

TEST(Admission, TellsOnceThatItsLeaseIsLost) {
  for (const auto state :
       {v1::LEASE_STATE_VOID, v1::LEASE_STATE_ENDED, v1::LEASE_STATE_UNKNOWN}) {
    fake::Scheduler f;
    f.with([](State& s) { s.ttl = milliseconds(30); });
    Scheduler scheduler(f.target());
    auto admission = admit(scheduler);
    std::promise<void> stopped;  // A second call would throw.
    admission->on_lost([&stopped] { stopped.set_value(); });
    admission->report(totals(100, 16, {}));
    admission->report(totals({}, {}, 7));
    f.until([](const State& s) {
      const auto& reports = s.leases.at(1).reports;
      return !reports.empty() && reports.back().output_tokens() == 7 &&
             reports.back().cached_input_tokens() == 16 && reports.back().pool_epoch() == 7;
    });
    // A state of a later version is no reason to stop.
    const auto seen = f.with([](State& s) {
      s.leases[1].state = static_cast<v1::LeaseState>(9);
      return s.leases[1].reports.size();
    });
    f.until([seen](const State& s) { return s.leases.at(1).reports.size() > seen + 1; });
    EXPECT_FALSE(admission->lost());
    f.with([state](State& s) { s.leases[1].state = state; });
    stopped.get_future().wait();
    EXPECT_EQ(admission->lost(), "schedsvc: lease 1 is " + v1::LeaseState_Name(state));
    bool is_late_told = false;
    admission->on_lost([&is_late_told] { is_late_told = true; });
    EXPECT_TRUE(is_late_told);
    charged(admission->cancel());
  }
}

TEST(Admission, CanEndInTheCallThatTellsOfItsLoss) {
  fake::Scheduler f;
  f.with([](State& s) { s.ttl = milliseconds(30); });
  Scheduler scheduler(f.target());
  auto admission = admit(scheduler);
  admission->on_lost([&admission] { admission->cancel({}, milliseconds(0)); });
  f.with([](State& s) { s.leases[1].state = v1::LEASE_STATE_VOID; });
  f.until([](const State& s) { return s.live() == 0; });
}

TEST(Admission, IsNotToldOfALossAfterItsEnd) {
  fake::Scheduler f;
  f.with([](State& s) { s.ttl = milliseconds(30); });
  Scheduler scheduler(f.target());
  for (int n = 0; n < 20; ++n) {
    const auto has_ended = std::make_shared<std::atomic<bool>>(false);
    auto admission = admit(scheduler);
    admission->on_lost([has_ended] {
      std::this_thread::sleep_for(milliseconds(5));  // The end has to wait for it.
      EXPECT_FALSE(*has_ended);
    });
    f.with([](State& s) { s.leases.rbegin()->second.state = v1::LEASE_STATE_VOID; });
    std::this_thread::sleep_for(milliseconds(n));
    charged(admission->cancel());
    *has_ended = true;
  }
}

TEST(Admission, RepeatsARenewalThatFailsBeforeTheNextIsDue) {
  fake::Scheduler failing;
  fake::Scheduler usual(101);
  failing.with([](State& s) {
    s.failures["Progress"] = repeated(StatusCode::UNAVAILABLE, 3);
    s.ttl = milliseconds(3'000);
  });
  usual.with([](State& s) { s.ttl = milliseconds(3'000); });
  Scheduler one(failing.target());
  Scheduler other(usual.target());
  const auto first = admit(one);
  const auto second = admit(other);
  failing.until([](const State& s) { return !s.leases.at(1).reports.empty(); });
  failing.with([](State& s) { EXPECT_EQ(s.count("Progress"), 4u); });
  usual.with([](State& s) { EXPECT_LE(s.leases[101].reports.size(), 2u); });
}

TEST(Admission, IsRenewedBesideManyOthers) {
  fake::Scheduler f;
  f.with([](State& s) { s.ttl = milliseconds(900); });
  Scheduler scheduler(f.target());
  std::vector<std::shared_ptr<Admission>> admissions;
  for (int n = 0; n < 100; ++n) {
    admissions.push_back(admit(scheduler));
  }
  f.until([](const State& s) {
    return std::all_of(s.leases.begin(), s.leases.end(),
                       [](const auto& lease) { return lease.second.reports.size() >= 2; });
  });
}

TEST(Admission, IsRenewedBeforeEndsAreRepeated) {
  fake::Scheduler f;
  std::atomic<int> early{0};  // Ends that are repeated before the renewal.
  f.with([&](State& s) {
    s.ttl = milliseconds(3'000);
    s.failures["Complete"] = repeated(StatusCode::UNAVAILABLE, 10'000);
    s.completing = [&] {
      const bool is_early = f.with([](State& now) { return now.leases[1].reports.empty(); });
      if (is_early && ++early == 1) {
        std::this_thread::sleep_for(milliseconds(1'100));  // Then the renewal is due.
      }
    };
  });
  Scheduler scheduler(f.target());
  const auto running = admit(scheduler);
  std::vector<std::shared_ptr<Admission>> ended;
  for (int n = 0; n < 50; ++n) {
    ended.push_back(admit(scheduler));
    ended.back()->complete({}, milliseconds(0));
  }
  f.with([](State& s) { s.failures["Complete"].clear(); });
  f.until([](const State& s) { return s.live() == 1 && !s.leases.at(1).reports.empty(); });
  EXPECT_LT(early, 50);
}

TEST(Scheduler, EndsWhatIsUnderWayWhenItShutsDown) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  auto running = admit(scheduler);
  f.with([&f](State& s) {
    s.failures["Complete"] = repeated(StatusCode::UNAVAILABLE, 2);
    s.decide = [&f](grpc::ServerContext& context, const v1::AdmitRequest& asked,
                    v1::AdmitResponse&) { return f.hold(context, asked); };
  });
  auto waiting = std::async(std::launch::async,
                            [&scheduler] { return as<CallError>(scheduler.admit(request())); });
  f.until([](const State& s) { return s.admits.size() == 2; });
  EXPECT_TRUE(scheduler.shutdown());
  EXPECT_EQ(waiting.get().text(), "schedsvc: Admit: CANCELLED: the Scheduler was shut down");
  f.until([](const State& s) { return s.withdrawn.size() == 1; });
  EXPECT_FALSE(running->lost());
  f.with([](State& s) {
    EXPECT_EQ(s.live(), 0u);
    EXPECT_EQ(s.leases[1].ends[0].outcome(), v1::OUTCOME_CANCELLED);
  });
  EXPECT_EQ(charged(running->complete()).outcome(), v1::OUTCOME_CANCELLED);
  EXPECT_EQ(as<CallError>(scheduler.admit(request())).code, StatusCode::CANCELLED);
  EXPECT_EQ(as<CallError>(requests::stats(scheduler)).code, StatusCode::CANCELLED);
  f.with([](State& s) { EXPECT_EQ(s.admits.size(), 2u); });
}

TEST(Scheduler, GivesUpItsShutdownWhenTheTimeIsOver) {
  fake::Scheduler f;
  std::shared_ptr<Admission> open;
  {
    Scheduler scheduler(f.target());
    open = admit(scheduler);
    f.with([](State& s) { s.failures["Complete"] = repeated(StatusCode::UNAVAILABLE, 10'000); });
    EXPECT_FALSE(scheduler.shutdown(milliseconds(0)));
  }
  EXPECT_EQ(as<CallError>(open->complete()).code, StatusCode::CANCELLED);
}

TEST(Scheduler, BreaksAnEndOffWhenItGivesUpItsShutdown) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  const auto open = admit(scheduler);
  f.with([](State& s) { s.hangs = true; });
  auto ends = std::async(std::launch::async, [&open] { return as<CallError>(open->complete()); });
  f.until([](const State& s) { return s.count("Complete") == 1; });
  EXPECT_FALSE(scheduler.shutdown(milliseconds(0)));
  EXPECT_EQ(ends.get().code, StatusCode::CANCELLED);
}

TEST(Scheduler, ReturnsAGrantThatCrossesAWithdrawal) {
  fake::Scheduler f;
  {
    Scheduler scheduler(f.target());
    CallOptions options;
    options.withdrawal = std::make_shared<Withdrawal>();
    // The grant is out, and the client withdraws before it reads it.
    f.with([&](State& s) {
      s.decide = [&](grpc::ServerContext&, const v1::AdmitRequest& asked,
                     v1::AdmitResponse&) -> std::optional<grpc::Status> {
        f.grant_to(asked);
        options.withdrawal->withdraw();
        return std::nullopt;
      };
    });
    EXPECT_EQ(as<CallError>(scheduler.admit(request(), options)).code, StatusCode::CANCELLED);
  }
  f.with([](State& s) {
    ASSERT_EQ(s.leases.size(), 1u);
    ASSERT_EQ(s.live(), 0u);
    EXPECT_EQ(s.leases[1].ends[0].outcome(), v1::OUTCOME_CANCELLED);
    EXPECT_TRUE(s.leases[1].ends[0].has_input_tokens());
    EXPECT_EQ(s.leases[1].ends[0].input_tokens(), 0);
  });
}

TEST(Scheduler, ReturnsAGrantThatCrossesADeadline) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  f.with([&f](State& s) {
    s.decide = [&f](grpc::ServerContext&, const v1::AdmitRequest& asked,
                    v1::AdmitResponse&) -> std::optional<grpc::Status> {
      f.grant_to(asked);
      if (f.with([](State& now) { return now.admits.size(); }) > 1) {
        return std::nullopt;
      }
      return grpc::Status(StatusCode::DEADLINE_EXCEEDED, "the answer is late");
    };
  });
  EXPECT_EQ(as<CallError>(scheduler.admit(request())).code, StatusCode::DEADLINE_EXCEEDED);
  f.until([](const State& s) { return s.leases.at(1).ends.size() == 1; });
  f.with([](State& s) {
    EXPECT_EQ(s.admits[0].request_id(), s.admits[1].request_id());
    EXPECT_EQ(s.admits[1].queue_ttl_ms(), 1);
  });
}

TEST(Scheduler, DoesNotSendWhatWasWithdrawnBefore) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  CallOptions options;
  options.withdrawal = std::make_shared<Withdrawal>();
  options.withdrawal->withdraw();
  EXPECT_EQ(as<CallError>(scheduler.admit(request(), options)).code, StatusCode::CANCELLED);
  f.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
}

TEST(Scheduler, WithdrawsARequestThatWaits) {
  fake::Scheduler f;
  f.with([&f](State& s) {
    s.decide = [&f](grpc::ServerContext& context, const v1::AdmitRequest& asked,
                    v1::AdmitResponse&) { return f.hold(context, asked); };
  });
  Scheduler scheduler(f.target());
  CallOptions options;
  options.withdrawal = std::make_shared<Withdrawal>();
  auto waiting = std::async(std::launch::async, [&] {
    return as<CallError>(scheduler.admit(request(), options));
  });
  f.until([](const State& s) { return s.admits.size() == 1; });
  options.withdrawal->withdraw();
  EXPECT_EQ(waiting.get().text(), "schedsvc: Admit: CANCELLED: it was withdrawn");
  f.until([](const State& s) { return s.withdrawn.size() == 1; });
}

TEST(Scheduler, SaysWhyARequestIsRefusedAndWhenToRetry) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  for (const auto& [sent, read] :
       {std::pair(v1::OUTCOME_REJECTED_QUOTA, v1::OUTCOME_REJECTED_QUOTA),
        {static_cast<v1::Outcome>(31), v1::OUTCOME_UNSPECIFIED}}) {
    f.with([outcome = sent](State& s) {
      s.decide = [outcome](grpc::ServerContext&, const v1::AdmitRequest&,
                           v1::AdmitResponse& response) {
        response.set_outcome(outcome);
        response.mutable_refusal()->set_message("not now");
        response.mutable_refusal()->set_retry_after_ms(500);
        return grpc::Status::OK;
      };
    });
    const auto refused = as<Refused>(scheduler.admit(request()));
    EXPECT_EQ(refused.outcome, read);
    EXPECT_EQ(refused.retry_after, milliseconds(500));
    EXPECT_EQ(refused.request_id.size(), 32u);
    EXPECT_EQ(refused.text(), "schedsvc: refused: " + v1::Outcome_Name(read) + ": not now");
  }
}

TEST(Scheduler, RefusesTooManyPrefixHashesWithTheirNumber) {
  fake::Scheduler f;
  Scheduler scheduler(f.target());
  auto large = request();
  large.mutable_prefix_block_hashes()->Resize(20'000, 0);
  EXPECT_EQ(as<CallError>(scheduler.admit(large)).text(),
            "schedsvc: Admit: INVALID_ARGUMENT: prefix_block_hashes: has 20000 hashes; at most "
            "4096 are allowed");
  f.with([](State& s) { EXPECT_TRUE(s.calls.empty()); });
}

TEST(Scheduler, PassesItsOptionsOn) {
  fake::Scheduler f;
  Options options;
  options.token = "secret";
  options.arguments.SetUserAgentPrefix("mine");
  std::vector<std::string> connected;
  options.connect = [&connected](const auto& target, const auto& credentials,
                                 const auto& arguments) {
    connected.push_back(target);
    return grpc::CreateCustomChannel(target, credentials, arguments);
  };
  Scheduler scheduler(f.target(), options);
  CallOptions more;
  more.metadata = {{"x-trace", "7"}};
  as<std::shared_ptr<Admission>>(scheduler.admit(request(), more))->cancel();
  EXPECT_EQ(connected, std::vector{f.target()});
  f.with([](State& s) {
    ASSERT_EQ(s.calls.size(), 2u);
    for (const auto& call : s.calls) {
      EXPECT_EQ(call.value("authorization"), "Bearer secret");
      EXPECT_EQ(call.value("user-agent").rfind("mine", 0), 0u);
    }
    EXPECT_EQ(s.calls[0].value("x-trace"), "7");
  });
}

}  // namespace
}  // namespace schedsvc
