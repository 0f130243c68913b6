"""Gives the requests of a trace prompts of the lengths that it holds."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from schedsvc_lab.workload.prompts import (
    PrefixPlan,
    PromptError,
    PromptMaker,
    Stretch,
    block_stretches,
)
from schedsvc_lab.workload.record import Bad, Record, block_count

GROUP_RULES = ("random", "tenant")


@dataclass(frozen=True, kw_only=True)
class PromptRule:
    """Says which prefixes the prompts of a trace share, and how long a request may be.

    With `blocks`, prompts share what their block hashes say, and `plan` is for requests without
    any. Else each request belongs to one of `groups`: drawn for each (`random`) or its tenant's, by
    the order in which tenants come. `context_tokens` cuts requests so that prompt and output
    together fit; it cuts the prompt before the output.
    """

    plan: PrefixPlan = field(default_factory=PrefixPlan)
    groups: int = 1
    group_by: str = "random"
    blocks: bool = True
    context_tokens: int | None = None
    seed: int = 0


class PromptWriter:
    """Gives one record after another its prompt. Memory grows with the number of groups."""

    def __init__(self, maker: PromptMaker, rule: PromptRule) -> None:
        self._maker = maker
        self._rule = rule
        self._random = np.random.default_rng([rule.seed, 1])
        self._ranks: Counter[int] = Counter()
        self._tenants: dict[str | None, int] = {}
        self._count = 0

    def __call__(self, record: Record) -> Record:
        """Return the record with a text, or with token ids where no text is so short.

        O(tokens). Raises Bad if it has a prompt, or has no length.
        """
        if record.text is not None or record.messages or record.token_ids:
            raise Bad("text", "the request has a prompt already")
        if record.input_tokens is None:
            raise Bad("input_tokens", "missing, so no prompt of that length can be made")
        record = self._cut(record)
        assert record.input_tokens is not None
        number = self._count
        self._count += 1
        try:
            prompt = self._maker.make(self._stretches(record, record.input_tokens, number))
        except PromptError as error:
            raise Bad("input_tokens", str(error)) from None
        if prompt.text is None:
            return replace(record, token_ids=prompt.token_ids)
        return replace(record, text=prompt.text)

    def _stretches(self, record: Record, tokens: int, number: int) -> list[Stretch]:
        rule = self._rule
        if rule.blocks and record.blocks and record.block_tokens is not None:
            return block_stretches(tokens, record.blocks, record.block_tokens, number)
        group = self._group(record)
        rank = self._ranks[group]
        self._ranks[group] += 1
        return rule.plan.stretches(tokens, number, group, rank)

    def _group(self, record: Record) -> int:
        if self._rule.group_by == "tenant":
            number = self._tenants.setdefault(record.tenant, len(self._tenants))
            return number % self._rule.groups
        return int(self._random.integers(self._rule.groups))

    def _cut(self, record: Record) -> Record:
        """Make a request fit into the context."""
        context = self._rule.context_tokens
        assert record.input_tokens is not None
        if context is None or record.input_tokens + (record.output_tokens or 1) <= context:
            return record
        output = record.output_tokens and min(record.output_tokens, context - 1)
        tokens = min(record.input_tokens, context - (output or 1))
        blocks = record.blocks
        if blocks and record.block_tokens is not None:
            blocks = blocks[: block_count(tokens, record.block_tokens)]
        return replace(record, input_tokens=tokens, output_tokens=output, blocks=blocks)
