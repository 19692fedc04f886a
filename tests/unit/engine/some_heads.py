"""Some heads of a KVStore, the plain way: for the stores of the tests."""


class SomeHeads:
    """Some heads of a store, carried byte by byte."""

    def __init__(self, whole, heads: range):
        self.layout = whole.layout.with_heads(len(heads))
        self._whole = whole
        self._heads = heads

    def heads(self, heads):
        return SomeHeads(self, heads)

    def read(self, layer, block_ids):
        keys, values = (
            memoryview(b"".join(plane[start:stop] for plane in planes for start, stop in spans))
            for planes, spans in zip(planes_of(self._whole, layer, block_ids), self._spans(layer), strict=True)
        )
        return keys, values

    def write(self, layer, block_ids, keys, values):
        merged = []
        kinds = zip(planes_of(self._whole, layer, block_ids), self._spans(layer), (keys, values), strict=True)
        for planes, spans, ours in kinds:
            changed, offset = [bytearray(plane) for plane in planes], 0
            for plane in changed:
                for start, stop in spans:
                    plane[start:stop] = ours[offset : offset + stop - start]
                    offset += stop - start
            assert offset == len(ours)
            merged.append(memoryview(b"".join(changed)))
        self._whole.write(layer, block_ids, *merged)

    def _spans(self, layer):
        """Of a plane of the whole, in the order of one of ours: for K and for V."""
        return [list(spans_of(plane, self._heads)) for plane in self._whole.layout.planes(layer)]


def spans_of(plane, heads):
    """Where in a plane these heads lie: for each token the data, then the scales if there are any."""
    width = plane.width * {"float32": 4, "bfloat16": 2}.get(plane.dtype, 1)
    for token in range(plane.block_size):
        start = (token * plane.num_heads + heads.start) * width
        yield start, start + len(heads) * width
    if width and plane.dtype in ("int8", "fp8_e4m3"):
        scales = plane.block_size * plane.num_heads * width
        yield scales + 4 * heads.start, scales + 4 * heads.stop


def planes_of(store, layer, block_ids):
    """The K plane of each block, and the V planes."""
    kinds = zip(store.read(layer, block_ids), store.layout.planes(layer), strict=True)
    return [
        [bytes(planes[place * plane.num_bytes :][: plane.num_bytes]) for place in range(len(block_ids))]
        for planes, plane in kinds
    ]
