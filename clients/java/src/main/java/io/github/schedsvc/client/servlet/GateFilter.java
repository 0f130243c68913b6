package io.github.schedsvc.client.servlet;

import io.github.schedsvc.client.Admission;
import io.github.schedsvc.client.Scheduler;
import io.github.schedsvc.v1.AdmitRequest;
import io.github.schedsvc.v1.LeaseProgress;
import jakarta.servlet.AsyncContext;
import jakarta.servlet.AsyncEvent;
import jakarta.servlet.AsyncListener;
import jakarta.servlet.DispatcherType;
import jakarta.servlet.Filter;
import jakarta.servlet.FilterChain;
import jakarta.servlet.FilterRegistration;
import jakarta.servlet.ServletContext;
import jakarta.servlet.ServletException;
import jakarta.servlet.ServletRequest;
import jakarta.servlet.ServletResponse;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.util.EnumSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.function.Consumer;

/**
 * Lets each request of a servlet container wait for its turn before its servlet runs. A request
 * that waits holds no thread if the filter and its servlet support asynchronous processing.
 *
 * <p>The lease ends with the answer: as completed, or as cancelled if the status is 400 or above,
 * or the servlet throws, as a write to a client that left does.
 */
public final class GateFilter implements Filter {
  /** The largest body of a request, in bytes. */
  static final int BODY_MAX = 32 << 20;

  private static final String TURN = GateFilter.class.getName() + ".turn";
  private static final String VERDICT = GateFilter.class.getName() + ".verdict";

  /**
   * Gives the size of a request, and its tenant. With null the request passes without a turn. An
   * IllegalArgumentException is answered with status 400.
   *
   * <p>Name the tenant by what your server has verified, never by a header that the client chose.
   */
  @FunctionalInterface
  public interface SizeOf {
    /** Returns the request to the scheduler, or null. */
    AdmitRequest sizeOf(HttpServletRequest request, byte[] body) throws IOException;
  }

  private final Scheduler scheduler;
  private final SizeOf sizeOf;

  /** Makes a filter; {@link #install} maps it, too. */
  public GateFilter(Scheduler scheduler, SizeOf sizeOf) {
    this.scheduler = scheduler;
    this.sizeOf = sizeOf;
  }

  /** Gates the paths of a server that match a pattern, behind the filters that it has. */
  public static void install(
      ServletContext context, Scheduler scheduler, SizeOf sizeOf, String... patterns) {
    FilterRegistration.Dynamic filter =
        context.addFilter(GateFilter.class.getName(), new GateFilter(scheduler, sizeOf));
    filter.setAsyncSupported(true);
    filter.addMappingForUrlPatterns(
        EnumSet.of(DispatcherType.REQUEST, DispatcherType.ASYNC), true, patterns);
  }

  /**
   * Returns the admission of a gated request: report its tokens to it, and stop the engine's work
   * when its lease is lost. It is null for a request that passed without a turn.
   */
  public static Admission turn(ServletRequest request) {
    return (Admission) request.getAttribute(TURN);
  }

  @Override
  public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
      throws IOException, ServletException {
    Verdict verdict = (Verdict) request.getAttribute(VERDICT);
    if (verdict != null) {
      request.removeAttribute(VERDICT);
      obey(verdict, (HttpServletRequest) request, (HttpServletResponse) response, chain);
    } else if (turn(request) != null) { // The servlet dispatches its own request again.
      chain.doFilter(request, response);
    } else {
      ask((HttpServletRequest) request, (HttpServletResponse) response, chain);
    }
  }

  private void ask(HttpServletRequest request, HttpServletResponse response, FilterChain chain)
      throws IOException, ServletException {
    byte[] body = request.getInputStream().readNBytes(BODY_MAX + 1);
    if (body.length > BODY_MAX) {
      Answers.TOO_LARGE.write(response, "the body has more than " + BODY_MAX + " bytes", 0);
      return;
    }
    AdmitRequest size;
    try {
      size = sizeOf.sizeOf(new RereadRequest(request, body), body);
    } catch (IllegalArgumentException e) {
      Answers.INVALID_SIZE.write(response, e.getMessage(), 0);
      return;
    }
    HttpServletRequest again = new RereadRequest(request, body);
    if (size == null) {
      chain.doFilter(again, response);
    } else if (request.isAsyncSupported()) {
      await(size, again, response);
    } else {
      obey(new Verdict(size, scheduler.admitAsync(size)), again, response, chain);
    }
  }

  /** Leaves the thread, and dispatches the request again with the verdict. */
  private void await(AdmitRequest size, HttpServletRequest request, HttpServletResponse response) {
    AsyncContext waiting = request.startAsync(request, response);
    waiting.setTimeout(0); // The scheduler bounds the wait.
    CompletableFuture<Admission> admitted = scheduler.admitAsync(size);
    waiting.addListener(new OnEnd(isBroken -> admitted.cancel(true)));
    admitted.whenComplete(
        (admission, failure) -> {
          request.setAttribute(VERDICT, new Verdict(size, admitted));
          try {
            waiting.dispatch();
          } catch (IllegalStateException e) { // The client has left.
            admitted.thenAccept(Admission::giveBack);
          }
        });
  }

  private static void obey(
      Verdict verdict, HttpServletRequest request, HttpServletResponse response, FilterChain chain)
      throws IOException, ServletException {
    Admission admission;
    try {
      admission = verdict.admitted.get();
    } catch (InterruptedException e) {
      verdict.admitted.cancel(true);
      verdict.admitted.thenAccept(Admission::giveBack);
      Thread.currentThread().interrupt();
      Answers.OVERLOADED.write(response, "the server stops", Answers.AWAY_RETRY_MS);
      return;
    } catch (ExecutionException e) {
      Answers.refuse(response, verdict.size, e.getCause());
      return;
    }
    request.setAttribute(TURN, admission);
    Answers.describe(
        response,
        verdict.size,
        admission.requestId(),
        admission.queueDuration(),
        admission.grant().getQuota());
    boolean isWhole = false;
    try {
      chain.doFilter(request, response);
      isWhole = true;
    } finally {
      if (isWhole && request.isAsyncStarted()) {
        OnEnd onEnd = new OnEnd(isBroken -> end(admission, response, !isBroken));
        request.getAsyncContext().addListener(onEnd);
      } else {
        end(admission, response, isWhole);
      }
    }
  }

  /** Ends the lease. The answer does not wait for the scheduler; if the end fails, it expires. */
  private static void end(Admission admission, HttpServletResponse response, boolean isWhole) {
    if (isWhole && response.getStatus() < HttpServletResponse.SC_BAD_REQUEST) {
      admission.complete(LeaseProgress.getDefaultInstance());
    } else {
      admission.cancel(LeaseProgress.getDefaultInstance());
    }
  }

  private static final class Verdict {
    final AdmitRequest size;
    final CompletableFuture<Admission> admitted;

    Verdict(AdmitRequest size, CompletableFuture<Admission> admitted) {
      this.size = size;
      this.admitted = admitted;
    }
  }

  /** Learns how the asynchronous part of a request ends. */
  private static final class OnEnd implements AsyncListener {
    private final Consumer<Boolean> ended;

    OnEnd(Consumer<Boolean> ended) {
      this.ended = ended;
    }

    @Override
    public void onStartAsync(AsyncEvent event) {
      event.getAsyncContext().addListener(this);
    }

    @Override
    public void onComplete(AsyncEvent event) {
      ended.accept(false);
    }

    @Override
    public void onError(AsyncEvent event) {
      ended.accept(true);
    }

    @Override
    public void onTimeout(AsyncEvent event) {
      ended.accept(true);
    }
  }
}
