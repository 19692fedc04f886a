"""What accelerators and links do at best, by their data sheets, and what they cost unless a flag says otherwise.

FLOP/s are dense 16-bit products, bandwidths are of one direction. Watts are the board's limit. Dollars are what renting
one for an hour costs: H100 and A100 as Splitwise reckons (table V of arXiv 2311.18677: 38 and 17.6 dollars for a
machine of eight), the others are assumptions. A device `cpu` is one core of a server with AVX-512. Layers that have no
room come from host memory over PCIe 5 or 4, or from a disk beside a CPU.
"""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import SettingsError
from serving_core.units import GIB

NVLINK, INFINIBAND, ETHERNET_100G, ETHERNET_10G, PCIE = "nvlink", "ib", "100g", "10g", "pcie"
CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `link` is what usually joins those of a host."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: int
    elsewhere_bytes_per_s: float  # of weights that are not in its memory
    nvlink_bytes_per_s: float  # 0: it has none
    link: str
    dollars_per_h: float
    watts: float
    multiplies_quantized: bool = False  # our kernels there do, with weights as they are


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends by, while nobody else of its host uses it."""

    name: str
    bytes_per_s: float
    latency_s: float  # of a message between two ranks
    is_shared: bool = False  # by the devices of a host, between hosts


_DEVICES: Final = (
    Device("h100", 989e12, 3.35e12, 80 * GIB, 64e9, 450e9, NVLINK, 4.75, 700),
    Device("h200", 989e12, 4.8e12, 140 * GIB, 64e9, 450e9, NVLINK, 5.50, 700),
    Device("a100", 312e12, 2.039e12, 80 * GIB, 32e9, 300e9, NVLINK, 2.20, 400),
    Device("l4", 121e12, 300e9, 24_000_000_000, 32e9, 0, PCIE, 0.70, 72),
    Device(CPU, 320e9, 12e9, 4 * GIB, 3e9, 0, ETHERNET_10G, 0.05, 10, multiplies_quantized=True),
)
DEVICES: Final = {device.name: device for device in _DEVICES}
_LINKS: Final = (
    Link(INFINIBAND, 50e9, 5e-6),  # a port of 400 Gbit/s for each device
    Link(ETHERNET_100G, 12.5e9, 20e-6, is_shared=True),
    Link(ETHERNET_10G, 1.25e9, 30e-6, is_shared=True),
    Link(PCIE, 32e9, 5e-6),
)
LINKS: Final = {link.name: link for link in _LINKS}
LINK_NAMES: Final = (NVLINK, *LINKS)
NVLINK_LATENCY_S: Final = 1e-6


def device_of(name: str) -> Device | None:
    """The device that a table or a flag means by h100, h100-80gb or H100; None when it is none of ours."""
    return DEVICES.get(name.lower().split("-")[0])


def link_of(name: str, device: Device) -> Link:
    """The link of that name between devices like this one. Raises SettingsError."""
    if name != NVLINK:
        return LINKS[name]
    if not device.nvlink_bytes_per_s:
        others = ", ".join(LINKS)
        raise SettingsError(f"{device.name} has no NVLink: --link and --host-link can be {others}")
    return Link(NVLINK, device.nvlink_bytes_per_s, NVLINK_LATENCY_S)
