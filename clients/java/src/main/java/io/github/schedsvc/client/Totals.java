package io.github.schedsvc.client;

import io.github.schedsvc.v1.LeaseProgress;

/** Holds running totals of a request, never differences. A total of 0 is not known. */
public final class Totals {
  /** States nothing. */
  public static final Totals UNKNOWN = new Totals(0, 0, 0);

  private final long inputTokens;
  private final long cachedInputTokens;
  private final long outputTokens;

  private Totals(long inputTokens, long cachedInputTokens, long outputTokens) {
    this.inputTokens = inputTokens;
    this.cachedInputTokens = cachedInputTokens;
    this.outputTokens = outputTokens;
  }

  /** Returns totals of input, cached input included, and of output. */
  public static Totals of(long inputTokens, long outputTokens) {
    return new Totals(inputTokens, 0, outputTokens);
  }

  /** Returns these totals with the part of the input that the prefix cache served. */
  public Totals withCachedInput(long cachedInputTokens) {
    return new Totals(inputTokens, cachedInputTokens, outputTokens);
  }

  /** Notes the known totals in a report. */
  void addTo(LeaseProgress.Builder report) {
    if (inputTokens != 0) {
      report.setInputTokens(inputTokens);
    }
    if (cachedInputTokens != 0) {
      report.setCachedInputTokens(cachedInputTokens);
    }
    if (outputTokens != 0) {
      report.setOutputTokens(outputTokens);
    }
  }
}
