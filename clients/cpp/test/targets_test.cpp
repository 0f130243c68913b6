#include "targets.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace schedsvc {
namespace {

Clock::time_point at(int ms) { return Clock::time_point() + milliseconds(1'000'000 + ms); }

std::string complaint(const std::string& list) {
  try {
    Targets targets(list);
  } catch (const std::invalid_argument& wrong) {
    return wrong.what();
  }
  return "";
}

TEST(Targets, AreListedOnceAndNotEmpty) {
  std::string many = "a:0";
  for (std::size_t n = 1; n <= kTargetsMax; ++n) {
    many += ",a:" + std::to_string(n);
  }
  EXPECT_EQ(complaint(""), "schedsvc: target \"\" of \"\" is empty or listed twice");
  EXPECT_EQ(complaint("a:1,"), "schedsvc: target \"\" of \"a:1,\" is empty or listed twice");
  EXPECT_EQ(complaint("a:1,b:2,a:1"),
            "schedsvc: target \"a:1\" of \"a:1,b:2,a:1\" is empty or listed twice");
  EXPECT_EQ(complaint(many), "schedsvc: 17 targets are listed; list at most 16");
  EXPECT_EQ(Targets(" a:1, b:2").all(), (std::vector<std::string>{"a:1", "b:2"}));
}

TEST(Targets, PauseLessAfterTheLeaderIsNamed) {
  Targets targets("a:1,b:1");
  const struct {
    const char* failed;
    const char* leader;
    int ms;
    milliseconds pause;
  } moves[] = {
      {"a:1", "b:1", 1'000, kNamedPauseMax},
      {"a:1", "", 1'499, kNamedPauseMax},  // Another call of a:1 fails; there is no effect.
      {"a:1", "", 1'500, kPauseMax},
      {"b:1", "", 1'600, kPauseMax},
      {"a:1", "b:1", 1'700, kPauseMax},  // A standby names a dead leader while its term lasts.
      {"b:1", "evil:6", 9'000, kPauseMax},
      {"a:1", "b:1", 9'100, kNamedPauseMax},
  };
  for (const auto& move : moves) {
    EXPECT_EQ(targets.move_on(move.failed, move.leader, at(move.ms), milliseconds(0)), move.pause)
        << move.ms;
    targets.answered();
  }
}

TEST(Targets, DoNotFollowALeaderThatFailed) {
  Targets targets("a:1,b:2,c:3");
  targets.move_on("a:1", "", at(0), milliseconds(0));
  targets.move_on("b:2", "a:1", at(0), milliseconds(0));
  EXPECT_EQ(targets.ask(), "c:3");
}

TEST(Targets, PassOverASilentOneWhileAnotherAnswers) {
  Targets targets("a:1,b:2");
  targets.move_on("a:1", "", at(1'000), milliseconds(1'500));
  for (const auto& [ms, next] : {std::pair(1'100, "b:2"), {2'499, "b:2"}, {2'500, "a:1"}}) {
    targets.move_on("b:2", "a:1", at(ms), milliseconds(0));
    EXPECT_EQ(targets.ask(), next) << ms;
  }
}

v1::Leadership leadership(std::uint64_t term, const std::string& leader) {
  v1::Leadership made;
  made.set_term(term);
  made.set_leader(leader);
  return made;
}

TEST(Fence, ObeysOneTargetWithoutATerm) {
  Fence one(false);
  EXPECT_TRUE(one.obeys(leadership(3, "a/1")));
  EXPECT_TRUE(one.obeys({}));
  EXPECT_FALSE(one.obeys(leadership(2, "a/1")));
  EXPECT_FALSE(one.obeys(leadership(3, "b/1")));
  EXPECT_EQ(one.latest(), 3u);
  Fence several(true);
  EXPECT_TRUE(several.obeys({}));
  EXPECT_TRUE(several.obeys(leadership(3, "a/1")));
  EXPECT_FALSE(several.obeys({}));
}

TEST(Fence, IsOneForEachSetOfTargets) {
  const auto first = Fence::of({"a", "b"});
  EXPECT_EQ(first, Fence::of({"b", "a"}));
  EXPECT_NE(first, Fence::of({"a"}));
}

}  // namespace
}  // namespace schedsvc
