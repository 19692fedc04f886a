/* AVX-512 F, BW, DQ, VL and VNNI. */
#include <immintrin.h>

#define BYTE_ROWS 6
#define BYTE_VECTORS 4

typedef __m512 floats;
typedef __m512i integers, bytes, word;

INLINE floats floats_all(float x) { return _mm512_set1_ps(x); }
INLINE floats floats_load(const void *from) { return _mm512_loadu_ps(from); }
INLINE void floats_store(void *to, floats a) { _mm512_storeu_ps(to, a); }
INLINE floats floats_add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats floats_mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats floats_fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats floats_from_integers(integers a) { return _mm512_cvtepi32_ps(a); }
INLINE floats floats_from_bytes(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
}
INLINE floats floats_from_bfloat16(const void *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
}
INLINE void floats_to_bfloat16(void *to, floats a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

INLINE integers integers_zero(void) { return _mm512_setzero_si512(); }
INLINE integers integers_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE integers integers_add(integers a, integers b) { return _mm512_add_epi32(a, b); }
INLINE integers integers_max(integers a, integers b) { return _mm512_max_epi32(a, b); }
INLINE integers integers_load(const void *from) { return _mm512_loadu_si512(from); }
INLINE integers integers_shifted_left_8(integers a) { return _mm512_slli_epi32(a, 8); }
INLINE integers integers_shifted_right_8(integers a) { return _mm512_srai_epi32(a, 8); }
INLINE integers integers_rounded(floats a) { return _mm512_cvtps_epi32(a); }
INLINE integers integers_mul(integers a, int32_t x) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(x)); }
INLINE uint32_t integers_exceeding(integers a, int32_t limit) {
    uint32_t mask = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(a), _mm512_set1_epi32(limit));
    __asm__("" : "+r"(mask));  // GCC 12 may keep 16 bits of it in memory, and read 32 back
    return mask;
}
INLINE integers integers_within(integers a, int32_t limit) {
    return _mm512_max_epi32(_mm512_min_epi32(a, _mm512_set1_epi32(limit)), _mm512_set1_epi32(-limit));
}
INLINE int32_t integers_max_of(integers a) { return _mm512_reduce_max_epi32(a); }
INLINE int32_t integers_sum_of(integers a) { return _mm512_reduce_add_epi32(a); }
INLINE integers magnitude_bits(floats a) {
    return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff));
}
INLINE void store_low_bytes(int8_t *to, integers a) { _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(a)); }

INLINE bytes bytes_load(const void *from) { return _mm512_loadu_si512(from); }
INLINE integers bytes_of(bytes a, int input) {
    return _mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(8 * input)), _mm512_set1_epi32(255));
}
INLINE bytes lower_halves(bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE bytes upper_halves(bytes a) { return lower_halves(_mm512_srli_epi16(a, 4)); }
INLINE word word_load(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}
/* Not by the intrinsic, around which GCC moves every sum from one register to another and back. */
INLINE integers dot(integers sums, bytes weights, word inputs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));
    return sums;
}
