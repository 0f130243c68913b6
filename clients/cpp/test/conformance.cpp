// Runs scripts of ../../conformance that need no Session against a live scheduler, through the
// client: conformance TARGET SCRIPT...
//
// Its status is 0 only if every step of every script holds. With SCHEDSVC_TLS_CA_FILE it uses TLS.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <map>
#include <stdexcept>
#include <thread>

#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>

#include <schedsvc/scheduler.h>
#include <schedsvc/v1/explain.grpc.pb.h>

#include "dialing.h"
#include "matching.h"

namespace conformance {
namespace {

using std::chrono::milliseconds;
namespace v1 = schedsvc::v1;

constexpr milliseconds kDeadline{30'000};
constexpr milliseconds kPatience{20'000};
constexpr milliseconds kPoll{20};

milliseconds millis(const json& value) {
  return milliseconds(static_cast<milliseconds::rep>(number(value).value()));
}

/// Is a request whose bytes are sent as they are.
struct Raw {
  std::string path;
  grpc::ByteBuffer bytes;
};

/// Sends such requests as a generated stub sends its own.
template <class Response>
class RawStub {
 public:
  explicit RawStub(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {}

  grpc::Status send(grpc::ClientContext* context, const Raw& request, Response* response) {
    grpc::CompletionQueue queue;
    const auto call = stub_.PrepareUnaryCall(context, request.path, request.bytes, &queue);
    call->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool is_ok = false;
    queue.Next(&tag, &is_ok);
    if (status.ok()) {
      status = grpc::SerializationTraits<Response>::Deserialize(&answer, response);
    }
    return status;
  }

 private:
  grpc::GenericStub stub_;
};

std::string bytes_of(const std::string& hexadecimal) {
  std::string bytes;
  for (std::size_t at = 0; at + 1 < hexadecimal.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(hexadecimal.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

/// Returns what became of a call: its "answer", as scripts write it, or its "error".
template <class Response>
json outcome_of(const std::variant<Response, schedsvc::CallError>& result) {
  if (const auto* error = std::get_if<schedsvc::CallError>(&result)) {
    json fields = json::array();
    for (const auto& field : error->fields) {
      fields.push_back(field.field);
    }
    return {{"error",
             {{"code", error->code_name()},
              {"message", error->message},
              {"field", fields},
              {"retry", error->retry_after.count() > 0}}}};
  }
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  const auto printed =
      google::protobuf::util::MessageToJsonString(std::get<0>(result), &text, options);
  if (!printed.ok()) {
    throw std::runtime_error(printed.ToString());
  }
  return {{"answer", json::parse(text)}};
}

template <class Stub, class Request, class Response>
json invoke(schedsvc::Scheduler& scheduler,
            grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const std::string& path, const json& step, const schedsvc::CallOptions& options) {
  if (step.contains("raw")) {
    grpc::Slice slice(bytes_of(step["raw"]));
    return outcome_of(scheduler.call(&RawStub<Response>::send,
                                     Raw{path, grpc::ByteBuffer(&slice, 1)}, options));
  }
  Request request;
  const auto read = google::protobuf::util::JsonStringToMessage(
      step.value("request", json::object()).dump(), &request);
  if (!read.ok()) {
    throw std::invalid_argument(read.ToString());
  }
  return outcome_of(scheduler.call(method, request, options));
}

json call_method(schedsvc::Scheduler& scheduler, const std::string& name, const json& step,
                 const schedsvc::CallOptions& options) {
  using Stub = v1::SchedulerService::Stub;
  const auto made = [&](auto method, const std::string& service) {
    return invoke(scheduler, method, "/schedsvc.v1." + service + "/" + name, step, options);
  };
  if (name == "Admit") return made(&Stub::Admit, "SchedulerService");
  if (name == "Progress") return made(&Stub::Progress, "SchedulerService");
  if (name == "Complete") return made(&Stub::Complete, "SchedulerService");
  if (name == "Stats") return made(&Stub::Stats, "SchedulerService");
  if (name == "Explain") return made(&v1::ExplainService::Stub::Explain, "ExplainService");
  throw std::invalid_argument("no method " + name);
}

/// Is the state of one script: what was saved, and calls under way.
class Runner {
 public:
  explicit Runner(const std::string& target) : scheduler_(target, dialing::options()) {}

  ~Runner() {
    for (auto& [name, call] : calls_) {
      call.withdrawal->withdraw();
    }
  }

  void run(const json& step) {
    if (step.contains("call")) {
      make(step);
    } else if (step.contains("start")) {
      calls_.emplace(step.at("as").get<std::string>(), start(step, step["start"]));
      std::this_thread::sleep_for(kPoll);  // It has to be on its way before the next step is.
    } else if (step.contains("waits")) {
      auto& call = calls_.at(step["waits"].get<std::string>());
      if (call.outcome.wait_for(millis(step.at("for_ms"))) == std::future_status::ready) {
        throw std::runtime_error("it was answered: " + call.outcome.get().dump());
      }
    } else if (step.contains("finish")) {
      auto call = calls_.extract(step["finish"].get<std::string>());
      judge(step, call.mapped().outcome.get());
    } else if (step.contains("cancel")) {
      calls_.at(step["cancel"].get<std::string>()).withdrawal->withdraw();
    } else if (step.contains("sleep_ms")) {
      std::this_thread::sleep_for(millis(step["sleep_ms"]));
    } else {
      throw std::runtime_error("no verb that a client without a Session knows: " + step.dump());
    }
  }

  std::size_t unfinished() const { return calls_.size(); }

 private:
  struct Started {
    std::shared_ptr<schedsvc::Withdrawal> withdrawal = std::make_shared<schedsvc::Withdrawal>();
    std::future<json> outcome;
  };

  /// Makes a call, once or until its answer matches.
  void make(const json& step) {
    const json until = fill(step.value("until", json()), saved_);
    for (const auto end = std::chrono::steady_clock::now() + kPatience;;
         std::this_thread::sleep_for(kPoll)) {
      const json outcome = start(step, step["call"]).outcome.get();
      if (until.is_null()) {
        return judge(step, outcome);
      }
      const std::string found = mismatches(until, outcome.value("answer", json()));
      if (found.empty()) {
        return judge(step, outcome);
      }
      if (std::chrono::steady_clock::now() > end) {
        throw std::runtime_error(found);
      }
    }
  }

  Started start(const json& step, const std::string& name) {
    json sent = json::object();
    for (const char* key : {"request", "raw"}) {
      if (step.contains(key)) {
        sent[key] = fill(step[key], saved_);
      }
    }
    Started started;
    schedsvc::CallOptions options;
    options.timeout = step.contains("deadline_ms") ? millis(step["deadline_ms"]) : kDeadline;
    options.withdrawal = started.withdrawal;
    const json metadata = step.value("metadata", json::object());
    for (const auto& [key, value] : metadata.items()) {
      options.metadata.emplace_back(key, value);
    }
    started.outcome = std::async(std::launch::async, [this, name, sent, options] {
      return call_method(scheduler_, name, sent, options);
    });
    return started;
  }

  void judge(const json& step, const json& outcome) {
    json expected = step.value("expect", json::object());
    const bool is_error = step.contains("error");
    if (is_error) {
      expected = step["error"];
      if (expected.contains("field")) {
        expected["field"] = {{"$has", expected["field"]}};
      }
    }
    const std::string part = is_error ? "error" : "answer";
    if (!outcome.contains(part)) {
      throw std::runtime_error("it has no " + part + ": " + outcome.dump());
    }
    const std::string found = mismatches(fill(expected, saved_), outcome[part]);
    if (!found.empty()) {
      throw std::runtime_error(found);
    }
    const json kept = step.value("save", json::object());
    for (const auto& [name, path] : kept.items()) {
      saved_[name] = look_up(outcome[part], path);
    }
  }

  schedsvc::Scheduler scheduler_;
  json saved_ = json::object();
  std::map<std::string, Started> calls_;  // They end before the scheduler does.
};

std::size_t run_script(const std::string& target, const std::string& path) {
  std::ifstream file(path);
  const json script = json::parse(file);
  Runner runner(target);
  std::size_t number = 0;
  for (const json& step : script.at("steps")) {
    ++number;
    try {
      runner.run(step);
    } catch (const std::exception& failure) {
      throw std::runtime_error("step " + std::to_string(number) + " " + step.value("note", "") +
                               ": " + failure.what());
    }
  }
  if (runner.unfinished() > 0) {
    throw std::runtime_error("calls that were not finished: " +
                             std::to_string(runner.unfinished()));
  }
  return number;
}

}  // namespace
}  // namespace conformance

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: conformance TARGET SCRIPT...\n";
    return 2;
  }
  int code = 0;
  for (int at = 2; at < count; ++at) {
    const std::string name = std::filesystem::path(arguments[at]).filename();
    try {
      const auto steps = conformance::run_script(arguments[1], arguments[at]);
      std::cout << "ok   " << name << ": " << steps << " steps\n";
    } catch (const std::exception& failure) {
      std::cout << "FAIL " << name << " " << failure.what() << "\n";
      code = 1;
    }
  }
  return code;
}
