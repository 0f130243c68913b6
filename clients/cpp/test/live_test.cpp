// Tests on the scheduler at SCHEDSVC_TARGET, whose pool runs one request at a time for the tenant
// red, and whose queue holds one. In the end nothing may be left there.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include <schedsvc/scheduler.h>
#include <schedsvc/v1/explain.grpc.pb.h>

#include "dialing.h"
#include "requests.h"

namespace {

using requests::as;
using requests::charged;
using requests::request;
using requests::totals;
using std::chrono::milliseconds;
namespace v1 = schedsvc::v1;

/// Is the TTL of the scheduler, whose grace is the same.
constexpr milliseconds kLeaseTtl{3'000};

class Live : public testing::Test {
 protected:
  void TearDown() override {
    const auto left = stats().totals();
    EXPECT_EQ(left.queued() + left.live_leases() + left.promised_tokens(), 0);
    EXPECT_TRUE(scheduler.shutdown());
  }

  v1::StatsResponse stats() { return as<v1::StatsResponse>(requests::stats(scheduler)); }

  v1::FlowStats flow() {
    const auto found = stats();
    for (const auto& flow : found.flows()) {
      if (flow.tenant() == "red") {
        return flow;
      }
    }
    throw std::runtime_error("no flow of red");
  }

  std::shared_ptr<schedsvc::Admission> admit() { return requests::admit(scheduler); }

  std::vector<v1::RequestStory> explain(const std::string& id) {
    v1::ExplainRequest question;
    question.set_request_id(id);
    question.set_tenant("red");
    const auto found = as<v1::ExplainResponse>(
        scheduler.call(&v1::ExplainService::Stub::Explain, question));
    return {found.requests().begin(), found.requests().end()};
  }

  const std::string target = dialing::variable("SCHEDSVC_TARGET");
  schedsvc::Scheduler scheduler{target, dialing::options()};
};

TEST_F(Live, TotalsAreCharged) {
  const auto before = flow();
  auto admission = admit();
  EXPECT_EQ(admission->grant.pool(), "main");
  EXPECT_GE(admission->grant.reserved_tokens(), 120);
  admission->report(totals(100, 16, {}));
  const auto books = charged(admission->complete(totals({}, {}, 7)));
  EXPECT_EQ(books.outcome(), v1::OUTCOME_COMPLETED);
  EXPECT_EQ(books.input_tokens(), 100);
  EXPECT_EQ(books.cached_input_tokens(), 16);
  EXPECT_EQ(books.output_tokens(), 7);
  EXPECT_EQ(flow().completed() - before.completed(), 1);
  EXPECT_EQ(flow().output_tokens() - before.output_tokens(), 7);
}

TEST_F(Live, TheEndOfScopeCancels) {
  const auto before = flow();
  { const auto admission = admit(); }
  const auto books = charged(admit()->give_back());
  EXPECT_EQ(books.input_tokens() + books.output_tokens(), 0);
  EXPECT_EQ(flow().cancelled() - before.cancelled(), 2);
}

TEST_F(Live, ARequestIsExplained) {
  auto admission = admit();
  const auto running = explain(admission->request_id);
  ASSERT_EQ(running.size(), 1u);
  EXPECT_EQ(running[0].state(), v1::REQUEST_STATE_LIVE);
  charged(admission->cancel());
  auto large = request();
  large.set_input_tokens(0, 1'000'000);
  const auto refused = as<schedsvc::Refused>(scheduler.admit(large));
  EXPECT_EQ(refused.retry_after.count(), 0);
  EXPECT_EQ(refused.outcome, v1::OUTCOME_REJECTED_TOO_LARGE);
  EXPECT_EQ(explain(refused.request_id).at(0).outcome(), refused.outcome);
}

TEST_F(Live, AFullQueueNamesItsLimit) {
  auto running = admit();
  schedsvc::CallOptions options;
  options.withdrawal = std::make_shared<schedsvc::Withdrawal>();
  auto waiting = std::async(std::launch::async, [&] {
    return as<schedsvc::CallError>(scheduler.admit(request(), options));
  });
  while (flow().queued() != 1) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const auto refused = as<schedsvc::Refused>(scheduler.admit(request()));
  EXPECT_GT(refused.retry_after.count(), 0);
  EXPECT_EQ(refused.outcome, v1::OUTCOME_REJECTED_FLOW_QUEUE_FULL);
  bool is_named = false;
  for (const auto& limit : refused.refusal.quota().limits()) {
    is_named |= limit.kind() == v1::LIMIT_KIND_QUEUED_REQUESTS && limit.limit() == 1 &&
                limit.remaining() == 0;
  }
  EXPECT_TRUE(is_named);
  options.withdrawal->withdraw();
  EXPECT_EQ(waiting.get().code, grpc::StatusCode::CANCELLED);
  while (flow().queued() != 0) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  charged(running->cancel());
}

TEST_F(Live, AWrongFieldIsNamed) {
  auto wrong = request();
  wrong.add_input_tokens(0);
  const auto error = as<schedsvc::CallError>(scheduler.admit(wrong));
  ASSERT_EQ(error.fields.size(), 1u);
  EXPECT_EQ(error.fields[0].field, "input_tokens[1]");
  EXPECT_EQ(error.text().rfind("schedsvc: Admit: INVALID_ARGUMENT: input_tokens[1]: ", 0), 0u);
}

TEST_F(Live, AWrongTokenIsAFailedCall) {
  auto options = dialing::options();
  options.token = "wrong";
  schedsvc::Scheduler stranger(target, options);
  EXPECT_EQ(as<schedsvc::CallError>(requests::stats(stranger)).code,
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(Live, ALeaseIsRenewed) {
  auto admission = admit();
  std::this_thread::sleep_for(5 * kLeaseTtl / 2);
  // TTL and grace are over. A renewal that this machine held up comes a moment later.
  auto pool = stats().pools(0);
  while (pool.live_leases() == 1 && pool.suspect_leases() != 0) {
    pool = stats().pools(0);
  }
  EXPECT_EQ(pool.live_leases(), 1);
  EXPECT_FALSE(admission->lost());
  EXPECT_EQ(charged(admission->complete(totals(100, {}, 9))).output_tokens(), 9);
}

TEST_F(Live, ALostLeaseIsTold) {
  auto admission = admit();
  std::promise<void> told;
  admission->on_lost([&told] { told.set_value(); });
  v1::CompleteRequest end;
  end.set_lease_id(admission->grant.lease_id());
  end.set_pool_epoch(admission->grant.pool_epoch());
  as<v1::CompleteResponse>(scheduler.call(&v1::SchedulerService::Stub::Complete, end));
  told.get_future().wait();
  EXPECT_TRUE(admission->lost());
}

}  // namespace
