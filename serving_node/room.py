"""Who gets blocks and running slots next, of prompts that are read here and those that other nodes read. Pure.

Where there are limits or priorities nodes read in another order than that of age. So credit is first for what is read
and waits, the oldest first, and grants of which nothing has come are taken back for it. To be read a prompt needs none.

All else goes by age. Nodes that read for each other could each be full of what waits for the other one. So a node that
would stand still takes blocks and running slots back from its youngest, for the oldest that lacks some: the oldest
request of the whole fleet is the oldest on both of its nodes, is read, gets what it needs to be answered, and finishes.

It should not come to that: cap.py bounds what is held for other nodes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from decode_node.batch import Writing, can_give_way, slots_in_time
from decode_node.credit import Credit
from prefill_node.order import due_s
from prefill_node.reading import Reading
from serving_core.costs import StepCosts
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage
from serving_node.cap import Cap, num_blocks_of
from serving_node.claims import Claim, Hosting

HOLDING: Final = (Stage.WRITING, Stage.GRANTED, Stage.READING)
SLOTED: Final = (Stage.WRITING, Stage.GRANTED, Stage.STOPPED)
WITHOUT: Final = (Stage.QUEUED, Stage.AWAITING)
LACKING: Final = (*WITHOUT, Stage.READING, Stage.READ, Stage.WRITING)


def credit_order(node_request: NodeRequest) -> tuple[int, int, int]:
    """Who gets credit first. Those that are ready, by age: their clients have a token and wait. Then those that are
    yet to be read, in that order as far as it is known here: with a limit on the first token, by priority, by age."""
    if node_request.is_ready:
        return 0, 0, node_request.age
    return 1 if due_s(node_request) < math.inf else 2, node_request.priority, node_request.age


class Room:
    """The blocks and running slots of one node, between its two halves."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        reading: Reading,
        credit: Credit,
        writing: Writing,
        costs: StepCosts,
        claim: Claim,
        hosting: Hosting,
        num_slots: int,
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._reading = reading
        self._credit = credit
        self._writing = writing
        self._costs = costs
        self._claim = claim
        self._hosting = hosting
        self._cap = Cap(node_requests, leases, reading, writing)
        self.num_slots = num_slots  # may change; who has one keeps it
        self._next_without: NodeRequest | None = None  # to get credit, for which it lacks blocks
        self._sharers: list[NodeRequest] = []  # those that get it behind others, which bring what they begin with
        self._preferred: NodeRequest | None = None  # others gave way to it

    def grant(self) -> Iterator[NodeRequest]:
        """Gives credit to those that it yields, in `credit_order`. What prompts need that were here before is kept for
        them: for those that gave way, and for the oldest. So is what those need that are to share what others bring."""
        self._next_without, self._sharers = None, []
        if self.num_running() >= self.num_slots and not self._unready_grants():  # however many wait
            return
        leaves_enough = self._claim.gate(self._credit.num_to_hold)
        for node_request in sorted(self._node_requests.in_stage(Stage.AWAITING), key=credit_order):
            if node_request.is_ending or self._is_behind(node_request.age) or not leaves_enough(node_request):
                continue
            num_promised, num_promised_slots = self._promised_before(node_request)
            has_slot = self.num_running() + num_promised_slots + len(self._sharers) < self.num_slots
            if has_slot and self._credit.waits(node_request):
                self._sharers.append(node_request)
                continue
            num_promised += self._num_kept(self._sharers)
            if not has_slot or not self._credit.grant(node_request, num_spare=num_promised + self.num_running()):
                self._next_without = node_request if has_slot else None
                if node_request.is_ready:
                    self._take_back_unready()
                return
            yield node_request

    def _promised_before(self, node_request: NodeRequest) -> tuple[int, int]:
        """Blocks and running slots of older prompts that are to be read here, or to be read on."""
        num_blocks, num_slots, is_head = 0, 0, True
        for each in self._node_requests.in_stage(Stage.QUEUED, Stage.READING):
            if each.age > node_request.age:
                break
            if each.stage is Stage.READING:
                if self._lacks_growth(each):
                    num_blocks += self._leases.num_missing(each, each.num_computed + each.num_to_compute)
            elif not each.is_ending and (is_head or each.has_first_token) and not self._cap.holds_back(each):
                num_blocks += self._reading.num_needed(each)
                num_slots += not each.hands_over
                is_head = False
        return num_blocks, num_slots

    def _num_kept(self, sharers: Iterable[NodeRequest]) -> int:
        """Blocks for those that get credit behind others, and what each of them grows into."""
        return sum(self._credit.num_blocks(each) + 1 for each in sharers)

    def _take_back_unready(self) -> None:
        """For one that is ready: takes the last grant back of which nothing has come, for that may be read much later.
        One at a time."""
        unready = self._unready_grants()
        if unready and not any(each.is_revoked for each in self._node_requests.in_stage(Stage.GRANTED)):
            self._writing.give_way(max(unready, key=credit_order))

    def _unready_grants(self) -> list[NodeRequest]:
        """Those of which nothing has come yet, and that are not read, as far as is known."""
        granted = self._node_requests.in_stage(Stage.GRANTED)
        return [each for each in granted if can_give_way(each) and not each.is_ready and not each.is_coming]

    def num_running(self) -> int:
        """Answers that are written here, or will be as soon as their KV is there: they will need more blocks."""
        being_read = self._node_requests.in_stage(Stage.READING)
        return self._node_requests.count(*SLOTED) + sum([not each.hands_over for each in being_read])

    def num_awaited(self) -> int:
        """Blocks that are not for other nodes to have: what those need that have none yet, and one for each answer."""
        without = self._node_requests.in_stage(*WITHOUT)
        needed = [
            self._reading.num_needed(each) if each.stage is Stage.QUEUED else self._credit.num_to_hold(each)
            for each in without
        ]
        return sum(needed) + self.num_running()

    def slot(self) -> bool:
        """Lets what is read and kept write here as running slots come free, unless older ones need them; tells whether
        any does."""
        num_older, has_running = 0, False
        if not any(each.is_kept for each in self._node_requests.in_stage(Stage.READ)):
            return False
        for node_request in self._node_requests.in_stage(*WITHOUT, Stage.READ):
            if node_request.is_ending or node_request.is_outgoing:
                continue
            if self.num_running() + num_older >= self.num_slots:
                break
            if node_request.stage is Stage.READ:
                self._writing.take_over(node_request)
                has_running = True
            else:
                num_older += 1
        return has_running

    def gate(self, holds_up: Callable[[NodeRequest, int], bool]) -> Callable[[NodeRequest], bool]:
        """Tells of prompts, one after the other, whether they may start in this step. All wait for older requests that
        lack blocks, also those of other nodes; what goes to another node, for the older ones that do; what is to be
        answered here, for answers that would miss their limits beside it. `holds_up` tells whether one waits for what
        it is to start with, given how many blocks are to be left free."""
        leaves_enough = self._claim.gate(self._reading.num_needed)
        is_full, capped = False, math.inf  # the age from which on what goes to other nodes has to wait

        def may_start(node_request: NodeRequest) -> bool:
            nonlocal is_full, capped
            if self._waits_for_older(node_request) or not leaves_enough(node_request):
                return False
            if not node_request.is_outgoing:
                is_full = is_full or not self._has_slot_in_time  # none comes free while a step is planned
                return not (is_full and _needs_slot(node_request)) and not holds_up(
                    node_request, self._num_spare(node_request)
                )
            if node_request.age < capped and self._cap.holds_back(node_request):
                capped = node_request.age
            return node_request.age < capped and not holds_up(node_request, self._num_spare(node_request))

        return may_start

    @property
    def may_start_any(self) -> bool:
        """Whether a prompt that waits might start if it had blocks."""
        if not self._node_requests.count(Stage.QUEUED):
            return False
        return self._has_free_slot or not all(map(_needs_slot, self._node_requests.in_stage(Stage.QUEUED)))

    @property
    def _has_free_slot(self) -> bool:
        return self.num_running() < self.num_slots

    @property
    def _has_slot_in_time(self) -> bool:
        return self._has_free_slot and self.num_running() < slots_in_time(self._running(), self._costs)

    def start(self, node_request: NodeRequest) -> bool:
        """Gives a prompt that may start its blocks, unless there are too few."""
        if node_request.is_outgoing:
            self._cap.make_room(node_request)
        return self._reading.start(node_request, num_spare=self._num_spare(node_request))

    def _num_spare(self, node_request: NodeRequest) -> int:
        """Blocks that the start of a prompt is to leave free."""
        return self.num_running() + self._num_kept(each for each in self._sharers if each.age < node_request.age)

    def make_way(self) -> bool:
        """For a node that has nothing to compute: takes from the youngest what an older one lacks. Tells whether
        anything is free at once; a grant that is taken back comes free later."""
        if any(_lets_go_soon(each) for each in self._node_requests):
            return False
        held_back_from = self._claim.held_back_from()
        for node_request in self._node_requests.in_stage(*LACKING):
            if node_request.age > held_back_from:
                break
            if not self._lacks_room(node_request) or (
                node_request.stage is Stage.AWAITING and not node_request.is_ready
            ):
                continue
            if victim := self._youngest_behind(node_request):
                self._preferred = node_request
                self._writing.give_way(victim)
                return not victim.is_revoked
        return False

    def stranded(self, makes_room_for: Callable[[NodeRequest], bool]) -> NodeRequest | None:
        """For a node that has nothing to compute and where nobody can give way: the oldest that needs more blocks than
        there are beside those that hold parts of other nodes' requests, for as long as these like; None where there is
        none. `makes_room_for` tells of one whether its hosts may yet do so."""
        hosting = self._hosting
        if not hosting.num_blocks or hosting.is_recalling or any(_lets_go_soon(each) for each in self._node_requests):
            return None
        num_left = self._leases.num_blocks - hosting.num_blocks
        waiting = [each for each in self._node_requests.in_stage(*LACKING) if not makes_room_for(each)]
        return next((each for each in waiting if self._lacks_room(each) and self._num_blocks_of(each) > num_left), None)

    def recall(self, node_request: NodeRequest) -> bool:
        """For one that is stranded: takes blocks back from the youngest of other nodes' requests, which come free in a
        moment, and are for it. Tells whether it does: not in vain, nor from older ones."""
        num_left = self._leases.num_blocks - self._hosting.num_firm(node_request.age)
        if self._num_blocks_of(node_request) > num_left:
            return False
        self._preferred, node_request.has_recalled = node_request, True
        self._hosting.recall()
        return True

    def may_host(self, age: int) -> bool:
        """Whether tiles of a request of this age may come: none while others give way to an older one, nor while one
        is here that tiles were recalled for. They would be recalled again, each time with all that was computed."""
        return not self._is_behind(age) and not any(
            each.has_recalled and each.age < age for each in self._node_requests
        )

    def _num_blocks_of(self, node_request: NodeRequest) -> int:
        """That it needs to go on, with those that it has."""
        if node_request.stage is Stage.QUEUED:
            return self._reading.num_needed(node_request)
        if node_request.stage is Stage.AWAITING:
            return self._credit.num_to_hold(node_request)
        return num_blocks_of(node_request) + 1

    def _lacks_room(self, node_request: NodeRequest) -> bool:
        """Whether it could go on if others gave way. What waits for another node, or for older ones, could not."""
        if node_request.stage is Stage.READ:
            return node_request.is_kept
        if node_request.stage is Stage.AWAITING:
            return not node_request.is_to_share
        return not (node_request.stage is Stage.QUEUED and self._cap.holds_back(node_request))

    def _waits(self, node_request: NodeRequest) -> bool:
        """Whether it has no blocks yet to begin with, or to go on with."""
        return node_request.stage in WITHOUT or self._lacks_growth(node_request)

    def _lacks_growth(self, node_request: NodeRequest) -> bool:
        """Whether it is an answer, or a prompt with hosts, which get blocks as they go, that has none for its next
        token; other prompts have some to their end."""
        is_growing = node_request.stage in (Stage.WRITING, Stage.READING)
        return is_growing and self._leases.num_missing(node_request, node_request.num_computed + 1) > 0

    def _youngest_behind(self, node_request: NodeRequest) -> NodeRequest | None:
        """The youngest that holds what this one lacks, and is younger."""
        needs_slot = node_request.stage not in HOLDING and _needs_slot(node_request) and not self._has_free_slot
        for each in reversed(list(self._node_requests)):
            if each is node_request:
                return None
            if each.stage in HOLDING or (each.stage is Stage.READ and not needs_slot):
                return each
        return None

    def _waits_for_older(self, node_request: NodeRequest) -> bool:
        """Whether an older request waits for blocks, which would be this one's, or those of its loan."""
        older = self._next_without
        return (older is not None and older.age < node_request.age) or self._is_behind(node_request.age)

    def _is_behind(self, age: int) -> bool:
        """Whether one that is older than this, and that others gave way to, still has no blocks."""
        preferred = self._preferred
        if preferred is None or preferred not in self._node_requests or not self._waits(preferred):
            self._preferred = None
            return False
        return not preferred.is_ending and preferred.age < age

    def _running(self) -> list[NodeRequest]:
        being_read = [each for each in self._node_requests.in_stage(Stage.READING) if not each.hands_over]
        return [*self._node_requests.in_stage(*SLOTED), *being_read]


def _needs_slot(node_request: NodeRequest) -> bool:
    """Whether it needs a running slot that it does not have, to start or to go on."""
    return not node_request.hands_over or (node_request.is_kept and node_request.stage is Stage.READ)


def _lets_go_soon(node_request: NodeRequest) -> bool:
    """Whether its blocks come free without any other request, or without a step of this node."""
    if node_request.stage is Stage.GRANTED and not node_request.is_receiving:
        return True  # its sender gave it up, and it is cancelled in a moment
    if node_request.stage is Stage.STOPPED:
        return True  # the coordinator hears of it, and it goes or goes on
    if node_request.is_annexing:
        return True
    if node_request.is_loading:
        return True  # its blocks come, or it starts without them
    return (
        node_request.is_revoked
        or node_request.is_ending
        or (node_request.is_sending and node_request.lease is not None)
    )
