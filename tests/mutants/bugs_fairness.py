"""Known bugs of the lift: the level, the credit, and what a restart keeps of them."""

from mutant import Mutant

LIFTS = 1 << 44  # seeds from here on draw the level and its credit
RESTARTS = frozenset({"scheduler-restarted", "client-leaves-run", "engine-slow"})

FAIRNESS_BUGS = (
    Mutant(
        "level-falls",
        "the level of a class is its least active counter, and falls with it",
        (
            (
                "model/flows.pxi",
                "            self.level[cls] = max(self.level[cls], active.nodes[0].key)\n",
                "            if BUG:\n"
                "                self.level[cls] = active.nodes[0].key\n"
                "                return self.level[cls]\n",
            ),
        ),
        100,
        None,
        LIFTS,
    ),
    Mutant(
        "credit-per-weight",
        "a flow of twice the weight gets half the credit",
        (
            (
                "model/flows.pxi",
                "            f.vtc = max(f.vtc, self.lift_of(f.cls) - self.credit())\n",
                "            if BUG:\n"
                "                f.vtc = max(f.vtc, self.lift_of(f.cls)\n"
                "                    - self.credit() * 1000 // f.weight_milli)\n"
                "                return self.active(flow).put(flow, f.vtc, flow)\n",
            ),
        ),
        100,
        None,
        LIFTS,
    ),
    Mutant(
        "credit-without-end",
        "a flow that runs keeps its counter when it waits again",
        (
            (
                "model/flows.pxi",
                "            f.vtc = max(f.vtc, self.lift_of(f.cls) - self.credit())\n",
                "            if BUG and f.live:\n"
                "                return self.active(flow).put(flow, f.vtc, flow)\n",
            ),
        ),
        100,
        None,
        LIFTS,
    ),
    Mutant(
        "level-forgotten",
        "after a restart, the levels of all classes are 0",
        (
            (
                "lifecycle/restore.pxi",
                "            core.flows.level[cls] = levels[cls]\n",
                "            if BUG:\n"
                "                core.flows.level[cls] = 0\n"
                "                continue\n",
            ),
        ),
        400,
        RESTARTS,
        LIFTS,
    ),
)
