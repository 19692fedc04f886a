"""Connect the pipeline stages of a node, each of which computes some layers, as seen by one rank of one stage.

Activations of a step go from stage to stage; the logits go from the last stage to rank 0, which samples. Tensors arrive
unchanged, so no bit depends on the number of stages.
"""

import torch
from torch import distributed

from engine.parallel import LEADER, RankGroup, needs_peers, stage_group


class Pipeline:
    """Sends tensors between pipeline stages: each rank talks to the ranks of its own number within the other stages.

    A call raises RankLost if the peer is gone or does not answer within the group's timeout.
    """

    def __init__(self, node: RankGroup, num_stages: int, device: torch.device) -> None:
        """Create the groups. Call on all ranks of the node, which are numbered stage by stage."""
        self.stage = stage_group(node, num_stages)
        """The ranks that compute the same layers as this rank."""
        self.num_stages = num_stages
        self._rank = node.rank
        self._last_stage = node.size - self.stage.size  # rank of its first member
        self._device = device
        self._under_way: list[tuple[distributed.Work, torch.Tensor]] = []

    @needs_peers
    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Wait for the next tensor [num_rows, width] that the previous stage sends, and return it.

        With num_rows 0 there is no message.
        """
        return self._received(num_rows, width, dtype, self._rank - self.stage.size)

    @needs_peers
    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send a tensor to the next stage, without waiting; the caller must not change it afterwards."""
        tensor = tensor.contiguous()
        work = distributed.isend(tensor, self._rank + self.stage.size)
        assert work is not None, "this rank is one of the group"
        self._under_way.append((work, tensor))

    @needs_peers
    def logits_on_leader(
        self, logits: torch.Tensor | None, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """End a step: return the last stage's logits [num_rows, width] on rank 0 of the node, None on the other ranks.

        `logits` is the output of the last stage; only its first rank's is used and sent, and other ranks may pass None.
        Waits until every tensor that this rank sent has arrived.
        """
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
