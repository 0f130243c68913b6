"""Draws calls of each function of the store that members could make, right and wrong ones."""

import hashlib
import random
from typing import Any

from schedsvc.cluster.library import (
    budget_key_of,
    escrow_keys_of,
    keys_of,
    notes_key_of,
    probe_key_of,
    settings_keys_of,
    slot_keys_of,
    term_keys_of,
)

Words = tuple[Any, ...]
_MEMBERS = ("a", "b", "c")
_HOLDERS = (b"set:main", b"member:a", b"member:b")
_CAPS = {b"t1": 3, b"t2": 10, b"g": 1}
_PLACES = ("modes", "tenant:a", "tenant:b")
_BUCKETS = {"t1": (10, 0, 0, 0), "t2": (60_000, 90_001, 0, 7), "g": (12, 10**6, 3, 0)}
_STEPS_MS = (0, 1, 40, 250, 999, 1_500, 2_000, 3_001, 70_000, 130_000, 4_000_000, -400, -9_000)
#: Values that another program may leave where the functions have a key.
_ALIEN = (
    ("SET", b""), ("SET", b"\x07"), ("SET", b"\x81\xa2at\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    ("SET", b"\x82\xa2at\x05\xa4asks\x90\xc1"), ("HSET", "field", b"1 2"), ("ZADD", "7", "a"),
)  # fmt: skip


class Calls:
    """Makes a history of calls."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self._numbers = dict.fromkeys(_MEMBERS, 0)
        self._lives = {name: f"{k:016x}" for k, name in enumerate(_MEMBERS, 1)}
        self._drawn: dict[tuple[str, str], list[int]] = {}
        self._held: dict[tuple[str, str], list[int]] = {}
        self._born: dict[str, bytes] = {}
        self._rows = [b""] * 2  # hold and counter from one look
        self._asked: tuple[str, list[str]] = "", []
        self._number = 0
        self._settings: dict[str, bytes] = {}
        self._kinds = {
            self._join: 7, self._leave: 3, self._probe: 3, self._sync: 27, self._terms: 20,
            self._people: 10, self._escrow: 40, self._slots: 30, self._budgets: 6,
            self._forgiven: 10, self._exchange: 10,
        }  # fmt: skip

    def step_ms(self) -> int:
        return self.rnd.choice(_STEPS_MS if self.rnd.random() < 0.2 else (0, 3, 50))

    def next(self) -> Words:
        [kind] = self.rnd.choices([*self._kinds], [*self._kinds.values()])
        name, keys, args = kind()
        if args and self.rnd.random() < 0.01:  # a call of another program
            args = args[: self.rnd.randrange(len(args))]
        return ("FCALL", name, len(keys), *keys, *args)

    def alien(self, keys: Words) -> Words:
        """Return a value of another program at one of these keys."""
        name, *rest = self.rnd.choice(_ALIEN)
        return (name, self.rnd.choice(keys), *rest)

    def _who(self) -> tuple[str, str]:
        name = self.rnd.choice(_MEMBERS)
        if self.rnd.random() < 0.03:
            self._lives[name] = f"{self.rnd.randrange(1 << 60):016x}"
        return name, self._lives[name]

    def _join(self) -> Words:
        name, life = self._who()
        print_ = self.rnd.choice(("f1", "f1", "f1", "f2"))
        return "schedsvc_join", keys_of("prod"), (name, life, print_, 3_000)

    def _leave(self) -> Words:
        return "schedsvc_leave", keys_of("prod"), self._who()

    def _probe(self) -> Words:
        return "schedsvc_probe", [probe_key_of("prod")], ()

    def _next_of(self, name: str) -> int:
        self._numbers[name] += self.rnd.random() < 0.95
        return self._numbers[name]

    def _sync(self) -> Words:
        rnd, (name, life) = self.rnd, self._who()
        rows: list[Any] = []
        for _ in range(rnd.randrange(4)):
            row = f"{rnd.choice((name, name, 'x'))}/{life}/{rnd.randrange(6)}"
            rows += (row, b"%d 0 0 0" % rnd.randrange(10**6))
        again, most = int(rnd.random() < 0.3), rnd.choice((1, 2, 3, 500))
        args = (
            name, life, "f1", 3_000, self._next_of(name), f"{rnd.randrange(1 << 30):x}", again,
            most, f"{name}/{life}/", *rows,
        )  # fmt: skip
        return "schedsvc_sync", keys_of("prod"), args

    def _terms(self) -> Words:
        rnd, keys = self.rnd, term_keys_of("prod", "main")
        mine = [rnd.choice(("1 x a", "2 y b", "3 z c")) for _ in range(2)]
        kind = rnd.randrange(6)
        if kind < 2:
            return "schedsvc_term_look", keys, ("main", rnd.choice(("", *_MEMBERS)), 3_000)
        if kind < 4:
            seen = self._rows if rnd.random() < 0.8 else [b"", b""]
            return "schedsvc_term_take", keys, ("main", *seen, *mine, 2_000, "a")
        if kind < 5:
            return "schedsvc_term_renew", keys, ("main", *mine, 2_000, rnd.choice(("", "2 y b")))
        return "schedsvc_term_release", keys, ("main", mine[0])

    def _people(self) -> Words:
        """Return a question of people, or a note that a member leaves for them."""
        keys, notes = term_keys_of("prod", "main"), notes_key_of("prod", "main")
        member = self.rnd.choice(_MEMBERS)
        return self.rnd.choice((
            ("schedsvc_version", [], ()),
            ("schedsvc_status", keys_of("prod"), ()),
            ("schedsvc_set_note", [notes], (member, f"note {self.rnd.randrange(99)}")),
            ("schedsvc_set_show", [*keys, notes], ("main",)),
            ("schedsvc_sets", [keys[1]], ()),
        ))  # fmt: skip

    def _escrow(self) -> Words:
        rnd, (name, life) = self.rnd, self._who()
        origin = f"{name}/{life}".encode()
        buckets = rnd.sample(sorted(_BUCKETS), rnd.randrange(4))
        words: list[Any] = []
        withdrawn = ["t1"] if rnd.random() < 0.1 else []
        for bucket in buckets:
            place = (name, bucket)
            drawn = self._drawn.setdefault(place, [0] * 4)
            held = self._held.setdefault(place, [0] * 4)
            for k in range(4):
                change = rnd.choice((0, 0, 0, 1, -1, 5, -2_000)) if rnd.random() < 0.3 else 0
                held[k] = max(-50, held[k] + change)
                if rnd.random() < 0.1:  # it returns a part
                    back = rnd.randrange(0, max(1, held[k]))
                    held[k], drawn[k] = held[k] - back, (drawn[k] - back) % (1 << 52)
            rates = [rnd.choice((n, n, n, 2 * n)) for n in _BUCKETS[bucket]]
            words += (*rates, *drawn, *held, *self._knowledge(bucket))
        for bucket in buckets if rnd.random() < 0.7 else ():
            path = [b for b in buckets if b == bucket or rnd.random() < 0.3]
            words += (bucket, len(path))
            for part in path:
                size = max(1, _BUCKETS[part][0] // rnd.choice((1, 2, 3, 10)))
                least = [size if n and rnd.random() < 0.9 else 0 for n in _BUCKETS[part]]
                words += (buckets.index(part) + 1, *least, *(n * rnd.choice((1, 3)) for n in least))
        keys = escrow_keys_of("prod", origin, [b.encode() for b in buckets])
        self._asked = name, buckets
        args = origin, self._next_of(name), len(withdrawn), *withdrawn, *words
        return "schedsvc_escrow", keys, args

    def _knowledge(self, bucket: str) -> list[Any]:
        """Return the words about a bucket that a member knew before it began again."""
        rnd = self.rnd
        born = rnd.choice((b"", self._born.get(bucket, b""), b"x/1:1"))
        amounts = [rnd.randrange(-12, 60) for _ in range(4)]
        spent = [rnd.choice((0, 0, 3, 40)) for _ in range(4)]
        return [*amounts, *spent, born, rnd.choice((0, max(self._numbers.values()), 1 << 40))]

    def _forgiven(self) -> Words:
        """Return a debt, or an operator who forgives it."""
        rnd, keys = self.rnd, escrow_keys_of("prod", b"a/1", [b"tt"])
        if rnd.random() < 0.5:
            return "schedsvc_forgive", keys[2:], ()
        self._number += 1
        rates, held = (10, 0, 0, 500), (rnd.choice((0, -4)), 0, 0, rnd.choice((-90, 0, 7)))
        none = (0,) * 4
        args = (b"a/1", self._number, 0, *rates, *none, *held, *none, *none, b"", 0)
        self._asked = "a", []
        return "schedsvc_escrow", keys, args

    def _slots(self) -> Words:
        rnd = self.rnd
        self._number += 1
        holder, caps = rnd.choice(_HOLDERS), rnd.sample(sorted(_CAPS), rnd.randrange(1, 4))
        term = rnd.choice((3, 3, 3, 4)) if holder == b"set:main" else 0
        life, call = rnd.choice("1112"), self._number - rnd.choice((0, 0, 0, 0, 9))
        words: list[Any] = [holder, term, life, call]
        for cap in caps:
            words += (_CAPS[cap], rnd.choice((0, 0, 1, 2, 4)), rnd.choice((0, 0, 1, 3)))
        return "schedsvc_slots", slot_keys_of("prod", holder, caps), words

    def _budgets(self) -> Words:
        rnd = self.rnd
        keys = [budget_key_of("prod", b"tenant:t", b"day-%d-UTC" % rnd.randrange(2)) for _ in "ab"]
        spent = [rnd.randrange(10**6) for _ in keys]
        return "schedsvc_budgets", keys, (rnd.choice("abc"), *spent)

    def _exchange(self) -> Words:
        rnd = self.rnd
        words: list[Any] = [rnd.randrange(0, 30), rnd.choice((1, 2, 500)), f"{rnd.random()}"]
        for place in rnd.sample(_PLACES, rnd.randrange(0, 3)):
            row = rnd.choice((b"", b"%d row" % rnd.randrange(99), b"%d row" % rnd.randrange(99)))
            before = self._settings.get(place, b"") if rnd.random() < 0.8 else b"another"
            seen = hashlib.sha1(before).hexdigest() if before else ""
            if before != b"another":
                self._settings[place] = row
            words += (place, seen, row)
        return "schedsvc_settings", settings_keys_of("prod"), words

    def heard(self, words: Words, answer: Any) -> None:
        """Go on from the answer, as a member does; some answers are lost."""
        if words[1] == "schedsvc_term_look":
            self._rows = answer[:2]
        if words[1] == "schedsvc_escrow" and answer and self.rnd.random() < 0.8:
            name, buckets = self._asked
            for at, bucket in enumerate(buckets):
                self._born[bucket] = answer[4][at]
                for k in range(4):
                    given = answer[0][12 * at + k]
                    self._held[name, bucket][k] += given
                    self._drawn[name, bucket][k] = (self._drawn[name, bucket][k] + given) % (
                        1 << 52
                    )
