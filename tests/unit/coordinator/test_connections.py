"""Which connection is closed for a new one."""

import random

import pytest

from coordinator.doors.http.connections import Connections, peer_of


def test_the_one_that_was_idle_for_longest_makes_room():
    kept = Connections(3, 3)
    assert [kept.add(name, "a") for name in "123"] == [None] * 3
    kept.set_busy("1")
    kept.set_idle("1")  # after 2 and 3
    assert [kept.add(name, "a") for name in "456"] == ["2", "3", "1"]
    assert len(kept) == 3


def test_who_has_something_to_do_stays():
    kept = Connections(2, 2)
    kept.add("1", "a")
    kept.add("2", "a")
    kept.set_busy("1")
    assert kept.add("3", "a") == "2"
    kept.set_busy("3")
    assert kept.add("4", "a") == "4"  # nobody else is idle
    kept.set_idle("1")
    assert kept.add("5", "a") == "1"


def test_a_crowd_from_one_address_makes_room_for_itself():
    kept = Connections(10, 3)
    kept.add("theirs", "b")
    assert [kept.add(name, "a") for name in "1234"] == [None, None, None, "1"]
    for name in "234":
        kept.set_busy(name)
    assert kept.add("5", "a") == "5"
    kept.remove("3")
    assert kept.add("6", "a") is None


def test_what_is_forgotten_stays_so():
    kept = Connections(1, 1)
    kept.add("1", "a")
    assert kept.add("2", "a") == "1"
    for late in (kept.set_idle, kept.set_busy, kept.remove):
        late("1")
    assert len(kept) == 1
    assert kept.add("3", "a") == "2"


class Listed:
    """The same as a list that is searched from its beginning: [name, peer, is idle], in the order of becoming idle."""

    def __init__(self, most, most_per_peer):
        self._most, self._most_per_peer = most, most_per_peer
        self.entries = []

    def add(self, name, peer):
        self.entries.append([name, peer, True])
        idle = [each for each in self.entries if each[2]]
        if sum(each[1] == peer for each in self.entries) > self._most_per_peer:
            idle = [each for each in idle if each[1] == peer]
        elif len(self.entries) <= self._most:
            return None
        self.entries.remove(idle[0])
        return idle[0][0]

    def set_busy(self, name):
        for entry in self._found(name):
            entry[2] = False

    def set_idle(self, name):
        for entry in self._found(name):
            if not entry[2]:
                self.entries.remove(entry)
                self.entries.append([name, entry[1], True])

    def remove(self, name):
        for entry in self._found(name):
            self.entries.remove(entry)

    def _found(self, name):
        return [each for each in self.entries if each[0] == name]


@pytest.mark.parametrize("seed", range(20))
def test_any_course_of_events(seed):
    rng = random.Random(seed)
    limits = rng.randint(1, 12), rng.randint(1, 6)
    kept, listed = Connections(*limits), Listed(*limits)
    for name in range(400):
        peer = rng.choice("abc")
        assert kept.add(name, peer) == listed.add(name, peer)
        for _ in range(3):
            what, other = rng.choice(["set_busy", "set_idle", "remove"]), rng.randrange(name + 1)
            for each in (kept, listed):
                getattr(each, what)(other)
        assert len(kept) == len(listed.entries)


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),  # of IPv4, at a port of both kinds
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("a name", "a name"),
    ],
)
def test_whose_an_address_is(host, peer):
    assert peer_of(host) == peer
