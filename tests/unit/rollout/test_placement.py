"""Where releases run: whatever hosts come and go, no more of them move than must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serin.rollout.decide.placement import extend, place

HOSTS = st.sets(st.sampled_from("abcdefgh"))


@given(now=HOSTS, reporting=HOSTS, lost=HOSTS, replicas=st.none() | st.integers(1, 9))
def test_lost_hosts_leave_only_for_others_and_nobody_else_leaves(
    now: set[str], reporting: set[str], lost: set[str], replicas: int | None
) -> None:
    reporting -= lost  # a lost host is silent
    then = set(extend(sorted(now), "flights", reporting, replicas, lost))
    assert now - lost <= then, "a host that is there stays"
    assert then <= now | reporting
    wanted = len(now | reporting) if replicas is None else replicas
    assert len(then - lost) >= min(wanted, len((now - lost) | reporting)), "what can be replaced is"
    assert len(then - lost) <= max(wanted, len(now - lost)), "and no more than that"
    assert len(then) >= min(len(now), wanted), "no place is given up without another"


@given(hosts=HOSTS, lost=HOSTS, replicas=st.integers(1, 4))
def test_a_second_look_changes_nothing(hosts: set[str], lost: set[str], replicas: int) -> None:
    now = place("flights", hosts, replicas)
    once = extend(now, "flights", hosts - lost, replicas, lost)
    assert extend(once, "flights", hosts - lost, replicas, lost) == once
