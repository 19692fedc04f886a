/* Vectors of 4 float32 in the compiler's own terms: SSE2, NEON or whatever the machine has. */

#define LANES 4
#define BLOCK_ROWS 4
#define BLOCK_VECTORS 2
#define SCORE_ROWS 2
#define SPLIT_HEADS 2
#define FOURS 1
#define HAS_FLOAT16 0

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));

INLINE vec vec_all(float x) { return (vec){x, x, x, x}; }
INLINE vec vec_zero(void) { return vec_all(0.0f); }
INLINE vec vec_add(vec a, vec b) { return a + b; }
INLINE vec vec_mul(vec a, vec b) { return a * b; }
INLINE vec vec_choose(ints is_first, vec a, vec b) { return (vec)((is_first & (ints)a) | (~is_first & (ints)b)); }
INLINE vec vec_max(vec a, vec b) { return vec_choose(a > b, a, b); }

/* a * b + c, rounded once where the machine can */
INLINE vec vec_fma(vec a, vec b, vec c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE float vec_sum_of(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }

INLINE float vec_max_of(vec a) {
    float low = a[0] > a[2] ? a[0] : a[2], high = a[1] > a[3] ? a[1] : a[3];
    return low > high ? low : high;
}

INLINE vec vec_load(const void *from) {
    vec a;
    memcpy(&a, from, sizeof(a));
    return a;
}

INLINE void vec_store(void *to, vec a) { memcpy(to, &a, sizeof(a)); }

INLINE vec vec_all_words(const void *from) {
    float x;
    memcpy(&x, from, 4);
    return vec_all(x);
}

INLINE vec vec_from_bfloat16(const void *from) {
    uint16_t a[4];
    memcpy(a, from, sizeof(a));
    return (vec)((ints){a[0], a[1], a[2], a[3]} << 16);
}

INLINE void vec_to_bfloat16(void *to, vec a) {
    ints rounded = (ints)a + (((ints)a >> 16) & 1) + 0x7fff;
    rounded = (ints)vec_choose(a == a, (vec)rounded, (vec)((ints){0} + 0x7fc00000)) >> 16;
    uint16_t narrow[4] = {(uint16_t)rounded[0], (uint16_t)rounded[1], (uint16_t)rounded[2], (uint16_t)rounded[3]};
    memcpy(to, narrow, sizeof(narrow));
}

INLINE ints ints_from_int8(const void *from) {
    int8_t a[4];
    memcpy(a, from, sizeof(a));
    return (ints){a[0], a[1], a[2], a[3]};
}

INLINE vec vec_from_int8(const void *from) { return __builtin_convertvector(ints_from_int8(from), vec); }

INLINE vec vec_from_fp8(const void *from) {
    ints bits = ints_from_int8(from);
    return (vec)((bits & INT32_MIN) | ((bits & 0x7f) << 20)) * FP8_UNIT;
}

/* 2^x for x <= 0; below 2^-126 it is 0. */
INLINE vec vec_exp2(vec x) {
    vec clamped = vec_choose(x < -127.0f, vec_all(-127.0f), x);
    ints is_number = clamped == clamped;
    ints whole = __builtin_convertvector(vec_choose(is_number, clamped, vec_zero()), ints);
    whole += (__builtin_convertvector(whole, vec) > clamped); /* truncated to floor: true is -1 */
    return exp2_fraction(clamped - __builtin_convertvector(whole, vec)) * (vec)((whole + 127) << 23);
}

/* b where a reaches `least`, else 0. */
INLINE vec vec_where_reached(vec a, vec least, vec b) { return (vec)((a >= least) & (ints)b); }

/* Writes what reaches `least`, and up to a whole vector; gives its number. */
INLINE int vec_append(float *to, vec a, vec least) {
    int num = 0;
    for (int i = 0; i < LANES; ++i) {
        to[num] = a[i];
        num += a[i] >= least[i];
    }
    return num;
}

INLINE vec vec_all_fours(const void *from) { return vec_load(from); }

/* Four words of a row. */
INLINE void load_fours(const uint8_t *const *rows, int64_t offset, vec *fours) { fours[0] = vec_load(rows[0] + offset); }

/* Sums of neighbours: two of a, then two of b. */
INLINE vec vec_sums_of_two(vec a, vec b) { return (vec){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }
