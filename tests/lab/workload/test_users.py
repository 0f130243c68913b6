"""Power law and Zipf fits against known sums, known samples and slow twins; the document."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.workload import Record, zipf
from schedsvc_lab.workload import powerlaw as law
from schedsvc_lab.workload.users import TooFewUsersError, count, markdown, study

SHARED = Path(__file__).parents[3].parent / "shared/data/traces"


def test_the_hurwitz_zeta_function() -> None:
    assert law.hurwitz(2.0, 1) == pytest.approx(math.pi**2 / 6, rel=1e-10)
    assert law.hurwitz(4.0, 1) == pytest.approx(math.pi**4 / 90, rel=1e-10)
    assert law.hurwitz(1.5, 1) == pytest.approx(2.612375348685488, rel=1e-10)
    # Its definition: the sums from two starts differ by the terms between.
    between = sum(k**-1.7 for k in range(3, 60))
    assert law.hurwitz(1.7, 3) - law.hurwitz(1.7, 60) == pytest.approx(between, rel=1e-10)


@pytest.mark.parametrize("alpha", [1.3, 1.8, 2.5, 3.5])
@pytest.mark.parametrize("least", [1, 7])
def test_exponents_of_drawn_counts_are_recovered(alpha: float, least: int) -> None:
    drawn = law.draw(alpha, least, 100_000, np.random.default_rng(11))
    assert drawn.min() == least
    fitted = law.fit_alpha(drawn, least)
    assert fitted == pytest.approx(alpha, abs=0.05)
    low, high = law.interval(drawn, least, fitted)
    assert low < alpha < high or abs(fitted - alpha) < 0.02
    assert 0 < high - low < 0.2


def test_the_estimate_has_the_greatest_likelihood() -> None:
    counts = law.draw(2.1, 2, 500, np.random.default_rng(3))
    logs = float(np.log(counts).sum())

    def likelihood(alpha: float) -> float:
        return -len(counts) * math.log(law.hurwitz(alpha, 2)) - alpha * logs

    best = max(np.arange(1.05, 5.0, 0.001), key=likelihood)
    fitted = law.fit_alpha(counts, 2)
    assert fitted == pytest.approx(best, abs=0.001)
    low, high = law.interval(counts, 2, fitted)
    for edge in (low, high):
        assert likelihood(fitted) - likelihood(edge) == pytest.approx(3.8414588 / 2, abs=1e-4)


def test_the_interval_covers_as_often_as_it_says() -> None:
    streams = np.random.default_rng(5).spawn(200)
    hits = 0
    for stream in streams:
        counts = law.draw(2.2, 1, 300, stream)
        low, high = law.interval(counts, 1, law.fit_alpha(counts, 1))
        hits += low <= 2.2 <= high
    # 95 % of 200, three standard deviations either way.
    assert 180 <= hits <= 199


def test_the_distance_is_the_greatest_at_any_count() -> None:
    counts = np.sort(law.draw(1.9, 3, 80, np.random.default_rng(8)))
    total = sum(k**-1.9 for k in range(3, 2_000_000))
    summed, worst = 0.0, 0.0
    for value in range(3, int(counts.max()) + 1):
        summed += value**-1.9 / total
        worst = max(worst, abs((counts <= value).mean() - summed))
    assert law.distance(counts, 3, 1.9) == pytest.approx(worst, abs=1e-3)


def test_the_least_count_is_found() -> None:
    stream = np.random.default_rng(2)
    body = stream.integers(1, 20, 600)
    tail = law.draw(2.4, 20, 800, stream)
    least, alpha, _ = law.best_least(np.concatenate((body, tail)))
    assert 15 <= least <= 40
    assert alpha == pytest.approx(2.4, abs=0.2)


def test_a_power_law_is_plausible_and_a_poisson_is_not() -> None:
    stream = np.random.default_rng(4)
    assert law.fit_counts(law.draw(2.2, 3, 500, stream), 30, stream).p_value >= 0.1
    assert law.fit_counts(stream.poisson(20, 500) + 1, 30, stream).p_value < 0.05


def test_zipf_by_rank_is_recovered_and_tested() -> None:
    stream = np.random.default_rng(6)
    drawn = stream.multinomial(100_000, zipf.shares(50, 1.1))
    fitted = law.fit_ranks(drawn, 100, stream)
    assert fitted.exponent == pytest.approx(1.1, abs=0.05)
    assert fitted.low < 1.1 < fitted.high
    # A tenth of samples of the law itself has a p-value below 0.1: 4 of 10 would be a rare event.
    p_values = [
        law.fit_ranks(stream.multinomial(5_000, zipf.shares(20, 1.1)), 30, stream).p_value
        for _ in range(10)
    ]
    assert sum(p_value < 0.1 for p_value in p_values) < 4
    alike = stream.multinomial(100_000, np.array([0.4] + [0.012] * 50))
    assert law.fit_ranks(alike, 100, stream).p_value < 0.05


def test_counting() -> None:
    records = [
        Record(arrival_s=2.0, tenant="a"),
        Record(arrival_s=5.0, tenant="b"),
        Record(tenant="a", model="m"),
        Record(arrival_s=9.0),
    ]
    assert count(records, "tenant") == (Counter(a=2, b=1), 1, 7.0)
    assert count(records, "model") == (Counter(m=1), 3, 7.0)
    assert count([], "tenant") == (Counter(), 0, 0.0)


def found(counts: dict[str, int]):
    return study(counts, 3, 60.0, by="tenant", rounds=20, seed=1)


def test_concentration_by_hand() -> None:
    users = found({f"u{number}": 1 for number in range(10)} | {"u0": 11})
    assert users.requests == 20
    assert users.top[10] == pytest.approx(55.0)
    # Ten users, nine with 1 and one with 11: 1 - 2 * area under the Lorenz curve.
    assert users.gini == pytest.approx(0.45)
    assert found({f"u{number}": 4 for number in range(10)}).gini == pytest.approx(0)


def test_the_same_seed_says_the_same() -> None:
    counts = {f"u{number}": number**2 + 1 for number in range(30)}
    assert found(counts).summary() == found(counts).summary()


def test_few_users_are_refused() -> None:
    with pytest.raises(TooFewUsersError, match="9 different values of tenant"):
        found({f"u{number}": 3 for number in range(9)})
    with pytest.raises(TooFewUsersError, match="schedsvc workload label"):
        found({})


def test_the_words_follow_the_figures() -> None:
    alike = markdown(found({f"u{number}": 50 for number in range(40)}), "x", "x.png")
    assert "They ask rather alike" in alike
    drawn = law.draw(1.9, 1, 400, np.random.default_rng(1))
    unequal = markdown(found({f"u{at}": int(n) for at, n in enumerate(drawn)}), "x", "x.png")
    assert "They ask very unequally" in unequal
    assert "which is plausible" in unequal
    normal = np.random.default_rng(1).poisson(30, 400) + 1
    ruled = markdown(
        study(
            {f"u{at}": int(n) for at, n in enumerate(normal)}, 0, 1.0, by="model", rounds=40, seed=0
        ),
        "x",
        "x.png",
    )
    assert "which is ruled out" in ruled
    assert "A further" not in ruled
    assert "A further 3 requests name no user" in alike


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["workload", "users", *arguments])
    return result.exit_code, result.output


def test_the_document_of_the_arena(tmp_path: Path) -> None:
    trace = SHARED / "lmsys_arena_vtc.csv"
    if not trace.exists():
        pytest.skip("the LMSYS arena trace is not here; ../shared/data/traces holds it")
    status, output = run("--trace", str(trace), "--out", str(tmp_path), "--rounds", "20")
    assert status == 0, output
    told = json.loads((tmp_path / "users.json").read_text())
    assert (told["users"], told["requests"]) == (27, 1_500)
    assert told["zipf"]["low"] < told["zipf"]["exponent"] < told["zipf"]["high"]
    document = (tmp_path / "users.md").read_text()
    paragraphs = [part for part in document.split("\n\n") if part[0].isalpha()]
    assert len(paragraphs) == 2
    assert "## References" in document
    assert "(users.png)" in document
    assert (tmp_path / "users.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_input(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,x\n")
    status, output = run("--trace", str(trace))
    assert status == 1
    assert "trace.csv:2:GeneratedTokens: not a whole number: 'x'" in output
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n")
    status, output = run("--trace", str(trace))
    assert status == 1
    assert "at least 10 are needed" in output
    assert run("--trace", str(tmp_path / "none"))[0] != 0
    assert "--by" in run("--trace", str(trace), "--by", "mood")[1]
