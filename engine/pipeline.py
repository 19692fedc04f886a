"""The stages of a node, each of which computes some layers, as one rank of one stage sees them.

A step's activations go from stage to stage, and its logits from the last stage to rank 0, which samples. All tensors
are what the one end has made them, so no bit depends on how many stages there are.
"""

import torch
from torch import distributed

from engine.parallel import LEADER, RankGroup, needs_peers, stage_group


class Pipeline:
    """Ranks of equal number within their stages talk to each other. A call that a peer does not answer within the
    group's timeout, or whose peer is gone, raises RankLost."""

    def __init__(self, node: RankGroup, num_stages: int, device: torch.device) -> None:
        """To be called on all ranks of the node, which are numbered stage by stage."""
        self.stage = stage_group(node, num_stages)
        """The ranks that compute the same layers as this one."""
        self.num_stages = num_stages
        self._rank = node.rank
        self._last_stage = node.size - self.stage.size  # its first rank
        self._device = device
        self._under_way: list[tuple[distributed.Work, torch.Tensor]] = []

    @needs_peers
    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor [num_rows, width] that the stage before has sent."""
        return self._received(num_rows, width, dtype, self._rank - self.stage.size)

    @needs_peers
    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor to the stage behind. It is not to be changed any more."""
        tensor = tensor.contiguous()
        work = distributed.isend(tensor, self._rank + self.stage.size)
        assert work is not None, "this rank is one of the group"
        self._under_way.append((work, tensor))

    @needs_peers
    def logits_on_leader(
        self, logits: torch.Tensor | None, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Ends a step: gives the logits [num_rows, width] of the last stage's first rank, or whatever its model gives,
        on rank 0 of the node, None on the others. All that this rank has sent has arrived."""
        received = None
        if self._rank == self._last_stage and num_rows:
            assert logits is not None, "they are computed here"
            distributed.send(logits.contiguous(), LEADER)
        if self._rank == LEADER:
            received = self._received(num_rows, width, dtype, self._last_stage)
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
        return received

    def _received(self, num_rows: int, width: int, dtype: torch.dtype, source: int) -> torch.Tensor:
        tensor = torch.empty(num_rows, width, dtype=dtype, device=self._device)
        if num_rows:
            distributed.recv(tensor, source)
        return tensor
