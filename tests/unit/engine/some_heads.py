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
            memoryview(b"".join(cache[start:stop] for cache in caches for start, stop in spans))
            for caches, spans in zip(caches_of(self._whole, layer, block_ids), self._spans(layer), strict=True)
        )
        return keys, values

    def write(self, layer, block_ids, keys, values):
        merged = []
        kinds = zip(caches_of(self._whole, layer, block_ids), self._spans(layer), (keys, values), strict=True)
        for caches, spans, ours in kinds:
            changed, offset = [bytearray(cache) for cache in caches], 0
            for cache in changed:
                for start, stop in spans:
                    cache[start:stop] = ours[offset : offset + stop - start]
                    offset += stop - start
            assert offset == len(ours)
            merged.append(memoryview(b"".join(changed)))
        self._whole.write(layer, block_ids, *merged)

    def _spans(self, layer):
        """Of a cache of the whole, in the order of one of ours: for K and for V."""
        return [list(spans_of(cache, self._heads)) for cache in self._whole.layout.cache_shapes(layer)]


def spans_of(cache, heads):
    """Where in a cache these heads lie: for each token the data, then the scales if there are any."""
    width = cache.width * {"float32": 4, "bfloat16": 2}.get(cache.dtype, 1)
    for token in range(cache.block_size):
        start = (token * cache.num_heads + heads.start) * width
        yield start, start + len(heads) * width
    if width and cache.dtype in ("int8", "fp8_e4m3"):
        scales = cache.block_size * cache.num_heads * width
        yield scales + 4 * heads.start, scales + 4 * heads.stop


def caches_of(store, layer, block_ids):
    """The K cache of each block, and the V caches."""
    kinds = zip(store.read(layer, block_ids), store.layout.cache_shapes(layer), strict=True)
    return [
        [bytes(caches[place * cache.num_bytes :][: cache.num_bytes]) for place in range(len(block_ids))]
        for caches, cache in kinds
    ]
