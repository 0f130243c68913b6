import asyncio

import pytest

from schedsvc_lab.emulator.output import Output
from schedsvc_lab.emulator.realtime import LAG_MAX_NS, PromptPlan, RealTimeEngine
from schedsvc_lab.engine import Engine, EngineRequestError, load_profile


class Clock:
    """Nanoseconds that pass only in sleeps, and each sleep is late."""

    def __init__(self, late_ns=0):
        self.now_ns = 1_000
        self.late_ns = late_ns
        self.slept = 0

    def __call__(self):
        return self.now_ns

    async def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9) + (self.late_ns if seconds else 0)
        self.slept += 1
        await asyncio.sleep(0)


def plans(*lengths, prompt_tokens=8):
    return [
        PromptPlan(prompt_tokens, [Output(0, 1, length, "length", None, None) for length in group])
        for group in lengths
    ]


@pytest.fixture
def make():
    def make(late_ns=0, speed=1.0, profile="tiny-cpu", **options):
        clock = Clock(late_ns)
        profile = load_profile(profile)
        config = profile.config(**options)
        ends = []
        driver = RealTimeEngine(
            Engine(config, profile.step_cost(config.sequences_max)),
            speed,
            on_first_token=lambda generation: None,
            on_end=ends.append,
            clock=clock,
            sleep=clock.sleep,
        )
        return driver, clock, ends

    return make


async def finish(driver, generation):
    task = asyncio.create_task(driver.run())
    async with asyncio.timeout(60):
        await generation.wait_finished()
    task.cancel()


async def test_late_timers_do_not_add_up(make):
    driver, clock, ends = make(late_ns=900_000)
    generation = driver.submit(plans([200]), 0)
    began_ns = clock.now_ns
    await finish(driver, generation)
    cost = driver.engine.cost
    exact_ns = cost.duration_ns(8, 0, 0) + 199 * cost.duration_ns(0, 1, 0)
    # One timer's delay and granularity at the end, whatever the number of steps.
    assert 0 <= clock.now_ns - began_ns - exact_ns <= 2_000_000
    assert ends == [generation]
    assert driver.lost_ns == 0


async def test_a_long_pause_is_lost_and_not_caught_up(make):
    driver, _, _ = make(late_ns=LAG_MAX_NS * 2)
    generation = driver.submit(plans([20]), 0)
    await finish(driver, generation)
    assert driver.lost_ns > 15 * LAG_MAX_NS


async def test_speed_divides_durations(make):
    driver, clock, _ = make(speed=2.0)
    generation = driver.submit(plans([101]), 0)
    began_ns = clock.now_ns
    await finish(driver, generation)
    assert clock.now_ns - began_ns == pytest.approx(101 * 2_740_000 / 2, rel=0.02)


async def test_deltas_are_merged_for_a_slow_reader(make):
    driver, _, _ = make()
    generation = driver.submit(plans([5, 3], [4]), 0)
    await finish(driver, generation)
    assert [tuple(d) for d in generation.take()] == [
        (0, 0, 5, True),
        (1, 0, 3, True),
        (2, 0, 4, True),
    ]
    assert generation.take() == []
    assert (generation.prompt_tokens, generation.completion_tokens) == (16, 12)
    assert driver.live == 0


async def test_choices_that_end_in_one_step_end_the_generation_once(make):
    driver, _, ends = make()
    generation = driver.submit(plans([5, 5], [5]), 0)
    assert driver.live == 1
    await finish(driver, generation)
    assert ends == [generation]


async def test_abort_and_close_cut_off_and_free(make):
    driver, _, ends = make()
    first, second = driver.submit(plans([5]), 0), driver.submit(plans([5, 5]), 0)
    driver.engine.step()
    driver.abort(first)
    driver.abort(first)
    assert first.cut_off
    driver.close()
    assert second.cut_off
    assert ends == [first, second]
    gauges = driver.engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0)
    assert driver.submit(plans([5]), 0).cut_off


async def test_a_request_of_which_one_prompt_is_too_long_leaves_nothing_behind(make):
    driver, _, _ = make()
    with pytest.raises(EngineRequestError):
        driver.submit([*plans([5]), *plans([5], prompt_tokens=99_999)], 0)
    assert driver.live == 0
    assert driver.engine.gauges().waiting == 0


@pytest.mark.parametrize("speed", [1.0, 4.0])
async def test_the_delay_factor_counts_in_the_engines_time(make, speed):
    """Half a second in the engine is an eighth of one outside of it at four times the speed."""

    async def first_token_ns(**options):
        driver, clock, _ = make(speed=speed, **options)
        task = asyncio.create_task(driver.run())
        busy = driver.submit(plans([2_000]), 0)
        async with asyncio.timeout(60):
            await busy.wait()
            arrived_ns = clock.now_ns
            held = driver.submit(plans([2]), 0)
            await held.wait_finished()
        task.cancel()
        return held.first_token_ns - arrived_ns

    prompt_ns = load_profile("tiny-cpu").step_cost(64).duration_ns(8, 0, 0)
    factor = 500_000_000 * 1_000_000 // prompt_ns
    at_once = await first_token_ns()
    delayed = await first_token_ns(delay_factor_ppm=factor)
    assert delayed - at_once == pytest.approx(500_000_000 / speed, rel=0.05)
