"""The kinds of transports that tests run over. This module does not import torch."""

ZMQ_KINDS = ["tcp", "ipc", "shm"]
FABRIC_KINDS = ["loopback", *ZMQ_KINDS, "curve", "torch_dist"]
