// Sends requests to a live scheduler: load cancels TARGET SEED, or load kill TARGETS. It prints
// what became of them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>
#include <schedsvc/scheduler.h>

#include "dialing.h"

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr int kAtOnce = 32;
constexpr int kCancelled = 1'000;

struct Counts {
  std::atomic<int> withdrawn{0};
  std::atomic<int> ran{0};
  std::atomic<int> served{0};
  std::mutex mutex;
  std::vector<std::string> failed;

  void fail(const std::string& why) {
    const std::lock_guard lock(mutex);
    failed.push_back(why);
  }

  void print() {
    const std::lock_guard lock(mutex);
    std::cout << nlohmann::json{{"withdrawn", withdrawn.load()},
                                {"ran", ran.load()},
                                {"served", served.load()},
                                {"failed", failed}}
              << std::endl;
  }
};

/// Ends a wait before its time, from another thread.
class Bell {
 public:
  void ring() {
    const std::lock_guard lock(mutex_);
    has_rung_ = true;
    changed_.notify_all();
  }

  /// Returns whether it has rung within a time.
  bool wait(microseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return has_rung_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_rung_ = false;
};

enum class Fate { kServed, kWithdrawn, kFailed };

/// Asks for one request, and works for a time unless it is withdrawn.
Fate serve(schedsvc::Scheduler& scheduler, Counts& counts, microseconds work,
           const schedsvc::CallOptions& options, Bell& stop) {
  schedsvc::v1::AdmitRequest request;
  request.set_tenant("red");
  request.add_input_tokens(100);
  request.set_max_output_tokens(20);
  request.set_reports_progress(true);
  auto verdict = scheduler.admit(request, options);
  if (const auto* refused = std::get_if<schedsvc::Refused>(&verdict)) {
    counts.fail(refused->text());
    return Fate::kFailed;
  }
  if (const auto* error = std::get_if<schedsvc::CallError>(&verdict)) {
    if (options.withdrawal && options.withdrawal->is_withdrawn()) {
      return Fate::kWithdrawn;
    }
    counts.fail(error->text());
    return Fate::kFailed;
  }
  auto& admission = std::get<std::shared_ptr<schedsvc::Admission>>(verdict);
  ++counts.ran;
  schedsvc::Totals totals;
  totals.set_input_tokens(100);
  totals.set_output_tokens(5);
  admission->report(totals);
  admission->on_lost([&stop] { stop.ring(); });
  if (stop.wait(work)) {
    if (const auto lost = admission->lost()) {
      counts.fail(*lost);
      return Fate::kFailed;
    }
    return Fate::kWithdrawn;  // The end of scope cancels it.
  }
  // A lease whose leader was killed is unknown to the next one; the request was served.
  admission->complete();
  return Fate::kServed;
}

/// Runs a function for each number below count while it returns true, kAtOnce at a time.
void loops(long count, const std::function<bool(long)>& ask) {
  std::atomic<long> next{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < kAtOnce; ++n) {
    threads.emplace_back([&] {
      for (long at = next++; at < count && ask(at);) {
        at = next++;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// Withdraws 1,000 requests, each after a random time: it waits, starts or runs.
void cancels(schedsvc::Scheduler& scheduler, Counts& counts, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> draw(2 * kCancelled);
  std::generate(draw.begin(), draw.end(),
                [&] { return std::uniform_real_distribution<>(0, 1)(random); });
  const auto part = [&draw](double most, std::size_t at) {
    return microseconds(static_cast<long>(most * draw[at]));
  };
  Counts alone;
  const auto began = steady_clock::now();
  loops(4 * kAtOnce, [&](long at) {
    Bell bell;
    serve(scheduler, alone, part(10'000, at), {}, bell);
    return true;
  });
  counts.failed = alone.failed;
  // How long a request takes here, if it is not withdrawn.
  const auto usual =
      std::chrono::duration<double, std::micro>(steady_clock::now() - began).count() / 4;
  loops(kCancelled, [&](long at) {
    schedsvc::CallOptions options;
    options.withdrawal = std::make_shared<schedsvc::Withdrawal>();
    Bell stop;
    Bell done;
    std::thread withdraws([&] {
      if (!done.wait(part(2 * usual, 2 * at))) {
        options.withdrawal->withdraw();
        stop.ring();
      }
    });
    const Fate fate = serve(scheduler, counts, part(10'000, 2 * at + 1), options, stop);
    counts.withdrawn += fate == Fate::kWithdrawn;
    counts.served += fate == Fate::kServed;
    done.ring();
    withdraws.join();
    return true;
  });
}

/// Asks without a pause until a line arrives or a request fails, and prints how many were served.
void kill(schedsvc::Scheduler& scheduler, Counts& counts) {
  std::atomic<bool> stops{false};
  std::thread reads([&stops] {
    std::string line;
    std::getline(std::cin, line);
    stops = true;
  });
  reads.detach();  // It may read when the program ends.
  loops(1L << 40, [&](long) {
    Bell bell;
    if (serve(scheduler, counts, microseconds(20'000), {}, bell) == Fate::kFailed) {
      counts.print();
      std::_Exit(0);  // Requests that still run would wait for a scheduler that is away.
    }
    if (const int served = ++counts.served; served % 100 == 0) {
      std::cout << std::to_string(served) + "\n" << std::flush;
    }
    return !stops;
  });
}

}  // namespace

int main(int count, char** arguments) {
  const std::string verb = count > 2 ? arguments[1] : "";
  if (verb != "kill" && (verb != "cancels" || count != 4)) {
    std::cerr << "usage: load cancels TARGET SEED, or load kill TARGETS\n";
    return 2;
  }
  schedsvc::Options options = dialing::options();
  options.failover_wait = std::chrono::minutes(1);  // A busy machine takes long to elect a leader.
  schedsvc::Scheduler scheduler(arguments[2], options);
  Counts counts;
  if (verb == "kill") {
    kill(scheduler, counts);
  } else {
    cancels(scheduler, counts, static_cast<unsigned>(std::stoul(arguments[3])));
  }
  if (!scheduler.shutdown(std::chrono::minutes(1))) {
    counts.fail("leases may be open until they expire");
  }
  counts.print();
  return 0;
}
