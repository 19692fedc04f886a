"""What a test may need beyond one device."""

import pytest
import torch

from engine.attention.varlen import CAN_PAGE


def need_devices(count):
    """For ranks, of which each takes one."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices here, and each of {count} ranks takes one")


def need_flash_attention():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention wants compute capability 8.0, so nothing is captured")
    if not CAN_PAGE and hasattr(torch.cuda, "is_simulated"):
        pytest.skip("steps of the simulated device are graphs by varlen_attn over blocks, which torch has since 2.12")
