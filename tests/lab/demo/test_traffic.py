import io
import math
import statistics

from schedsvc_lab.demo.traffic import (
    DURATION_S,
    HOG_START_S,
    SEED,
    TENANTS,
    TRACE_FILE,
    bundled,
    generate,
    only,
    write,
)


def test_the_bundled_trace_is_what_its_seed_gives() -> None:
    text = io.StringIO()
    write(generate(SEED), text)
    assert TRACE_FILE.read_text() == text.getvalue(), (
        "generate it: python -c 'from schedsvc_lab.demo import traffic; "
        'traffic.write(traffic.generate(traffic.SEED), traffic.TRACE_FILE.open("w"))\''
    )
    assert bundled() == generate(SEED)


def test_seeds_make_different_workloads() -> None:
    assert generate(3) == generate(3) != generate(4)


def test_tenants_send_as_described() -> None:
    requests = generate(7, duration_s=2_000.0)
    assert {request.tenant for request in requests} == {tenant.name for tenant in TENANTS}
    for tenant in TENANTS:
        own = only(requests, tenant.name)
        assert min(request.arrival_s for request in own) > tenant.start_s
        rate = len(own) / (2_000.0 - tenant.start_s)
        assert math.isclose(rate, tenant.rate_per_s, rel_tol=0.06)
        prompt = statistics.median(request.prompt_tokens for request in own)
        output = statistics.median(request.output_tokens for request in own)
        assert math.isclose(prompt, tenant.prompt_median, rel_tol=0.08)
        assert math.isclose(output, tenant.output_median, rel_tol=0.08)
        longest = sum(request.output_tokens == tenant.output_tokens_max for request in own)
        assert longest / len(own) < 0.02


def test_only_the_hog_comes_late() -> None:
    early = {request.tenant for request in bundled() if request.arrival_s < HOG_START_S}
    assert early == {"quiet", "steady"}
    assert bundled()[-1].arrival_s < DURATION_S
