package io.github.schedsvc.client;

import io.github.schedsvc.v1.Leadership;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Keeps the highest leadership that this process has seen. The term is compared first. An equal
 * term of another leader, and a lower term, are not obeyed. With several targets an answer without
 * a leadership counts as term 0.
 */
final class Fence {
  static final int FENCES_MAX = 1024;

  static final Map<Set<String>, Fence> FENCES =
      Collections.synchronizedMap(
          new LinkedHashMap<>() {
            @Override
            protected boolean removeEldestEntry(Map.Entry<Set<String>, Fence> eldest) {
              return size() > FENCES_MAX;
            }
          });

  private final boolean strict;
  private long term;
  private String leader = "";

  Fence(boolean strict) {
    this.strict = strict;
  }

  /** Returns this process's fence for the schedulers of a list, in whatever order. */
  static Fence of(List<String> targets) {
    return FENCES.computeIfAbsent(Set.copyOf(targets), all -> new Fence(all.size() > 1));
  }

  /** Returns whether an answer under this leadership has an effect; notes a higher one. */
  synchronized boolean obeys(Leadership leadership) {
    if (Long.compareUnsigned(leadership.getTerm(), term) > 0) {
      term = leadership.getTerm();
      leader = leadership.getLeader();
    }
    if (leadership.getTerm() == 0) {
      return !strict || term == 0;
    }
    return leadership.getTerm() == term && leadership.getLeader().equals(leader);
  }

  /** Returns the highest term. */
  synchronized long latest() {
    return term;
  }
}
