"""A small version of attack.py: every kind of attack, with a fixed seed."""

import pytest
from attack import attack


@pytest.mark.parametrize(("kind", "count"), [("files", 100), ("commands", 25), ("kills", 4)])
def test_no_attack_ends_in_a_traceback_a_hang_or_a_lost_state(kind, count):
    tally = attack({kind: count}, seed=1)
    assert not tally.findings
    assert sum(tally.counts.values()) >= count
