"""Move blocks between two processes of one machine through memory that both have mapped.

The memory belongs to a connection of the ZeroMQ transport, which stays open and carries everything else:

    sender                                           receiver
    Offer (a socket's name, a secret, a nonce) ────>  connects to the socket, shows the secret
    hands over the descriptor of new memory    ────>  checks its seals and its size, maps it read-only, reads the nonce
                                               <────  Taken, or Declined and why
    copies blocks into a free slot, Lent       ────>  copies them out
                                               <────  Returned: the slot is free again

The socket is found only within one machine (one network namespace) and hands over to the same user only; it stays open,
so that either end notices at once when the other one dies. Nothing else is ever in the memory than what this receiver
was to be sent. A slot is used again when it was returned, never because time has passed: where a receiver is silent,
the connection is given up, and the memory with it. The receiver checks its own copy by the checksum of its segment, as
it does with what came over a network. Whatever fails here, blocks go by the connection itself.
"""
