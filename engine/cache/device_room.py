"""How much of a CUDA device is left for a KV pool whose size is not given."""

import torch

from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from serving_core.units import size_of


def device_room(settings: EngineSettings, device: torch.device, num_kept_bytes: int) -> int:
    """Bytes of --gpu-memory-utilization beside the weights, which are loaded, and what is kept for others; 0 where
    nothing is asked of the device. Raises SettingsError where nothing is left."""
    if device.type != "cuda" or settings.num_kv_blocks or settings.kv_cache_memory_bytes:
        return 0
    total = torch.cuda.mem_get_info(device)[1]
    share = int(total * settings.gpu_memory_utilization)
    taken = torch.cuda.memory_allocated(device) + num_kept_bytes
    if taken >= share:
        raise SettingsError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} of {size_of(total)} leaves nothing for KV "
            f"beside {size_of(taken)} of weights"
        )
    return share - taken
