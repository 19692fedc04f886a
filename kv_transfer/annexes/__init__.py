"""Blocks of one request on other nodes: they are put there over a connection of their own, and asked for their part of
attention, layer by layer. The connection is the lease: where it ends, at either end, the blocks are free."""
