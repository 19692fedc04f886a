"""Hold KV blocks of one request on other nodes (distributed KV), and compute their part of attention there.

The blocks are sent over a connection of their own and queried layer by layer. The connection is the lease: when it
ends, at either end, the blocks are free.
"""
