"""Some heads of a KVStore, the plain way: for the stores of the tests."""


class SomeHeads:
    """Some heads of a store, carried byte by byte."""

    def __init__(self, whole, heads: range):
        self.layout = whole.layout.with_heads(len(heads))
        self._whole = whole
        self._spans = list(spans_of(whole.layout, heads))  # of a plane of the whole, in the order of one of ours

    def heads(self, heads):
        return SomeHeads(self, heads)

    def read(self, layer, block_ids):
        keys, values = (
            memoryview(b"".join(plane[start:stop] for plane in planes for start, stop in self._spans))
            for planes in planes_of(self._whole, layer, block_ids)
        )
        return keys, values

    def write(self, layer, block_ids, keys, values):
        assert len(keys) == len(values) == len(block_ids) * self.layout.plane_bytes
        merged = []
        for planes, ours in zip(planes_of(self._whole, layer, block_ids), (keys, values), strict=True):
            changed, offset = [bytearray(plane) for plane in planes], 0
            for plane in changed:
                for start, stop in self._spans:
                    plane[start:stop] = ours[offset : offset + stop - start]
                    offset += stop - start
            merged.append(memoryview(b"".join(changed)))
        self._whole.write(layer, block_ids, *merged)


def spans_of(layout, heads):
    """Where in a plane these heads lie: for each token the data, then the scales if there are any."""
    width = layout.head_bytes
    for token in range(layout.block_size):
        start = (token * layout.num_kv_heads + heads.start) * width
        yield start, start + len(heads) * width
    if layout.is_quantized:
        scales = layout.block_size * layout.num_kv_heads * width
        yield scales + 4 * heads.start, scales + 4 * heads.stop


def planes_of(store, layer, block_ids):
    """The K plane of each block, and the V planes."""
    size = store.layout.plane_bytes
    return [
        [bytes(planes[start : start + size]) for start in range(0, len(planes), size)]
        for planes in store.read(layer, block_ids)
    ]
