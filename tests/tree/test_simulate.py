"""The table of the design document, in small: ordering, not digits."""

from __future__ import annotations

import numpy as np

from jetspec_jax.tree import oracle
from jetspec_jax.tree.simulate import BUDGETS, commit_lengths, main, synthetic_candidates, table


def test_exact_beats_all_children_as_published():
    cands = synthetic_candidates(20, 15, 7, 0)
    exact = commit_lengths(cands, "exact", (16, 32, 64))
    published = commit_lengths(cands, "accum_logp", (16, 32, 64))
    # algorithm.md section 4: 3.27 -> 5.17, 4.28 -> 6.05, 5.29 -> 6.92.
    np.testing.assert_allclose(exact, [5.17, 6.05, 6.92], rtol=0.1)
    np.testing.assert_allclose(published, [3.27, 4.28, 5.29], rtol=0.1)


def test_the_cuts_are_what_the_oracle_builds():
    cands = synthetic_candidates(1, 5, 3, 1)
    tokens, logp = np.asarray(cands.tokens[0]), np.asarray(cands.logp[0])
    for builder, plain in (("exact", oracle.best_prefixes), ("accum_logp", oracle.all_children)):
        expected = [oracle.expected_commit_length(plain(tokens, logp, b)) for b in (2, 8, 20)]
        np.testing.assert_allclose(commit_lengths(cands, builder, (2, 8, 20)), expected, rtol=1e-5)


def test_table_is_markdown_and_the_same_every_time(capsys):
    main(["--rounds", "2", "--depth", "3", "--width", "3"])
    printed = capsys.readouterr().out.strip()
    assert printed == table(2, 3, 3)
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(BUDGETS)
    assert all(row.count("|") == 5 for row in rows)
