/* AVX2 and FMA: pairs of vectors of 8. */
#include <immintrin.h>

typedef struct { __m256 low, high; } floats;
typedef struct { __m256i low, high; } integers, bytes;
typedef struct { __m256i even, odd; } word; /* 16 bits each: products of bytes would not fit their sums in 16 bits */

#define FLOATS(low, high) ((floats){low, high})
#define INTEGERS(low, high) ((integers){low, high})

INLINE floats floats_all(float x) { return FLOATS(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE floats floats_load(const void *from) {
    return FLOATS(_mm256_loadu_ps(from), _mm256_loadu_ps((const float *)from + 8));
}
INLINE void floats_store(void *to, floats a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps((float *)to + 8, a.high);
}
INLINE floats floats_add(floats a, floats b) {
    return FLOATS(_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high));
}
INLINE floats floats_mul(floats a, floats b) {
    return FLOATS(_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high));
}
INLINE floats floats_fma(floats a, floats b, floats c) {
    return FLOATS(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
INLINE floats floats_from_integers(integers a) { return FLOATS(_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)); }
INLINE floats floats_from_bytes(const uint8_t *from) {
    __m128i all = _mm_loadu_si128((const void *)from);
    return floats_from_integers(INTEGERS(_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))));
}
INLINE floats floats_from_bfloat16(const void *from) {
    const __m128i *halves = from;
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1));
    return FLOATS(_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}
INLINE __m256i bfloat16_bits(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
}
INLINE void floats_to_bfloat16(void *to, floats a) {
    __m256i mixed = _mm256_packus_epi32(bfloat16_bits(a.low), bfloat16_bits(a.high));
    _mm256_storeu_si256(to, _mm256_permute4x64_epi64(mixed, 0xd8));
}

INLINE integers integers_zero(void) { return INTEGERS(_mm256_setzero_si256(), _mm256_setzero_si256()); }
INLINE integers integers_all(int32_t x) { return INTEGERS(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE integers integers_add(integers a, integers b) {
    return INTEGERS(_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high));
}
INLINE integers integers_max(integers a, integers b) {
    return INTEGERS(_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high));
}
INLINE integers integers_shifted_left_8(integers a) {
    return INTEGERS(_mm256_slli_epi32(a.low, 8), _mm256_slli_epi32(a.high, 8));
}
INLINE integers integers_shifted_right_8(integers a) {
    return INTEGERS(_mm256_srai_epi32(a.low, 8), _mm256_srai_epi32(a.high, 8));
}
INLINE integers integers_rounded(floats a) { return INTEGERS(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)); }
INLINE integers integers_mul(integers a, int32_t x) {
    return INTEGERS(_mm256_mullo_epi32(a.low, _mm256_set1_epi32(x)), _mm256_mullo_epi32(a.high, _mm256_set1_epi32(x)));
}
INLINE uint32_t exceeding_of_half(__m256i a, int32_t limit) {
    __m256i exceeding = _mm256_cmpgt_epi32(_mm256_abs_epi32(a), _mm256_set1_epi32(limit));
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(exceeding));
}
INLINE uint32_t integers_exceeding(integers a, int32_t limit) {
    return exceeding_of_half(a.low, limit) | exceeding_of_half(a.high, limit) << 8;
}
INLINE integers integers_within(integers a, int32_t limit) {
    __m256i most = _mm256_set1_epi32(limit), least = _mm256_set1_epi32(-limit);
    return INTEGERS(_mm256_max_epi32(_mm256_min_epi32(a.low, most), least),
                    _mm256_max_epi32(_mm256_min_epi32(a.high, most), least));
}
INLINE int32_t integers_max_of(integers a) {
    int32_t each[OUTPUTS], most = 0;
    memcpy(each, &a, sizeof(each));
    for (int i = 0; i < OUTPUTS; ++i) most = each[i] > most ? each[i] : most;
    return most;
}
INLINE int32_t integers_sum_of(integers a) {
    int32_t each[OUTPUTS], sum = 0;
    memcpy(each, &a, sizeof(each));
    for (int i = 0; i < OUTPUTS; ++i) sum += each[i];
    return sum;
}
INLINE integers magnitude_bits(floats a) {
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i low = _mm256_castps_si256(a.low), high = _mm256_castps_si256(a.high);
    return INTEGERS(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
}
INLINE void store_low_bytes(int8_t *to, integers a) {
    __m256i mask = _mm256_set1_epi32(255);
    __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask));
    __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
    _mm_storeu_si128((void *)to, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

INLINE bytes bytes_load(const void *from) {
    const __m256i *halves = from;
    return (bytes){_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
INLINE integers bytes_of(bytes a, int input) {
    __m128i bits = _mm_cvtsi32_si128(8 * input);
    __m256i low = _mm256_srl_epi32(a.low, bits), high = _mm256_srl_epi32(a.high, bits), mask = _mm256_set1_epi32(255);
    return INTEGERS(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
}
INLINE bytes lower_halves(bytes a) {
    __m256i mask = _mm256_set1_epi8(15);
    return (bytes){_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
INLINE bytes upper_halves(bytes a) {
    return lower_halves((bytes){_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)});
}
INLINE word word_load(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    __m256i inputs = _mm256_set1_epi32(four);
    return (word){_mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8), _mm256_srai_epi16(inputs, 8)};
}
INLINE __m256i dot_half(__m256i sums, __m256i weights, word inputs) {
    __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(weights, 8);
    __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, inputs.even), _mm256_madd_epi16(odd, inputs.odd));
    return _mm256_add_epi32(sums, products);
}
INLINE integers dot(integers sums, bytes weights, word inputs) {
    return INTEGERS(dot_half(sums.low, weights.low, inputs), dot_half(sums.high, weights.high, inputs));
}
