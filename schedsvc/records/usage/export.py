"""Sums the ledger up for people and programs: plain rows, and FOCUS 1.2 charges."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from schedsvc.config.outputs import Price, Usage
from schedsvc.records.usage.ledger import SLOT_S
from schedsvc.records.usage.merged import open_to_read

__all__ = ["DIMENSIONS", "FOCUS_COLUMNS", "SUMS", "Span", "as_text", "focus_rows", "plain_rows"]

#: The dimensions by which rows are grouped, and the column of each in the ledger.
DIMENSIONS = {
    "hour": "strftime('%Y-%m-%dT%H:00:00Z', slot_s, 'unixepoch')",
    "day": "strftime('%Y-%m-%d', slot_s, 'unixepoch')",
    "month": "strftime('%Y-%m', slot_s, 'unixepoch')",
    "groups": "groups",
    "tenant": "tenant",
    "model": "model",
    "pool": "pool",
    "adapter": "adapter",
    "class": "class",
    "estimated": "estimated",
}
SUMS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens")
_SUM_TEXT = "sum(requests), sum(input_tokens), sum(cached_tokens), sum(output_tokens)"
#: Columns with a name that a caller may have chosen, of plain rows and of FOCUS.
_CALLERS_COLUMNS = ("tenant", "adapter", "SubAccountId", "SubAccountName")
#: A spreadsheet takes a cell that begins with one of these for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MILLION = Decimal(1_000_000)
_PROVIDER = "schedsvc"

#: FOCUS 1.2 requires all of these columns but the last 9, which it allows.
FOCUS_COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass",
    "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ProviderName", "PublisherName", "ServiceCategory", "ServiceName",
    "ConsumedQuantity", "ConsumedUnit", "ResourceId", "ResourceName", "SkuMeter",
    "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Covers `since` until before `until`, in seconds of Unix time; None is open."""

    since_s: int | None = None
    until_s: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if an end lies inside one of the ledger's quarters of an hour."""
        for name, value in (("since", self.since_s), ("until", self.until_s)):
            if value is not None and value % SLOT_S:
                raise ValueError(
                    f"{name} has to be a whole quarter of an hour (:00, :15, :30, :45)"
                )

    def where(self) -> tuple[str, list[int]]:
        """Return the condition of a query and its arguments."""
        low = -(1 << 62) if self.since_s is None else self.since_s
        high = 1 << 62 if self.until_s is None else self.until_s
        return "slot_s >= ? AND slot_s < ?", [low, high]


def plain_rows(
    path: Path, by: Sequence[str], span: Span, others: Sequence[Path] = ()
) -> Iterator[dict[str, Any]]:
    """Yield sums of requests and tokens by dimensions, in their order. O(ledger).

    `others`: ledgers of other members of the cluster; a lease that several have counts once.

    `cached_input_tokens` are part of `input_tokens`. Raises UsageError, and KeyError for a
    dimension that is not in DIMENSIONS.
    """
    columns = ", ".join(DIMENSIONS[name] for name in by)
    condition, arguments = span.where()
    # Only names of the table above become text of the query.
    query = " ".join(
        ("SELECT", columns, "," if by else "", _SUM_TEXT, "FROM usage WHERE", condition)
    )
    if by:
        places = ", ".join(str(place + 1) for place in range(len(by)))
        query += f" GROUP BY {places} HAVING sum(requests) > 0 ORDER BY {places}"
    with open_to_read([path, *others]) as connection:
        for row in connection.execute(query, arguments):
            found = dict(zip((*by, *SUMS), row, strict=True))
            for name in SUMS:
                found[name] = found[name] or 0
            if "estimated" in found:
                found["estimated"] = bool(found["estimated"])
            yield found


def as_text(row: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return a row in which no name that a caller chose is a formula to a spreadsheet. O(columns).

    Such a name gets a leading quote. `own`: names that operators chose, which stay as they are.
    """
    return {
        column: f"'{value}"
        if column in _CALLERS_COLUMNS and value.startswith(_FORMULA) and value not in own
        else value
        for column, value in row.items()
    }


def focus_rows(
    path: Path, span: Span, usage: Usage, hourly: bool, others: Sequence[Path] = ()
) -> Iterator[dict[str, str]]:
    """Yield FOCUS 1.2 charges: one for each period, tenant, model, adapter, class and meter.

    Without a price that fits, the columns of costs are empty. Raises UsageError. O(ledger).
    """
    period = "hour" if hourly else "day"
    by = (period, "groups", "tenant", "model", "adapter", "class", "estimated")
    for row in plain_rows(path, by, span, others):
        price = _price(usage, row["model"], row["class"])
        cached = row["cached_input_tokens"]
        uncached = row["input_tokens"] - cached
        meters = (("input", uncached), ("cached input", cached), ("output", row["output_tokens"]))
        for meter, tokens in meters:
            if tokens:
                amount = None if price is None else _amount(price, meter)
                yield _charge(row, period, meter, tokens, amount, usage.currency)


def _price(usage: Usage, model: str, request_class: str) -> Price | None:
    """Return the first price that fits."""
    for price in usage.prices:
        if price.model in (None, model) and price.request_class in (None, request_class):
            return price
    return None


def _amount(price: Price, meter: str) -> Decimal:
    if meter == "output":
        return price.output_tokens
    if meter == "input" or price.cached_tokens is None:
        return price.input_tokens
    return price.cached_tokens


def _charge(
    row: dict[str, Any], period: str, meter: str, tokens: int, amount: Decimal | None, currency: str
) -> dict[str, str]:
    text = row[period].removesuffix("Z")
    begin = datetime.fromisoformat(text).replace(tzinfo=UTC)
    end = begin + (timedelta(hours=1) if period == "hour" else timedelta(days=1))
    month = begin.replace(day=1, hour=0)
    after = (month + timedelta(days=31)).replace(day=1)
    cost = "" if amount is None else format((amount * tokens / _MILLION).normalize(), "f")
    tags = {name: row[name] for name in ("adapter", "class", "estimated", "groups")}
    model, tenant = row["model"], row["tenant"]
    charge = dict.fromkeys(FOCUS_COLUMNS, "")
    charge |= dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)
    charge |= dict.fromkeys(
        ("InvoiceIssuerName", "ProviderName", "PublisherName", "ServiceName"), _PROVIDER
    )
    charge |= dict.fromkeys(("BillingAccountId", "BillingAccountName"), _PROVIDER)
    charge |= dict.fromkeys(("PricingQuantity", "ConsumedQuantity"), str(tokens))
    charge |= dict.fromkeys(("PricingUnit", "ConsumedUnit"), "Tokens")
    charge |= dict.fromkeys(("SubAccountId", "SubAccountName"), tenant)
    charge |= dict.fromkeys(("ResourceId", "ResourceName"), model)
    return charge | {
        "BillingCurrency": currency,
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time(after),
        "ChargePeriodStart": _time(begin),
        "ChargePeriodEnd": _time(end),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{meter} tokens of {model}",
        "ServiceCategory": "AI and Machine Learning",
        "SkuMeter": meter,
        "SubAccountType": "Tenant",
        "Tags": json.dumps(tags, ensure_ascii=False),
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
