/* Vectors of 8 float32 with AVX2, FMA and F16C. */
#include <immintrin.h>

#define LANES 8
#define BLOCK_ROWS 6
#define BLOCK_VECTORS 2
#define SCORE_ROWS 3
#define SPLIT_HEADS 2
#define FOURS 1
#define HAS_FLOAT16 1

typedef __m256 vec;

INLINE vec vec_zero(void) { return _mm256_setzero_ps(); }
INLINE vec vec_all(float x) { return _mm256_set1_ps(x); }
INLINE vec vec_load(const void *from) { return _mm256_loadu_ps(from); }
INLINE void vec_store(void *to, vec a) { _mm256_storeu_ps(to, a); }
INLINE vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_bits(__m256i a) { return _mm256_castsi256_ps(a); }

INLINE float vec_sum_of(vec a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float vec_max_of(vec a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE vec vec_all_words(const void *from) { return _mm256_broadcast_ss(from); }

INLINE vec vec_from_bfloat16(const void *from) {
    return vec_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16));
}

/* Of words that are pairs of bfloat16. */
INLINE vec vec_first_of_pairs(vec a) { return vec_bits(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
INLINE vec vec_second_of_pairs(vec a) {
    return vec_bits(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32((int)0xffff0000)));
}

INLINE void vec_to_bfloat16(void *to, vec a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
    rounded = _mm256_srli_epi32(rounded, 16);
    _mm_storeu_si128(to, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

INLINE vec vec_from_float16(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }
INLINE void vec_to_float16(void *to, vec a) { _mm_storeu_si128(to, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
INLINE vec vec_from_int8(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))); }

INLINE vec vec_from_fp8(const void *from) {
    __m256i bits = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from));
    __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32((int)0x80000000));
    __m256i rest = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f)), 20);
    return vec_mul(vec_bits(_mm256_or_si256(sign, rest)), vec_all(FP8_UNIT));
}

/* 2^x for x <= 0; below 2^-126 it is 0. */
INLINE vec vec_exp2(vec x) {
    x = _mm256_max_ps(vec_all(-127.0f), x); /* in this order a NaN stays */
    vec whole = _mm256_floor_ps(x);
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return vec_mul(exp2_fraction(_mm256_sub_ps(x, whole)), vec_bits(_mm256_slli_epi32(exponent, 23)));
}

/* b where a reaches `least`, else 0. */
INLINE vec vec_where_reached(vec a, vec least, vec b) { return _mm256_and_ps(_mm256_cmp_ps(a, least, _CMP_GE_OQ), b); }

/* Writes what reaches `least`, and up to a whole vector; gives its number. */
INLINE int vec_append(float *to, vec a, vec least) {
    int reached = _mm256_movemask_ps(_mm256_cmp_ps(a, least, _CMP_GE_OQ)), num = 0;
    float all[LANES];
    if (!reached) return 0;
    vec_store(all, a);
    for (int i = 0; i < LANES; ++i) {
        to[num] = all[i];
        num += reached >> i & 1;
    }
    return num;
}

INLINE vec vec_all_fours(const void *from) { return _mm256_broadcast_ps(from); }

/* Of rows 0 and 4 four words each. */
INLINE void load_fours(const uint8_t *const *rows, int64_t offset, vec *fours) {
    vec first = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(rows[0] + offset)));
    fours[0] = _mm256_insertf128_ps(first, _mm_loadu_ps((const float *)(rows[4] + offset)), 1);
}

/* Sums of neighbours: in each 128 bits two of a, then two of b. */
INLINE vec vec_sums_of_two(vec a, vec b) { return _mm256_hadd_ps(a, b); }
