"""Of how many bits weights are that `--quantization` makes, and what goes with them."""

from typing import Final

WEIGHT_BITS: Final = {"int8": 8, "int4": 4, "w8a8": 8}
HEAD_BITS: Final = 8  # also among weights of 4 bits: what it rounds is seen at once
INPUT_BITS: Final = {"w8a8": 8}  # to which kernels round what is multiplied with them; 16 with others
GROUP_SIZE_4_BIT: Final = 32  # inputs that share a scale (float32) and a zero (a byte); of 8 bits all do
