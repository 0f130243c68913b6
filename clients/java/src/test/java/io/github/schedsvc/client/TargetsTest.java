package io.github.schedsvc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.schedsvc.v1.Leadership;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

class TargetsTest {
  private static final Duration ANSWERED = Duration.ZERO;

  private static long at(long ms) {
    return Long.MAX_VALUE + TimeUnit.MILLISECONDS.toNanos(ms); // System.nanoTime() may overflow.
  }

  private static Leadership led(long term, String leader) {
    return Leadership.newBuilder().setTerm(term).setLeader(leader).build();
  }

  @Test
  void listIsRead() {
    assertEquals(List.of("a:1", "b:2"), new Targets(" a:1, b:2").all);
  }

  @Test
  void pausesAreShorterAfterTheLeaderIsNamed() {
    Targets targets = new Targets("a:1,b:1");
    assertPause(targets, Targets.NAMED_PAUSE_MAX, "a:1", "b:1", 1_000);
    // Another call of a:1 fails; there is no effect.
    assertPause(targets, Targets.NAMED_PAUSE_MAX, "a:1", "", 1_499);
    assertPause(targets, Targets.PAUSE_MAX, "a:1", "", 1_500);
    assertPause(targets, Targets.PAUSE_MAX, "b:1", "", 1_600);
    // A standby names a dead leader while its term lasts.
    assertPause(targets, Targets.PAUSE_MAX, "a:1", "b:1", 1_700);
    assertPause(targets, Targets.PAUSE_MAX, "b:1", "evil:6", 9_000);
    assertPause(targets, Targets.NAMED_PAUSE_MAX, "a:1", "b:1", 9_100);
  }

  private static void assertPause(
      Targets targets, Duration pause, String failed, String leader, long ms) {
    assertEquals(pause, targets.moveOn(failed, leader, at(ms), ANSWERED), "at " + ms);
    targets.answered();
  }

  @Test
  void leaderThatFailedIsNotFollowed() {
    Targets targets = new Targets("a:1,b:2,c:3");
    targets.moveOn("a:1", "", at(0), ANSWERED);
    targets.moveOn("b:2", "a:1", at(0), ANSWERED);
    assertEquals("c:3", targets.ask());
  }

  @Test
  void silentTargetIsPassedOverWhileAnotherAnswers() {
    Targets targets = new Targets("a:1,b:2");
    targets.moveOn("a:1", "", at(1_000), Duration.ofMillis(1_500));
    targets.moveOn("b:2", "a:1", at(1_100), ANSWERED);
    assertEquals("b:2", targets.ask());
    targets.moveOn("b:2", "a:1", at(2_499), ANSWERED);
    assertEquals("b:2", targets.ask());
    targets.moveOn("b:2", "a:1", at(2_500), ANSWERED);
    assertEquals("a:1", targets.ask());
  }

  @Test
  void oneTargetIsObeyedWithoutTerm() {
    Targets.Fence fence = new Targets.Fence(false);
    assertTrue(fence.obeys(led(3, "a/1")));
    assertTrue(fence.obeys(Leadership.getDefaultInstance()));
    assertFalse(fence.obeys(led(2, "a/1")));
    assertEquals(3, fence.latest());
  }

  @Test
  void processKeepsOneFenceForTheSameSchedulers() {
    assertSame(Targets.Fence.of(List.of("a", "b")), Targets.Fence.of(List.of("b", "a")));
    for (int i = 0; i < 2 * Targets.Fence.FENCES_MAX; i++) {
      Targets.Fence.of(List.of(String.valueOf(i)));
    }
    assertTrue(Targets.Fence.FENCES.size() <= Targets.Fence.FENCES_MAX);
  }
}
