"""Move blocks between two processes of one machine through memory that both have mapped.

The memory belongs to a connection of the ZeroMQ transport, which stays open and carries everything else:

    sender                                           receiver
    Offer (a socket's name, a secret, a nonce) ────>  connects to the socket, shows the secret
    passes the descriptor of new memory        ────>  checks its seals and its size, maps it read-only, reads the nonce
                                               <────  OfferAccepted, or OfferDeclined with a reason
    copies blocks into a free slot, SlotFilled ────>  copies them out
                                               <────  SlotFreed: the slot is free again

The socket is reachable only within one machine (one network namespace) and serves the same user only. It stays open, so
that each end notices at once when the other end dies. The memory holds only blocks for this receiver. A slot is used
again once it is freed by the receiver, never because time has passed: if a receiver is silent, the connection is
closed, and the memory with it. The receiver checks its own copy by the checksum of its segment, as with blocks from a
network. If anything fails here, blocks go over the connection itself.
"""
