package io.github.schedsvc.client;

import io.github.schedsvc.v1.LeaseProgress;

/**
 * Holds running totals of a request, never differences. A total of 0 is not known. One beyond the
 * limits of the contract is brought within them.
 */
public final class Totals {
  private static final long TOKENS_MAX = 1 << 27;

  /** States nothing. */
  public static final Totals UNKNOWN = of(0, 0);

  private final LeaseProgress totals;

  private Totals(LeaseProgress.Builder totals) {
    this.totals = totals.build();
  }

  /** Returns totals of input, cached input included, and of output. */
  public static Totals of(long inputTokens, long outputTokens) {
    return new Totals(
        LeaseProgress.newBuilder()
            .setInputTokens(within(inputTokens))
            .setOutputTokens(within(outputTokens)));
  }

  /** Returns these totals with the part of the input that the prefix cache served. */
  public Totals withCachedInput(long cachedInputTokens) {
    return new Totals(totals.toBuilder().setCachedInputTokens(within(cachedInputTokens)));
  }

  private static long within(long total) {
    return Math.max(0, Math.min(total, TOKENS_MAX));
  }

  /** Notes the known totals in a report. */
  void addTo(LeaseProgress.Builder report) {
    totals
        .getAllFields()
        .forEach(
            (field, total) -> {
              if (!total.equals(0L)) {
                report.setField(field, total);
              }
            });
  }
}
