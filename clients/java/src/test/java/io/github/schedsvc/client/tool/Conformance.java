package io.github.schedsvc.client.tool;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.BadRequest.FieldViolation;
import io.github.schedsvc.client.CallException;
import io.github.schedsvc.client.Scheduler;
import io.github.schedsvc.client.tool.Matching.Mismatch;
import io.github.schedsvc.v1.ExplainServiceGrpc;
import io.github.schedsvc.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.stub.MetadataUtils;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/**
 * Runs conformance scripts that need no Session against a live scheduler, through the client:
 * TARGET SCRIPT...
 *
 * <p>Its status is 0 only if every step of every script holds. With SCHEDSVC_TLS_CA_FILE it uses
 * TLS.
 */
public final class Conformance {
  private static final long DEADLINE_MS = 30_000;
  private static final long PATIENCE_NANOS = TimeUnit.SECONDS.toNanos(20);
  private static final long POLL_MS = 20;

  private final Scheduler scheduler;
  private final Map<String, JsonElement> saved = new HashMap<>();
  private final Map<String, Started> calls = new HashMap<>();

  private Conformance(Scheduler scheduler) {
    this.scheduler = scheduler;
  }

  /** Runs scripts. */
  public static void main(String[] arguments) throws IOException, InterruptedException {
    if (arguments.length < 2) {
      System.err.println("usage: Conformance TARGET SCRIPT...");
      System.exit(2);
    }
    int code = 0;
    for (int i = 1; i < arguments.length; i++) {
      Path path = Path.of(arguments[i]);
      try (Scheduler scheduler = Dialing.builder(arguments[0], new Headers()).build()) {
        int steps = new Conformance(scheduler).run(path);
        System.out.printf("ok   %s: %d steps%n", path.getFileName(), steps);
      } catch (Mismatch e) {
        System.out.printf("FAIL %s %s%n", path.getFileName(), e.getMessage());
        code = 1;
      }
    }
    System.exit(code);
  }

  private int run(Path path) throws IOException, InterruptedException {
    JsonElement script = JsonParser.parseString(Files.readString(path));
    JsonArray steps = script.getAsJsonObject().getAsJsonArray("steps");
    for (int number = 1; number <= steps.size(); number++) {
      JsonObject step = steps.get(number - 1).getAsJsonObject();
      try {
        run(step);
      } catch (Mismatch e) {
        throw new Mismatch("step " + number + " " + step.get("note") + ": " + e.getMessage());
      }
    }
    if (!calls.isEmpty()) {
      throw new Mismatch("calls that were not finished: " + calls.keySet());
    }
    return steps.size();
  }

  private void run(JsonObject step) throws InterruptedException {
    if (step.has("call")) {
      call(step);
    } else if (step.has("start")) {
      calls.put(text(step, "as"), start(step, text(step, "start")));
      Thread.sleep(POLL_MS); // The call has to be on its way before the next step is.
    } else if (step.has("waits")) {
      Started call = calls.get(text(step, "waits"));
      Thread.sleep(step.get("for_ms").getAsLong());
      if (call.outcome.isDone()) {
        throw new Mismatch("it was answered: " + call.outcome.join());
      }
    } else if (step.has("finish")) {
      judge(step, calls.remove(text(step, "finish")).outcome.join());
    } else if (step.has("cancel")) {
      calls.get(text(step, "cancel")).context.cancel(null);
    } else if (step.has("sleep_ms")) {
      Thread.sleep(step.get("sleep_ms").getAsLong());
    } else {
      throw new Mismatch("no verb that a client without a Session knows: " + step);
    }
  }

  /** Makes a call, once or until its answer matches. */
  private void call(JsonObject step) throws InterruptedException {
    long end = System.nanoTime() + PATIENCE_NANOS;
    while (true) {
      JsonObject outcome = start(step, text(step, "call")).outcome.join();
      if (!step.has("until")) {
        judge(step, outcome);
        return;
      }
      JsonElement until = Matching.fill(step.get("until"), saved);
      boolean isAnswered = outcome.has("answer");
      if (isAnswered && Matching.mismatches(until, outcome.get("answer"), "").isEmpty()) {
        judge(step, outcome);
        return;
      }
      if (System.nanoTime() - end > 0) {
        Matching.check(until, isAnswered ? outcome.get("answer") : outcome);
      }
      Thread.sleep(POLL_MS);
    }
  }

  private void judge(JsonObject step, JsonObject outcome) {
    JsonElement expected = step.has("expect") ? step.get("expect") : new JsonObject();
    String part = "answer";
    if (step.has("error")) {
      part = "error";
      expected = step.get("error").deepCopy();
      if (expected.getAsJsonObject().has("field")) {
        JsonObject has = new JsonObject();
        has.add("$has", expected.getAsJsonObject().get("field"));
        expected.getAsJsonObject().add("field", has);
      }
    }
    if (!outcome.has(part)) {
      throw new Mismatch("it has no " + part + ": " + outcome);
    }
    JsonElement actual = outcome.get(part);
    Matching.check(Matching.fill(expected, saved), actual);
    if (step.has("save")) {
      for (Map.Entry<String, JsonElement> each : step.getAsJsonObject("save").entrySet()) {
        saved.put(each.getKey(), Matching.lookUp(actual, each.getValue().getAsString()));
      }
    }
  }

  private Started start(JsonObject step, String name) {
    MethodDescriptor<?, ? extends Message> method = method(name);
    Metadata headers = new Metadata();
    if (step.has("metadata")) {
      for (Map.Entry<String, JsonElement> each : step.getAsJsonObject("metadata").entrySet()) {
        Metadata.Key<String> key =
            Metadata.Key.of(each.getKey(), Metadata.ASCII_STRING_MARSHALLER);
        headers.put(key, each.getValue().getAsString());
      }
    }
    long deadlineMs = step.has("deadline_ms") ? step.get("deadline_ms").getAsLong() : DEADLINE_MS;
    return start(
        method.toBuilder(new Bytes(), method.getResponseMarshaller()).build(),
        requestOf(step, method),
        CallOptions.DEFAULT
            .withDeadlineAfter(deadlineMs, TimeUnit.MILLISECONDS)
            .withOption(Headers.OPTION, headers));
  }

  private <R extends Message> Started start(
      MethodDescriptor<byte[], R> method, byte[] request, CallOptions options) {
    Started started = new Started();
    started.context.run(
        () ->
            scheduler
                .call(method, request, options)
                .whenComplete(
                    (answer, failure) -> {
                      JsonObject outcome = new JsonObject();
                      if (failure == null) {
                        outcome.add("answer", asJson(answer));
                      } else {
                        outcome.add("error", asJson((CallException) failure));
                      }
                      started.outcome.complete(outcome);
                    }));
    return started;
  }

  private byte[] requestOf(JsonObject step, MethodDescriptor<?, ?> method) {
    if (step.has("raw")) {
      String hex = Matching.fill(step.get("raw"), saved).getAsString();
      byte[] raw = new byte[hex.length() / 2];
      for (int i = 0; i < raw.length; i++) {
        raw[i] = (byte) Integer.parseInt(hex.substring(2 * i, 2 * i + 2), 16);
      }
      return raw;
    }
    MethodDescriptor.PrototypeMarshaller<?> marshaller =
        (MethodDescriptor.PrototypeMarshaller<?>) method.getRequestMarshaller();
    Message.Builder request = ((Message) marshaller.getMessagePrototype()).newBuilderForType();
    try {
      if (step.has("request")) {
        String json = Matching.fill(step.get("request"), saved).toString();
        JsonFormat.parser().merge(json, request);
      }
    } catch (InvalidProtocolBufferException e) {
      throw new UncheckedIOException(e);
    }
    return request.build().toByteArray();
  }

  private static MethodDescriptor<?, ? extends Message> method(String name) {
    switch (name) {
      case "Admit":
        return SchedulerServiceGrpc.getAdmitMethod();
      case "Progress":
        return SchedulerServiceGrpc.getProgressMethod();
      case "Complete":
        return SchedulerServiceGrpc.getCompleteMethod();
      case "Stats":
        return SchedulerServiceGrpc.getStatsMethod();
      case "Explain":
        return ExplainServiceGrpc.getExplainMethod();
      default:
        throw new Mismatch("no method " + name);
    }
  }

  /** Returns a message as scripts write it. */
  private static JsonElement asJson(Message answer) {
    try {
      return JsonParser.parseString(
          JsonFormat.printer()
              .preservingProtoFieldNames()
              .includingDefaultValueFields()
              .print(answer));
    } catch (InvalidProtocolBufferException e) {
      throw new UncheckedIOException(e);
    }
  }

  /** Returns what a script can expect of a call that failed. */
  private static JsonElement asJson(CallException failure) {
    JsonArray fields = new JsonArray();
    failure.fields().stream().map(FieldViolation::getField).forEach(fields::add);
    JsonObject error = new JsonObject();
    error.addProperty("code", failure.getStatus().getCode().name());
    error.addProperty("message", failure.getStatus().getDescription());
    error.add("field", fields);
    error.addProperty("retry", !failure.retryAfter().isZero());
    return error;
  }

  private static String text(JsonObject step, String key) {
    return step.get(key).getAsString();
  }

  private static final class Started {
    final Context.CancellableContext context = Context.current().withCancellation();
    final CompletableFuture<JsonObject> outcome = new CompletableFuture<>();
  }

  /** Sends the metadata of a step. */
  private static final class Headers implements ClientInterceptor {
    static final CallOptions.Key<Metadata> OPTION =
        CallOptions.Key.createWithDefault("headers", new Metadata());

    @Override
    public <Q, R> ClientCall<Q, R> interceptCall(
        MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
      return MetadataUtils.newAttachHeadersInterceptor(options.getOption(OPTION))
          .interceptCall(method, options, next);
    }
  }

  /** Sends bytes as they are. */
  private static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] value) {
      return new ByteArrayInputStream(value);
    }

    @Override
    public byte[] parse(InputStream stream) {
      throw new UnsupportedOperationException("requests are not read");
    }
  }
}
