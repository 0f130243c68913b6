package io.github.schedsvc.client.servlet;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import io.github.schedsvc.client.FakeScheduler;
import io.github.schedsvc.client.Scheduler;
import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.CompleteRequest;
import io.github.schedsvc.v1.LeaseProgress;
import io.github.schedsvc.v1.Limit;
import io.github.schedsvc.v1.LimitKind;
import io.github.schedsvc.v1.Outcome;
import io.github.schedsvc.v1.QuotaSnapshot;
import io.github.schedsvc.v1.Refusal;
import io.grpc.Status;
import jakarta.servlet.AsyncContext;
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.io.OutputStream;
import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Level;
import java.util.logging.Logger;
import org.apache.catalina.Context;
import org.apache.catalina.Wrapper;
import org.apache.catalina.startup.Tomcat;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Gates servlets of a real Tomcat, with two threads, on a fake scheduler. */
@Timeout(120)
class GateFilterTest {
  private static final int THREADS = 2;

  private final FakeScheduler fake = new FakeScheduler(1);
  private final Scheduler scheduler = Scheduler.builder(fake.target()).build();
  private final Tomcat tomcat = new Tomcat();
  private final HttpClient client = HttpClient.newHttpClient();
  private final AtomicInteger runs = new AtomicInteger();
  private Context context;
  @TempDir private Path folder;

  private interface Work {
    void serve(HttpServletRequest request, HttpServletResponse response) throws Exception;
  }

  private final class Serving extends HttpServlet {
    private static final long serialVersionUID = 1;
    private final transient Work work;

    Serving(Work work) {
      this.work = work;
    }

    @Override
    protected void doPost(HttpServletRequest request, HttpServletResponse response)
        throws IOException {
      runs.incrementAndGet();
      try {
        work.serve(request, response);
      } catch (IOException | RuntimeException e) {
        throw e;
      } catch (Exception e) {
        throw new IllegalStateException(e);
      }
    }
  }

  private static AdmitRequest sizeOf(HttpServletRequest request, byte[] body) throws IOException {
    assertEquals(body.length, request.getInputStream().readAllBytes().length);
    String tenant = request.getHeader("x-tenant");
    if (tenant.equals("free")) {
      return null;
    }
    if (tenant.equals("wrong")) {
      throw new IllegalArgumentException("its \"size\" is\nunknown");
    }
    return AdmitRequest.newBuilder()
        .setTenant(tenant.equals("nobody") ? "" : tenant)
        .addInputTokens(body.length)
        .setMaxOutputTokens(20)
        .build();
  }

  @BeforeEach
  void prepare() {
    Logger.getLogger("org.apache").setLevel(Level.OFF);
    tomcat.setBaseDir(folder.toString());
    tomcat.setPort(0);
    tomcat.getConnector().setProperty("address", "127.0.0.1");
    tomcat.getConnector().setProperty("maxThreads", String.valueOf(THREADS));
    tomcat.getConnector().setProperty("minSpareThreads", String.valueOf(THREADS));
    context = tomcat.addContext("", folder.toString());
    context.addServletContainerInitializer(
        (classes, servlets) ->
            GateFilter.install(servlets, scheduler, GateFilterTest::sizeOf, "/*"),
        null);
  }

  @AfterEach
  void close() throws Exception {
    tomcat.stop();
    tomcat.destroy();
    assertTrue(scheduler.close(Duration.ofMinutes(1)));
    fake.close();
  }

  private void serve(boolean isAsync, Work work) throws Exception {
    Wrapper servlet = Tomcat.addServlet(context, "servlet", new Serving(work));
    servlet.setAsyncSupported(isAsync);
    context.addServletMappingDecoded("/*", "servlet");
    tomcat.start();
  }

  private void serve(Work work) throws Exception {
    serve(true, work);
  }

  private HttpRequest asking(String tenant) {
    return HttpRequest.newBuilder(
            URI.create("http://127.0.0.1:" + tomcat.getConnector().getLocalPort() + "/a"))
        .header("x-tenant", tenant)
        .POST(BodyPublishers.ofString("four"))
        .build();
  }

  private HttpResponse<String> answerTo(String tenant) throws Exception {
    return client.send(asking(tenant), BodyHandlers.ofString());
  }

  private static String header(HttpResponse<?> response, String name) {
    return response.headers().firstValue(name).orElse(null);
  }

  private CompleteRequest ended() {
    fake.until(() -> fake.leases.size() == 1 && fake.live() == 0);
    return fake.leases.get(1L).ends.get(0);
  }

  @ParameterizedTest
  @ValueSource(booleans = {true, false})
  void answerEndsTheLeaseWithItsReport(boolean isAsync) throws Exception {
    serve(
        isAsync,
        (request, response) -> {
          String body = request.getReader().readLine();
          LeaseProgress totals =
              LeaseProgress.newBuilder().setInputTokens(body.length()).setOutputTokens(7).build();
          GateFilter.turn(request).report(totals);
          response.getWriter().print("done");
        });
    HttpResponse<String> response = answerTo("red");
    assertEquals(200, response.statusCode());
    assertEquals("done", response.body());
    assertEquals("0.000", header(response, "x-schedsvc-queue-duration-ms"));
    assertEquals(
        fake.admits.get(0).getRequestId(), header(response, "x-schedsvc-request-id"));
    assertEquals(Outcome.OUTCOME_COMPLETED, ended().getOutcome());
    assertEquals(4, ended().getInputTokens());
    assertEquals(7, ended().getOutputTokens());
    assertEquals(4, fake.admits.get(0).getInputTokens(0));
    assertEquals(1, runs.get());
  }

  @Test
  void requestsThatWaitHoldNoThread() throws Exception {
    serve((request, response) -> response.getWriter().print("done"));
    fake.decision =
        (asked, answer) -> {
          fake.until(() -> fake.admits.size() > 4 * THREADS);
          fake.grant(asked, answer);
        };
    List<CompletableFuture<HttpResponse<String>>> answers = new ArrayList<>();
    for (int i = 0; i <= 4 * THREADS; i++) {
      answers.add(client.sendAsync(asking("red"), BodyHandlers.ofString()));
    }
    for (CompletableFuture<HttpResponse<String>> answer : answers) {
      assertEquals(200, answer.get(1, TimeUnit.MINUTES).statusCode());
    }
  }

  @ParameterizedTest
  @CsvSource({
    "22, 1200, 429, rate_limit_exceeded, rejected_quota, 2",
    "16, 900, 429, slow_down, rejected_flow_queue_full, 1",
    "18, 0, 400, context_length_exceeded, rejected_too_large,",
    "35, 0, 400, context_length_exceeded, evicted_too_large,",
    "21, 0, 403, unknown_tenant, rejected_unknown_tenant,",
    "25, 0, 429, request_too_large, rejected_quota_size,",
    "23, 1, 429, rate_limit_exceeded, rejected_deadline, 1",
    "32, 1, 429, rate_limit_exceeded, evicted_ttl, 1",
    "36, 1, 429, rate_limit_exceeded, evicted_deadline, 1",
    "19, 1, 503, server_is_overloaded, rejected_no_pool, 1",
    "31, 1, 503, server_is_overloaded, unspecified, 1",
  })
  void eachRefusalIsAnErrorOfItsOwn(
      int outcome, long retryMs, int status, String code, String reason, String retry)
      throws Exception {
    serve((request, response) -> {});
    QuotaSnapshot quota =
        QuotaSnapshot.newBuilder()
            .addLimits(
                Limit.newBuilder().setKind(LimitKind.LIMIT_KIND_QUEUED_REQUESTS).setLimit(9))
            .addLimits(
                Limit.newBuilder()
                    .setKind(LimitKind.LIMIT_KIND_TOKENS_PER_MINUTE)
                    .setLimit(600)
                    .setRemaining(20)
                    .setResetMs(90_500))
            .build();
    Refusal refusal =
        Refusal.newBuilder()
            .setMessage("not now")
            .setRetryAfterMs(retryMs)
            .setQuota(quota)
            .build();
    fake.decision = FakeScheduler.refusal(outcome, refusal);
    HttpResponse<String> response = answerTo("red");
    JsonObject error =
        JsonParser.parseString(response.body()).getAsJsonObject().getAsJsonObject("error");
    assertEquals(status, response.statusCode());
    assertEquals("not now", error.get("message").getAsString());
    assertEquals(code, error.get("code").getAsString());
    assertEquals("application/json", header(response, "content-type").split(";")[0]);
    assertEquals(reason, header(response, "x-schedsvc-dropped-reason"));
    assertEquals(retry, header(response, "retry-after"));
    assertEquals(retry == null ? "false" : null, header(response, "x-should-retry"));
    assertEquals("20", header(response, "x-ratelimit-remaining-tokens"));
    assertEquals("1m30.5s", header(response, "x-ratelimit-reset-tokens"));
    assertNull(header(answerTo("nobody"), "x-ratelimit-limit-tokens"));
    assertEquals(0, runs.get());
  }

  @ParameterizedTest
  @CsvSource({
    "UNAVAILABLE, 503, scheduler_unreachable, 1",
    "INVALID_ARGUMENT, 400,,",
    "UNAUTHENTICATED, 500,,", // A mistake of the server.
  })
  void failedCallIsAnswered(Status.Code code, int status, String reason, String retry)
      throws Exception {
    serve((request, response) -> {});
    fake.fail("Admit", code, 1);
    HttpResponse<String> response = answerTo("red");
    assertEquals(status, response.statusCode());
    assertEquals(reason, header(response, "x-schedsvc-dropped-reason"));
    assertEquals(retry, header(response, "retry-after"));
    assertEquals(0, runs.get());
  }

  @Test
  void closedSchedulerIsAway() throws Exception {
    serve((request, response) -> {});
    scheduler.close();
    assertEquals(503, answerTo("red").statusCode());
  }

  @Test
  void requestWithoutSizePasses() throws Exception {
    serve(
        (request, response) -> {
          assertNull(GateFilter.turn(request));
          response.getOutputStream().write(request.getInputStream().readAllBytes());
        });
    assertEquals("four", answerTo("free").body());
    HttpResponse<String> wrong = answerTo("wrong");
    assertEquals(400, wrong.statusCode());
    JsonObject error =
        JsonParser.parseString(wrong.body()).getAsJsonObject().getAsJsonObject("error");
    assertEquals("its \"size\" is\nunknown", error.get("message").getAsString());
    assertEquals(List.of(), fake.calls);
  }

  @Test
  void largeBodyIsRefused() throws Exception {
    serve((request, response) -> {});
    HttpRequest large =
        HttpRequest.newBuilder(asking("red").uri())
            .header("x-tenant", "red")
            .POST(BodyPublishers.ofByteArray(new byte[GateFilter.BODY_MAX + 1]))
            .build();
    assertEquals(413, client.send(large, BodyHandlers.ofString()).statusCode());
    assertEquals(List.of(), fake.calls);
  }

  @ParameterizedTest
  @ValueSource(strings = {"status", "throws"})
  void servletThatFailsCancelsItsLease(String how) throws Exception {
    serve(
        (request, response) -> {
          if (how.equals("throws")) {
            throw new IllegalStateException("as the test asks");
          }
          response.sendError(502);
        });
    assertTrue(answerTo("red").statusCode() >= 500);
    assertEquals(Outcome.OUTCOME_CANCELLED, ended().getOutcome());
  }

  @Test
  void clientThatLeavesCancelsItsLease() throws Exception {
    serve(
        (request, response) -> {
          OutputStream out = response.getOutputStream();
          while (true) { // Until a write fails.
            out.write(new byte[65_536]);
            out.flush();
          }
        });
    try (Socket socket = new Socket("127.0.0.1", asking("red").uri().getPort())) {
      String head = "POST /a HTTP/1.1\r\nHost: a\r\nx-tenant: red\r\nContent-Length: 4\r\n\r\nfour";
      socket.getOutputStream().write(head.getBytes(StandardCharsets.US_ASCII));
      assertTrue(socket.getInputStream().read() >= 0);
    }
    assertEquals(Outcome.OUTCOME_CANCELLED, ended().getOutcome());
  }

  @ParameterizedTest
  @CsvSource({"200, OUTCOME_COMPLETED", "500, OUTCOME_CANCELLED"})
  void servletThatAnswersLaterEndsItsLeaseThen(int status, Outcome outcome) throws Exception {
    CompletableFuture<AsyncContext> later = new CompletableFuture<>();
    serve((request, response) -> later.complete(request.startAsync()));
    CompletableFuture<HttpResponse<String>> answer =
        client.sendAsync(asking("red"), BodyHandlers.ofString());
    AsyncContext working = later.get(1, TimeUnit.MINUTES);
    assertEquals(1, fake.live());
    ((HttpServletResponse) working.getResponse()).setStatus(status);
    working.complete();
    assertEquals(status, answer.get(1, TimeUnit.MINUTES).statusCode());
    assertEquals(outcome, ended().getOutcome());
    assertEquals(1, runs.get());
  }

  @Test
  void servletThatDispatchesAgainHasOneTurn() throws Exception {
    serve(
        (request, response) -> {
          if (request.getAttribute("again") == null) {
            request.setAttribute("again", true);
            request.startAsync().dispatch();
          } else {
            response.getWriter().print("done");
          }
        });
    assertEquals("done", answerTo("red").body());
    assertEquals(Outcome.OUTCOME_COMPLETED, ended().getOutcome());
    assertEquals(1, fake.admits.size());
    assertEquals(2, runs.get());
  }

  @Test
  void lostLeaseIsSaidToTheServlet() throws Exception {
    fake.ttlMs = 30;
    serve(
        (request, response) -> {
          synchronized (fake) {
            fake.leases.get(1L).state = 3;
          }
          try {
            response
                .getWriter()
                .print(GateFilter.turn(request).lost().get(1, TimeUnit.MINUTES));
          } catch (ExecutionException e) {
            throw new IllegalStateException(e);
          }
        });
    assertEquals("LEASE_STATE_VOID", answerTo("red").body());
  }

  @ParameterizedTest
  @CsvSource({"7, 7ms", "1000, 1s", "90500, 1m30.5s", "60000, 1m0s", "3723004, 1h2m3.004s"})
  void timesAreWrittenAsOpenAiDoes(long ms, String written) {
    assertEquals(written, Answers.span(ms));
  }
}
