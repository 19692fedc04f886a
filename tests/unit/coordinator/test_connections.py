"""How many connections each port may have, worked out by hand, and which one is closed for a new one."""

import random

import pytest

from coordinator.api.connections import LEAST_DESCRIPTORS, RESERVE, Caps, Connections, connection_caps, peer_of
from serving_core.errors import SettingsError
from tests.effort import effort

# ---- how many ----


def caps(num_descriptors, *, useful=2560, wanted=0, wanted_per_peer=0, **guards):
    return connection_caps(num_descriptors, useful=useful, wanted=wanted, wanted_per_peer=wanted_per_peer, **guards)


def test_where_there_are_plenty_each_port_has_what_is_useful():
    assert caps(2**20) == Caps(public=2560, http=2560, per_peer=1280, fleet=1024)


def test_where_there_are_few_no_port_takes_what_others_need():
    assert caps(1024) == Caps(public=336, http=336, per_peer=168, fleet=96)  # of 768, one in eight for nodes


@pytest.mark.parametrize("useful", [40, 2560, 10**6])
def test_all_ports_full_leave_the_reserve(useful):
    for num_descriptors in (512, 513, 1000, 1024, 4096, 6000, 20_000, 2**31):
        found = caps(num_descriptors, useful=useful)
        assert found.public + found.http + found.fleet <= num_descriptors - RESERVE
        assert 1 <= found.per_peer <= found.http
        assert found.fleet >= 32
        guarded = caps(num_descriptors, useful=useful, guards_clients=True, guards_nodes=True)
        assert 3 * guarded.public + guarded.http + 3 * guarded.fleet <= num_descriptors - RESERVE


def test_what_is_wanted_is_had():
    assert caps(1024, wanted=100) == Caps(public=100, http=100, per_peer=50, fleet=96)
    assert caps(1024, wanted=100, wanted_per_peer=20).per_peer == 20
    assert caps(1024, wanted=100, wanted_per_peer=1000).per_peer == 100
    assert caps(2**20, wanted=100_000).http == 100_000


@pytest.mark.parametrize(("wanted", "is_refused"), [(336, False), (337, True), (17, False), (16, True)])
def test_what_cannot_be_is_refused_with_the_limit(wanted, is_refused):
    if not is_refused:
        assert caps(1024, wanted=wanted).http == wanted
        return
    with pytest.raises(SettingsError, match=rf"max_connections \({wanted}\) .* at most 336, .* of 1024 open files"):
        caps(1024, wanted=wanted)


def test_too_few_descriptors_are_refused():
    assert caps(LEAST_DESCRIPTORS).http > 0
    with pytest.raises(SettingsError, match=r"the limit of 511 open files \(ulimit -n\) is too low: at least 512"):
        caps(511)


# ---- which one is closed ----


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


@pytest.mark.parametrize("seed", range(effort(5, 20, 100)))
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
