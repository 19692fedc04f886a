/* Vectors of 16 float32 with AVX-512 F, BW, DQ and VL; with BF16 where AVX512_BF16 is said to be there. */
#include <immintrin.h>

#define LANES 16
#ifndef BLOCK_ROWS
#define BLOCK_ROWS 6    /* rows and vectors of a product that stays in registers */
#endif
#define BLOCK_VECTORS 4
#define SCORE_ROWS 6    /* rows whose sums for LANES keys stay in registers */
#define SPLIT_HEADS 4   /* heads of a split whose sums do */
#define FOURS 2         /* vectors that load_fours gives */
#define HAS_FLOAT16 1

typedef __m512 vec;

INLINE vec vec_zero(void) { return _mm512_setzero_ps(); }
INLINE vec vec_all(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_load(const void *from) { return _mm512_loadu_ps(from); }
INLINE void vec_store(void *to, vec a) { _mm512_storeu_ps(to, a); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE float vec_sum_of(vec a) { return _mm512_reduce_add_ps(a); }
INLINE float vec_max_of(vec a) { return _mm512_reduce_max_ps(a); }

INLINE vec vec_bits(__m512i a) { return _mm512_castsi512_ps(a); }

INLINE vec vec_all_words(const void *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return vec_bits(_mm512_set1_epi32(word));
}

INLINE vec vec_from_bfloat16(const void *from) {
    return vec_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
}

/* Of words that are pairs of bfloat16. */
INLINE vec vec_first_of_pairs(vec a) { return vec_bits(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
INLINE vec vec_second_of_pairs(vec a) {
    return vec_bits(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000)));
}

INLINE void vec_to_bfloat16(void *to, vec a) {
#ifdef HAS_BF16
    _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh(a));
#else
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

INLINE vec vec_from_float16(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
INLINE void vec_to_float16(void *to, vec a) { _mm256_storeu_si256(to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
INLINE vec vec_from_int8(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))); }

INLINE vec vec_from_fp8(const void *from) {
    __m512i bits = _mm512_cvtepi8_epi32(_mm_loadu_si128(from));
    __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000));
    __m512i rest = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7f)), 20);
    return vec_mul(vec_bits(_mm512_or_si512(sign, rest)), vec_all(FP8_UNIT));
}

/* 2^x for x <= 0; the polynomial is 2^f on [0, 1). */
INLINE vec vec_exp2(vec x) {
    vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_fraction(f), x);
}

/* b where a reaches `least`, else 0. */
INLINE vec vec_where_reached(vec a, vec least, vec b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, least, _CMP_GE_OQ), b);
}

/* Writes what reaches `least`, and up to a whole vector; gives its number. */
INLINE int vec_append(float *to, vec a, vec least) {
    __mmask16 reached = _mm512_cmp_ps_mask(a, least, _CMP_GE_OQ);
    vec_store(to, _mm512_maskz_compress_ps(reached, a)); /* compressing into memory is slow on some */
    return __builtin_popcount(reached);
}

INLINE vec vec_all_fours(const void *from) { return _mm512_broadcast_f32x4(_mm_loadu_ps(from)); }

/* Of rows 0, 4, 8 and 12 four words each, and then the next four. */
INLINE void load_fours(const uint8_t *const *rows, int64_t offset, vec *fours) {
    __m512d a = _mm512_castpd256_pd512(_mm256_loadu_pd((const double *)(rows[0] + offset)));
    __m512d b = _mm512_castpd256_pd512(_mm256_loadu_pd((const double *)(rows[8] + offset)));
    vec first = _mm512_castpd_ps(_mm512_insertf64x4(a, _mm256_loadu_pd((const double *)(rows[4] + offset)), 1));
    vec second = _mm512_castpd_ps(_mm512_insertf64x4(b, _mm256_loadu_pd((const double *)(rows[12] + offset)), 1));
    fours[0] = _mm512_shuffle_f32x4(first, second, 0x88);
    fours[1] = _mm512_shuffle_f32x4(first, second, 0xdd);
}

/* Sums of neighbours: in each 128 bits two of a, then two of b. */
INLINE vec vec_sums_of_two(vec a, vec b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

#ifdef HAS_BF16
/* The elements of two rows side by side: 2 * LANES of each become two vectors of words. */
INLINE void interleave(vec first, vec second, vec *words) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    words[0] = vec_bits(_mm512_permutex2var_epi16(_mm512_castps_si512(first), low, _mm512_castps_si512(second)));
    words[1] = vec_bits(_mm512_permutex2var_epi16(_mm512_castps_si512(first), high, _mm512_castps_si512(second)));
}

INLINE vec vec_dot_pairs(vec sum, vec a, vec b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#endif
