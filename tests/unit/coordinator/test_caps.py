"""How many connections each port may have, worked out by hand."""

import pytest

from coordinator.doors.caps import LEAST_DESCRIPTORS, RESERVE, Caps, connection_caps
from serving_core.errors import SettingsError


def caps(num_descriptors, *, useful=2560, wanted=0, wanted_per_peer=0):
    return connection_caps(num_descriptors, useful=useful, wanted=wanted, wanted_per_peer=wanted_per_peer)


def test_where_there_are_plenty_each_port_has_what_is_useful():
    assert caps(2**20) == Caps(public=2560, http=2560, http_per_peer=1280, fleet=1024)


def test_where_there_are_few_no_port_takes_what_others_need():
    assert caps(1024) == Caps(public=336, http=336, http_per_peer=168, fleet=96)  # of 768, one in eight for nodes


@pytest.mark.parametrize("num_descriptors", [512, 513, 1000, 1024, 4096, 6000, 20_000, 2**31])
@pytest.mark.parametrize("useful", [40, 2560, 10**6])
def test_all_ports_full_leave_the_reserve(num_descriptors, useful):
    found = caps(num_descriptors, useful=useful)
    assert found.public + found.http + found.fleet <= num_descriptors - RESERVE
    assert 1 <= found.http_per_peer <= found.http
    assert found.fleet >= 32


def test_what_is_wanted_is_had():
    assert caps(1024, wanted=100) == Caps(public=100, http=100, http_per_peer=50, fleet=96)
    assert caps(1024, wanted=100, wanted_per_peer=20).http_per_peer == 20
    assert caps(1024, wanted=100, wanted_per_peer=1000).http_per_peer == 100
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
