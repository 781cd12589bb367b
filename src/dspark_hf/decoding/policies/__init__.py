"""Verification policies: how many drafts of each row the target verifies; and the gate that says whether to draft.

    facts.py    what a policy may know, and the interface of all of them
    simple.py   `full`, `threshold`, `survival`: rows on their own
    goodput.py  `goodput`: one length for all rows
    pool.py     candidates of all rows in one order, best first
    prefix.py   `prefix` (Algorithm 1), `smoothed`
    block.py    `block`
    lagged.py   `lagged`
    survival.py how drafts have fared so far, by slot
    floor.py    a least share of drafts for every row
    gate.py     whether a round drafts at all
    registry.py policies by name

Why they are lossless. A candidate (row, slot) is worth its prefix survival `a`, which reads the drafts before it in
its row. Within a row `a` never rises, so that the sorted pool is the order in which a heap of the rows' next
candidates would give them out: whoever has taken n candidates has read drafts that are taken already, and those of
other rows. A policy here stops on what it has read by then, or on what it knew before the round; so `ell_r >= k` never
depends on `x_k` or on later drafts of row r. Rows draw their drafts independently, which this needs.
"""
