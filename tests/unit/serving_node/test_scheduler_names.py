"""What is found again of earlier turns of a chat, and what blocks are called on the nodes that they come to."""

import pytest

from serving_core.node.prefix import CHUNK, EITHER, MIXED_NUMERICS, STEP
from tests.toy_kv import NUMERICS, answer_of
from tests.unit.serving_node.fleet_kit import Fleet
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, BLOCK_SIZE, prompt_of

READ, WRITTEN = (NUMERICS[0] + kind for kind in (CHUNK, STEP))
READ_THERE, WRITTEN_THERE = (NUMERICS[1] + kind for kind in (CHUNK, STEP))


class Chat(Fleet):
    """One turn after the other on two nodes of one kind of numerics (seed 0) or of two (seed 1); the test says who does
    what.
    """

    def __init__(self, seed, **options):
        super().__init__(seed, num_blocks=40, budget=64, slots=4, **options)
        self.first, self.second = self.nodes
        self.tokens = []
        self.age = 0

    def choose(self, ask):
        return self.places

    def turn(self, reader, writer, num_tokens, max_tokens):
        """More tokens from the user, then an answer. Gives the tokens that were cached where it was read, and the
        blocks that travelled."""
        self.places = reader, writer
        self.age += 1
        num_before = {node: len(node.events) for node in self.nodes}
        ask = self.ask([*self.tokens, *prompt_of(num_tokens, len(self.tokens))], max_tokens, self.age, "chat")
        self.run()
        self.check_end()
        assert ask.output == answer_of(ask.prompt, max_tokens)
        self.tokens = [*ask.prompt, *ask.output]
        told = [event for node in self.nodes for event in node.events[num_before[node] :]]
        [first] = [event.first_token.num_cached_tokens for event in told if event.HasField("first_token")]
        return first, sum(event.committed.num_bytes for event in told) // BLOCK_BYTES


@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_node_wrote_while_answering_is_found_by_the_next_turn_that_it_reads(seed):
    chat = Chat(seed)
    assert chat.turn(chat.first, chat.second, 18, 12) == (0, 5)
    assert chat.turn(chat.second, chat.second, 10, 12) == (28, 0)  # of 29 tokens with KV, those in whole blocks
    assert chat.turn(chat.second, chat.second, 10, 12) == (48, 0)
    names = set(chat.first.allocator.blocks_by_name)
    assert len(names) == 18 // BLOCK_SIZE
    assert names < set(chat.second.allocator.blocks_by_name)  # copies have kept theirs
    assert chat.second.numerics_ids == ({READ, MIXED_NUMERICS, READ_THERE, WRITTEN_THERE} if seed else {READ, WRITTEN})


@pytest.mark.parametrize("seed", [0, 1])
def test_each_turn_of_a_chat_ships_its_new_blocks_alone(seed):
    """The node that writes has the answers; the one that reads computes them again, behind other blocks."""
    chat = Chat(seed)
    assert chat.turn(chat.first, chat.second, 18, 12) == (0, 5)  # 30 tokens, 29 of them with KV
    assert chat.turn(chat.first, chat.second, 10, 12) == (16, 3)  # 40 tokens in 10 blocks, of which 7 were there
    assert chat.turn(chat.first, chat.second, 10, 12) == (40, 4)  # 62 tokens in 16 blocks, of which 12 were there
    assert MIXED_NUMERICS in chat.second.numerics_ids
    assert MIXED_NUMERICS not in chat.first.numerics_ids


def test_where_bits_have_no_history_what_was_written_is_called_like_what_was_read():
    """As above; but what the one node has written and the other one reads again is the same block."""
    chat = Chat(0, is_batch_invariant=True)
    assert chat.turn(chat.first, chat.second, 18, 12) == (0, 5)
    assert chat.turn(chat.first, chat.second, 10, 12) == (16, 3)
    assert chat.turn(chat.first, chat.second, 10, 12) == (40, 4)
    assert chat.first.numerics_ids == chat.second.numerics_ids == {NUMERICS[0] + EITHER}
    assert chat.first.allocator.blocks_by_name.keys() <= chat.second.allocator.blocks_by_name.keys()
    assert len(chat.second.allocator.blocks_by_name) == (18 + 12 + 10 + 12 + 10 + 12 - 1) // BLOCK_SIZE


def test_an_answer_is_handed_on_with_the_names_that_its_blocks_got():
    """To be read where it was written, and written where nothing is known of it."""
    chat = Chat(0)
    chat.turn(chat.first, chat.first, 18, 12)
    assert chat.turn(chat.first, chat.second, 10, 12) == (28, 10)
    names = chat.second.allocator.blocks_by_name
    assert len(names.keys() & chat.first.allocator.blocks_by_name) == 10
    assert MIXED_NUMERICS not in chat.second.numerics_ids


def test_equal_tokens_have_other_names_where_they_were_computed_in_another_way():
    chat = Chat(1)
    chat.turn(chat.first, chat.first, 18, 12)
    tokens, chat.tokens = chat.tokens, []
    chat.turn(chat.second, chat.second, 18, 12)
    assert chat.tokens == tokens
    assert not chat.first.allocator.blocks_by_name.keys() & chat.second.allocator.blocks_by_name
