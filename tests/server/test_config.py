"""Tests the configuration file: what it means, and how errors are named."""

import hashlib
import sys
from pathlib import Path

import pytest

from schedsvc._core import Scheduler
from schedsvc.config import ConfigError, Reading, load, path_text, problem_text, read
from schedsvc.driver import new_core
from tests import forked

from .certificates import Authority

SAMPLE = Path(__file__).parents[2] / "schedsvc" / "data" / "schedsvc.yaml"
MINIMAL = "listeners: [{tcp: '127.0.0.1:0'}]\n"


def reading(tmp_path: Path, text: str, **environ: str) -> Reading:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return read(file, environ)


def found(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """Return each problem as `line:column path: message`."""
    return [
        f"{problem.place.line}:{problem.place.column} {path_text(problem.path)}: {problem.message}"
        for problem in reading(tmp_path, text, **environ).problems
    ]


def test_the_sample_is_valid_and_shows_the_defaults(tmp_path: Path) -> None:
    sample = load(SAMPLE)
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    minimal = load(tmp_path / "minimal.yaml")
    assert sample.scheduler == minimal.scheduler
    assert sample.limits == minimal.limits
    assert sample.auth == minimal.auth
    assert sample.log == minimal.log
    assert sample.unknown_tenants == minimal.unknown_tenants
    assert sample.unknown_weight_milli == minimal.unknown_weight_milli
    assert {tenant.name: tenant.weight_milli for tenant in sample.tenants} == {
        "research": 1_000,
        "production": 4_000,
    }


def test_every_key_of_the_models_stands_in_the_sample() -> None:
    text = SAMPLE.read_text()
    config = load(SAMPLE)
    for section in (config, config.log):
        for name, field in type(section).model_fields.items():
            assert f"{field.alias or name}:" in text


def test_numbers_become_integers_of_the_core(tmp_path: Path) -> None:
    text = MINIMAL + (
        "scheduler: {prices: {input: 0.5, output: 1.25, cached: 0.05, kv: 0.00125},"
        " headroom: 0.123456,"
        " expert: {quantile: 0.95}, lease_ttl_ms: 1500}\n"
        "tenants: [{name: x, weight: 0.125}]\n"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    options = config.core_options()
    assert options["input_price_micro"] == 500_000
    assert options["output_price_micro"] == 1_250_000
    assert options["cached_price_ppm"] == 50_000
    assert options["kv_price_micro"] == 1_250
    assert options["headroom_ppm"] == 123_456
    assert options["quantile_ppm"] == 950_000
    assert options["lease_ttl_ns"] == 1_500_000_000
    assert config.tenants[0].weight_milli == 125


def test_the_largest_values_suit_the_core(tmp_path: Path) -> None:
    text = MINIMAL + (
        "scheduler: {queue_ttl_ms: 3600000, lease_ttl_ms: 3600000, lease_grace_ms: 3600000,"
        " flow_queue_max: 1000000, queue_max: 1000000, leases_max: 1000000,"
        " flow_queue_tokens_max: 1000000000000, queue_tokens_max: 1000000000000,"
        " expert: {queue_target_ms: 3600000, overload_hold_ms: 3600000, answers_max: 10000000,"
        " answer_ttl_ms: 86400000, samples_min: 1000, quantile: 0.999},"
        " saturation: 1, headroom: 0.9, prices: {input: 10, output: 10, cached: 1, kv: 0.01}}\n"
        "limits: {sessions_max: 1000000, session_open_max: 1000000}\n"
        "tenants: [{name: x, weight: 1000000}, {name: y, weight: 0.001}]\n"
        f"pools: [{{name: p, capacity_tokens: {1 << 27}, epoch: {1 << 62}, max_running: 1000000}}]"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    new_core(config, 0).check()


def test_1024_pools_are_accepted_and_the_next_is_named(tmp_path: Path) -> None:
    pool = "  - {{name: p{}, capacity_tokens: 100, epoch: 1}}\n"
    text = MINIMAL + "pools:\n" + "".join(pool.format(k) for k in range(1_024))
    config = reading(tmp_path, text).config
    assert config is not None
    assert len(new_core(config, 0).stats(0)["pools"]) == 1_024
    (problem,) = found(tmp_path, text + pool.format(1_024))
    assert "pools" in problem
    assert "1024" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["1:1 : the key 'listeners' is missing; add it"]),
        ("listeners: []", ["1:12 listeners: must not be empty"]),
        ("[]", ["1:1 : has to be a mapping of keys to values, not a list"]),
        (
            MINIMAL + "schedular: {}",
            ["2:1 schedular: unknown key 'schedular'; did you mean 'scheduler'?"],
        ),
        (
            MINIMAL + "tenants:\n  - name: a\n    wieght: 2",
            ["4:5 tenants[0].wieght: unknown key 'wieght'; did you mean 'weight'?"],
        ),
        (
            MINIMAL + "log: {zzz: 1}",
            ["2:7 log.zzz: unknown key 'zzz'; known here: format, level"],
        ),
        (
            MINIMAL + "log: {}\nlog: {}",
            ["3:1 log: this key stands twice, first on line 2; remove one of them"],
        ),
        (
            MINIMAL + "scheduler: {queue_ttl_ms: '5'}",
            ["2:27 scheduler.queue_ttl_ms: has to be a whole number, not text"],
        ),
        (
            MINIMAL + "scheduler: {queue_ttl_ms: 0}",
            ["2:27 scheduler.queue_ttl_ms: is 0; it has to be at least 1"],
        ),
        (
            MINIMAL + "scheduler: {policy: lottery}",
            ["2:21 scheduler.policy: has to be 'vtc', 'dlpm' or 'fcfs'"],
        ),
        (
            MINIMAL + "tenants: [{name: x, weight: 0.0005}, {name: y, weight: 1.0005}]",
            [
                "2:29 tenants[0].weight: is 0.0005; it has to lie between 0.001 and 1000000",
                "2:56 tenants[1].weight: is 1.0005; it may have at most 3 decimals",
            ],
        ),
        (
            MINIMAL + "tenants: [{name: x, weight: .nan}, {name: y, weight: true}]",
            [
                "2:29 tenants[0].weight: is nan; it has to lie between 0.001 and 1000000",
                "2:54 tenants[1].weight: has to be a number, not true or false",
            ],
        ),
        (
            MINIMAL + "tenants: [{name: x}, {name: x}, {name: other}]",
            [
                "2:29 tenants[1].name: this tenant stands twice, first at tenants[0].name;"
                " remove one",
                "2:40 tenants[2].name: 'other' is reserved; choose another name",
            ],
        ),
        (
            "listeners: [{}, {tcp: 'a:1', unix: b}, {tcp: nowhere}]",
            [
                "1:13 listeners[0]: has to have one of tcp or unix",
                "1:36 listeners[1].unix: stands beside tcp; keep one of tcp or unix",
                "1:46 listeners[2].tcp: has to be HOST:PORT, such as 127.0.0.1:7600",
            ],
        ),
        (
            "listeners: [{tcp: 'a:1', auth: token}, {tcp: 'a:1', auth: certificate}]",
            [
                "1:32 listeners[0].auth: asks for tokens, and no entry of auth.principals has one",
                "1:46 listeners[1].tcp: this address stands twice, first at listeners[0].tcp;"
                " remove one",
                "1:59 listeners[1].auth: asks for client certificates; give tls.client_ca",
            ],
        ),
        (
            MINIMAL + "auth: {principals: [{name: x, env: NOT_SET}, {name: y}]}",
            [
                "2:36 auth.principals[0].env: this environment variable is not set;"
                " export the token in it",
                "2:46 auth.principals[1]: has no proof of who calls; give one of sha256, env,"
                " token_file, certificate, listener",
            ],
        ),
        (
            MINIMAL + "pools: [{name: p, capacity_tokens: 8}]",
            ["2:36 pools[0].capacity_tokens: is smaller than one block (16 tokens)"],
        ),
        (
            MINIMAL + "tenants: &t [{name: x}]\npools: *t",
            [
                "3:1 pools: an alias of tenants; write it out",
                "3:1 pools: is empty; give a list, or remove the key",
            ],
        ),
        ("listeners: [\n", ["2:1 : not valid YAML: while parsing a flow node, did not find"]),
        ("a: b: c", ["1:5 : not valid YAML: mapping values are not allowed in this context"]),
        ("a: \x01", ["1:4 : not valid YAML: "]),
    ],
)
def test_a_wrong_file_is_named_by_place(text: str, expected: list[str], tmp_path: Path) -> None:
    problems = found(tmp_path, text)
    assert len(problems) == len(expected), problems
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("policy", ["vtc-predict", "vtc-oracle", "lcf", "sif"])
def test_a_policy_of_the_simulator_configures_no_service(policy: str, tmp_path: Path) -> None:
    """The core has it, and the error names its reader."""
    assert Scheduler(policy=policy).stats(0)["policy"] == policy
    assert found(tmp_path, MINIMAL + f"scheduler: {{policy: {policy}}}") == [
        "2:21 scheduler.policy: has to be 'vtc', 'dlpm' or 'fcfs'; other policies are the"
        " simulator's: schedsvc sim --policy"
    ]


@pytest.mark.parametrize("policy", ["external", "my_policies:Decayed"])
def test_an_order_from_outside_configures_no_service(policy: str, tmp_path: Path) -> None:
    assert found(tmp_path, MINIMAL + f"scheduler: {{policy: '{policy}'}}") == [
        "2:21 scheduler.policy: has to be 'vtc', 'dlpm' or 'fcfs'; other policies are the"
        " simulator's: schedsvc sim --policy"
    ]


def test_all_errors_are_named_at_once(tmp_path: Path) -> None:
    text = (
        "listeners:\n  - {tcp: '127.0.0.1:70000', mode: '999'}\n"
        "scheduler: {policy: x, flow_queue_max: 20000}\n"
        "tenants: [{name: a, api_keys_sha256: [zz]}, {name: a}]\n"
        "unknown: 1\n"
    )
    paths = [problem.path for problem in reading(tmp_path, text).problems]
    assert paths == [
        ("listeners", 0, "tcp"),
        ("listeners", 0, "mode"),
        ("listeners", 0, "mode"),
        ("scheduler", "policy"),
        ("scheduler", "flow_queue_max"),
        ("tenants", 0, "api_keys_sha256", 0),
        ("tenants", 1, "name"),
        ("unknown",),
    ]


SECRET = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"auth: {{principals: [{{name: x, sha256: {SECRET}}}]}}",
        f"auth: {{principals: [{{name: x, env: '{SECRET} '}}]}}",
        f"auth: {{principals: [{{name: x, env: {SECRET.replace('-', '_')}}}]}}",
        f"auth: {{principals: [{{name: x, token_file: {SECRET}}}]}}",
        f"tenants: [{{name: x, api_keys_sha256: [{SECRET}]}}]",
        f"tenants: [{{name: x, api_keys_sha256: {SECRET}}}]",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(text: str, tmp_path: Path) -> None:
    problems = found(tmp_path, MINIMAL + text)
    assert problems
    assert "hunter2" not in " ".join(problems)


@pytest.mark.parametrize(
    "token", ["short", "two\nlines-of-a-token", "x" * 5_000, "tökens-tökens-tökens"]
)
def test_a_poor_token_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token)
    text = MINIMAL + "auth: {principals: [{name: x, token_file: token}]}"
    [problem] = found(tmp_path, text)
    assert problem.startswith("2:43 auth.principals[0].token_file: this token file")
    assert token not in problem


def test_a_token_stands_once(tmp_path: Path) -> None:
    token = "a-token-of-enough-length"
    digest = hashlib.sha256(token.encode()).hexdigest()
    text = MINIMAL + f"auth: {{principals: [{{name: x, sha256: {digest}}}, {{name: y, env: T}}]}}"
    [problem] = found(tmp_path, text, T=token)
    assert "this token stands twice" in problem


def test_tls_files_have_to_match(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    (tmp_path / "empty.pem").write_text("")

    def problems(cert: str, key: str, ca: str) -> list[str]:
        tls = f"{{cert: {cert}, key: {key}, client_ca: {ca}}}"
        return found(tmp_path, f"listeners: [{{tcp: 'h:1', tls: {tls}}}]")

    assert problems(one.cert_file.name, one.key_file.name, authority.file.name) == []
    [problem] = problems(one.cert_file.name, two.key_file.name, authority.file.name)
    assert "listeners[0].tls.cert: and tls.key are no matching pair" in problem
    [problem] = problems(one.cert_file.name, one.key_file.name, "empty.pem")
    assert "listeners[0].tls.client_ca: holds no certificate" in problem
    [problem] = problems("nowhere.pem", one.key_file.name, authority.file.name)
    assert "listeners[0].tls.cert: cannot read" in problem


def test_allowed_and_doubtful_setting_is_a_warning(tmp_path: Path) -> None:
    text = (
        "listeners: [{tcp: '0.0.0.0:1'}, {tcp: '127.0.0.1:1'}]\nunknown_tenants: refuse\n"
        "metrics: {listen: '[::]:2'}\n"
    )
    result = reading(tmp_path, text)
    assert result.config is not None
    warnings = [problem_text(Path("c"), problem) for problem in result.warnings]
    assert warnings == [
        "c:1:13: listeners[0]: 0.0.0.0:1 has no authentication: anyone who can reach it may call",
        "c:3:19: metrics.listen: [::]:2 shows the tenants and their usage to anyone who can reach"
        " it",
        "c:3:19: metrics.listen: [::]:2 answers requests by an address alone, by default; list"
        " names in metrics.hosts, if Prometheus or a browser uses one",
        "c:2:18: unknown_tenants: refuses every request, because no tenants are listed",
    ]


def test_tls_without_authentication_is_a_warning(tmp_path: Path) -> None:
    tls = "tls: {cert: c.pem, key: k.pem"
    text = (
        f"listeners: [{{tcp: '0.0.0.0:1', {tls}}}}}, {{tcp: '0.0.0.0:2', {tls}, client_ca: a}}}}]"
    )
    warnings = [problem_text(Path("c"), problem) for problem in reading(tmp_path, text).warnings]
    assert [line.split(": ", 2)[2] for line in warnings] == [
        "0.0.0.0:1 has no authentication, beside a listener that has one or a file mode: by default"
        " its callers ask for every tenant and offer no pool, so a pool that registers itself takes"
        " only requests that name it. Ask for tokens, or say in"
        " auth.principals what `listener:` may do",
        "0.0.0.0:1 has no authentication: anyone who can reach it may call",
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, what in [("nowhere", "No such file"), ("binary", "not UTF-8"), (".", "a folder")]:
        with pytest.raises(ConfigError, match=what) as caught:
            load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}:1:1: ")


def test_a_short_file_cannot_become_large(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    assert len(reading(tmp_path, bomb).problems) < 100
    assert found(tmp_path, "&a [*a]")


@pytest.mark.parametrize(
    "text", ["x: " + "[" * 25_000, "x: " + "[" * 25_000 + "]" * 25_000, "- " * 25_000, "{a: " * 40]
)
def test_deep_nesting_is_an_error_and_not_the_end_of_the_process(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    command = [sys.executable, "-m", "schedsvc", "check", str(tmp_path / "deep.yaml")]
    ended = forked.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "nested deeper than 32 levels" in ended.stderr


def test_nesting_within_the_limit_is_read(tmp_path: Path) -> None:
    assert "nested deeper" not in str(reading(tmp_path, "[" * 32 + "]" * 32).problems)
    assert "nested deeper" in str(reading(tmp_path, "[" * 33 + "]" * 33).problems)
