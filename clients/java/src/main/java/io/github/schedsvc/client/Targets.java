package io.github.schedsvc.client;

import io.github.schedsvc.v1.Leadership;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** Decides which of several schedulers a client asks. Moments are those of System.nanoTime(). */
final class Targets {
  static final int TARGETS_MAX = 16;
  /** The longest pause before the next attempt, and for NAMED_FOR after the leader was named. */
  static final Duration PAUSE_MAX = Duration.ofMillis(200);

  static final Duration NAMED_PAUSE_MAX = Duration.ofMillis(20);
  private static final Duration NAMED_FOR = Duration.ofMillis(500);
  /** The same name shortens the pauses again after this time, as a dead leader may be named. */
  private static final Duration NAMED_AGAIN = Duration.ofSeconds(2);

  /** In the order of the list. */
  final List<String> all;

  private final Set<String> failed = new HashSet<>();
  private final Map<String, Long> silentUntil = new HashMap<>();
  private String current;
  private String named = "";
  private long namedSince;

  /** Reads a list that is separated by commas. */
  Targets(String list) {
    List<String> all = new ArrayList<>();
    for (String part : list.split(",", -1)) {
      String target = part.strip();
      if (target.isEmpty() || all.contains(target)) {
        throw new IllegalArgumentException(
            "target \"" + target + "\" of \"" + list + "\" is empty or listed twice");
      }
      all.add(target);
    }
    if (all.size() > TARGETS_MAX) {
      throw new IllegalArgumentException(
          all.size() + " targets are listed; list at most " + TARGETS_MAX);
    }
    this.all = List.copyOf(all);
    this.current = all.get(0);
  }

  boolean several() {
    return all.size() > 1;
  }

  /** Returns the target to ask now. */
  synchronized String ask() {
    return current;
  }

  /** Notes that the current target serves this client. */
  synchronized void answered() {
    failed.clear();
    silentUntil.clear();
  }

  /**
   * Leaves a target that failed. The next one is the leader that it named, if that one is in the
   * list and has not failed itself. A target that gave no answer is passed over for the time silent
   * while others answer. There is no effect if another call has moved on already.
   *
   * @return the longest pause before the next attempt
   */
  synchronized Duration moveOn(String target, String leader, long now, Duration silent) {
    if (target.equals(current) && several()) {
      choose(target, leader, now, silent);
    }
    boolean isQuick = !named.isEmpty() && now - namedSince < NAMED_FOR.toNanos();
    return isQuick ? NAMED_PAUSE_MAX : PAUSE_MAX;
  }

  private void choose(String target, String leader, long now, Duration silent) {
    failed.add(target);
    silentUntil.merge(target, now + silent.toNanos(), Math::max);
    boolean isTrusted = !failed.contains(leader);
    List<String> ring = new ArrayList<>(all);
    Collections.rotate(ring, -all.indexOf(target) - 1);
    String first = ring.get(0);
    ring.removeIf(each -> silentUntil.getOrDefault(each, now) > now);
    if (isTrusted && ring.contains(leader)) {
      current = leader;
      if (!leader.equals(named) || now - namedSince >= NAMED_AGAIN.toNanos()) {
        named = leader;
        namedSince = now;
      }
    } else {
      current = ring.isEmpty() ? first : ring.get(0);
    }
    if (failed.size() == all.size()) {
      failed.clear();
    }
  }

  /**
   * Keeps the highest leadership that this process has seen. The term is compared first. An equal
   * term of another leader, and a lower term, are not obeyed. With several targets an answer
   * without a leadership counts as term 0.
   */
  static final class Fence {
    static final int FENCES_MAX = 1024;

    static final Map<Set<String>, Fence> FENCES = new LinkedHashMap<>();

    private final boolean strict;
    private long term;
    private String leader = "";

    Fence(boolean strict) {
      this.strict = strict;
    }

    /** Returns this process's fence for the schedulers of a list, in whatever order. */
    static synchronized Fence of(List<String> targets) {
      Set<String> key = Set.copyOf(targets);
      if (FENCES.size() >= FENCES_MAX && !FENCES.containsKey(key)) {
        FENCES.remove(FENCES.keySet().iterator().next());
      }
      return FENCES.computeIfAbsent(key, all -> new Fence(all.size() > 1));
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
}
