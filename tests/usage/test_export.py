"""Tests `schedsvc usage export`: rows by dimensions, FOCUS charges, Parquet, JSON."""

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc.records.usage.export import FOCUS_COLUMNS
from schedsvc.records.usage.ledger import Ledger, UsageKey, UsedLease

NOON = 1_793_448_000  # 2026-10-31 12:00 UTC
CONFIG = """
listeners: [{tcp: "127.0.0.1:0"}]
usage:
  path: usage.db
  currency: EUR
  prices:
    - {model: llama, class: batch, input: 0.1, output: 0.2}
    - {model: llama, input: 0.5, cached: 0.05, output: 1.5}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file whose ledger has three leases of two tenants, models and days."""
    file = tmp_path / "schedsvc.yaml"
    file.write_text(CONFIG)
    llama = UsageKey("org", "a", "llama", "gpu-1", "", "default")
    other = UsageKey("", "b", "other", "gpu-2", "sql", "default")
    ledger = Ledger(tmp_path / "usage.db", 400)
    ledger.add(
        [
            UsedLease(1, NOON, llama, False, 1_000, 400, 300),
            UsedLease(2, NOON + 86_400, llama, False, 1, 0, 1),
            UsedLease(3, NOON, other, True, 7, 0, 3),
        ]
    )
    ledger.close()
    return file


def export(config: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["usage", "export", "--config", str(config), *options])


def rows(result: Result) -> list[dict[str, str]]:
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout, newline="")))


def test_export_sums_by_tenant_model_and_class(config: Path) -> None:
    found = export(config)
    assert found.stdout.splitlines() == [
        "tenant,model,class,requests,input_tokens,cached_input_tokens,output_tokens",
        "a,llama,default,2,1001,400,301",
        "b,other,default,1,7,0,3",
    ]


def test_export_by_day_and_since(config: Path) -> None:
    found = rows(export(config, "--by", "day,tenant", "--since", "2026-11-01"))
    assert [(row["day"], row["tenant"], row["requests"]) for row in found] == [
        ("2026-11-01", "a", "1")
    ]


def test_export_until_leaves_out_that_time(config: Path) -> None:
    found = rows(export(config, "--by", "hour", "--until", "2026-10-31T12:15"))
    assert [(row["hour"], row["requests"]) for row in found] == [("2026-10-31T12:00:00Z", "2")]


def test_export_as_json_marks_estimates(config: Path) -> None:
    found = json.loads(export(config, "--by", "estimated", "--json").stdout)
    assert [(row["estimated"], row["output_tokens"]) for row in found] == [(False, 301), (True, 3)]


def test_export_as_parquet(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "usage.parquet"
    assert export(config, "--by", "tenant", "--format", "parquet", "--out", str(out)).exit_code == 0
    table = pyarrow.parquet.read_table(out).to_pydict()
    assert (table["tenant"], table["output_tokens"]) == (["a", "b"], [301, 3])


def test_export_in_focus_has_exact_costs(config: Path) -> None:
    result = export(config, "--format", "focus")
    found = rows(result)
    assert tuple(found[0]) == FOCUS_COLUMNS
    first_day = [row for row in found if row["ChargePeriodStart"] == "2026-10-31T00:00:00Z"]
    costs = [(r["SkuMeter"], r["PricingQuantity"], r["BilledCost"]) for r in first_day]
    assert costs == [
        ("input", "7", ""),
        ("output", "3", ""),
        ("input", "600", "0.0003"),
        ("cached input", "400", "0.00002"),
        ("output", "300", "0.00045"),
    ]
    assert "no price of usage.prices fits 2 charges" in result.stderr
    assert {row["BillingCurrency"] for row in found} == {"EUR"}
    assert first_day[0]["BillingPeriodEnd"] == "2026-11-01T00:00:00Z"
    assert json.loads(first_day[0]["Tags"])["estimated"] is True


def test_focus_has_each_mandatory_column_of_the_standard() -> None:
    mandatory = {
        "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency",
        "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass",
        "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
        "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
        "ProviderName", "PublisherName", "ServiceCategory", "ServiceName",
    }  # fmt: skip
    assert mandatory <= set(FOCUS_COLUMNS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "tenant,color"], "'color' is none of hour, day"),
        (["--since", "yesterday"], "'yesterday' is no time; write 2026-11-30"),
        (["--since", "2026-10-31T12:01"], "since has to be a whole quarter of an hour"),
        (["--format", "parquet"], "--format parquet needs --out FILE"),
        (["--format", "focus", "--by", "tenant"], "a FOCUS export is by hour or day"),
    ],
)
def test_a_wrong_option_is_named(config: Path, options: list[str], message: str) -> None:
    result = export(config, *options)
    assert result.exit_code != 0
    assert message in result.output


def test_without_a_ledger_export_says_what_to_add(tmp_path: Path) -> None:
    file = tmp_path / "schedsvc.yaml"
    file.write_text('listeners: [{tcp: "127.0.0.1:0"}]\n')
    assert "has no usage.path, so no ledger is kept" in export(file).output


FORMULAS = ["=1+1", "+1", "-1", "@SUM(1)", "\tx", "\rx"]


@pytest.fixture
def chosen(config: Path) -> Path:
    """Callers' names that a spreadsheet takes for formulas, and an operator's own ones."""
    more = 'tenants: [{name: "=own"}]\nadapters: [{name: "+own", tokens: 1}]\n'
    config.write_text(config.read_text() + more)
    ledger = Ledger(config.with_name("usage.db"), 400)
    for i, name in enumerate([*FORMULAS, "=own", "x=1", "'=1"]):
        key = UsageKey("", name, "-m", "-m", "+own" if name == "=own" else name, "default")
        ledger.add([UsedLease(100 + i, NOON, key, False, 5, 0, 5)])
    ledger.close()
    return config


def test_names_of_callers_are_no_formulas_in_csv(chosen: Path) -> None:
    found = rows(export(chosen, "--by", "tenant,adapter,model"))
    names = {(row["tenant"], row["adapter"]) for row in found if row["model"] == "-m"}
    quoted = {(f"'{name}", f"'{name}") for name in FORMULAS}
    assert names == quoted | {("=own", "+own"), ("x=1", "x=1"), ("'=1", "'=1")}


def test_names_of_callers_are_no_formulas_in_focus(chosen: Path) -> None:
    found = rows(export(chosen, "--format", "focus"))
    for column in ("SubAccountId", "SubAccountName"):
        names = {row[column] for row in found}
        assert names == {f"'{name}" for name in FORMULAS} | {"=own", "x=1", "'=1", "a", "b"}
    assert {json.loads(row["Tags"])["adapter"] for row in found} >= set(FORMULAS)


def test_numbers_below_zero_are_no_formulas(chosen: Path) -> None:
    ledger = Ledger(chosen.with_name("usage.db"), 400)
    key = UsageKey("", "=1+1", "llama", "gpu-1", "", "default")
    ledger.add([UsedLease(200, NOON, key, False, 5, 0, -9)])
    ledger.close()
    found = rows(export(chosen, "--by", "tenant"))
    assert [row["output_tokens"] for row in found if row["tenant"] == "'=1+1"] == ["-4"]


def test_raw_export_leaves_names_as_they_are(chosen: Path, tmp_path: Path) -> None:
    for options in (["--raw"], ["--json"]):
        result = export(chosen, "--by", "tenant", *options)
        found = json.loads(result.stdout) if options == ["--json"] else rows(result)
        assert {row["tenant"] for row in found} == {*FORMULAS, "=own", "x=1", "'=1", "a", "b"}
    out = tmp_path / "u.parquet"
    assert export(chosen, "--format", "parquet", "--out", str(out)).exit_code == 0
    assert set(FORMULAS) <= set(pyarrow.parquet.read_table(out)["tenant"].to_pylist())


@pytest.mark.parametrize("other", [["--json"], ["--format", "parquet", "--out", "u"]])
def test_raw_export_of_another_format_is_refused(config: Path, other: list[str]) -> None:
    result = export(config, "--raw", *other)
    assert (result.exit_code, "--raw has an effect on CSV alone" in result.output) == (2, True)
