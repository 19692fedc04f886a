/* C for any CPU. */
#define EACH for (int i = 0; i < OUTPUTS; ++i)

typedef struct { float at[OUTPUTS]; } floats;
typedef struct { int32_t at[OUTPUTS]; } integers;
typedef struct { uint8_t at[(OUTPUTS * DEPTH)]; } bytes;
typedef struct { int8_t at[DEPTH]; } word;

INLINE floats floats_all(float x) { floats a; EACH a.at[i] = x; return a; }
INLINE floats floats_load(const void *from) { floats a; memcpy(&a, from, sizeof(a)); return a; }
INLINE void floats_store(void *to, floats a) { memcpy(to, &a, sizeof(a)); }
INLINE floats floats_add(floats a, floats b) { EACH a.at[i] += b.at[i]; return a; }
INLINE floats floats_mul(floats a, floats b) { EACH a.at[i] *= b.at[i]; return a; }
INLINE floats floats_fma(floats a, floats b, floats c) { EACH c.at[i] += a.at[i] * b.at[i]; return c; }
INLINE floats floats_from_bytes(const uint8_t *from) { floats a; EACH a.at[i] = from[i]; return a; }

INLINE integers integers_all(int32_t x) { integers a; EACH a.at[i] = x; return a; }
INLINE integers integers_zero(void) { return integers_all(0); }
INLINE integers integers_add(integers a, integers b) { EACH a.at[i] += b.at[i]; return a; }
INLINE integers integers_max(integers a, integers b) { EACH a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i]; return a; }
INLINE integers integers_shifted_left_8(integers a) { EACH a.at[i] = (int32_t)((uint32_t)a.at[i] << 8); return a; }
INLINE integers integers_shifted_right_8(integers a) { EACH a.at[i] >>= 8; return a; }
INLINE integers integers_rounded(floats a) { integers b; EACH b.at[i] = (int32_t)lrintf(a.at[i]); return b; }
INLINE integers integers_mul(integers a, int32_t x) { EACH a.at[i] *= x; return a; }
INLINE uint32_t integers_exceeding(integers a, int32_t limit) {
    uint32_t exceeding = 0;
    EACH exceeding |= (uint32_t)(abs(a.at[i]) > limit) << i;
    return exceeding;
}
INLINE integers integers_within(integers a, int32_t limit) {
    EACH a.at[i] = a.at[i] > limit ? limit : a.at[i] < -limit ? -limit : a.at[i];
    return a;
}
INLINE int32_t integers_max_of(integers a) { int32_t b = 0; EACH b = a.at[i] > b ? a.at[i] : b; return b; }
INLINE int32_t integers_sum_of(integers a) { int32_t b = 0; EACH b += a.at[i]; return b; }
INLINE floats floats_from_integers(integers a) { floats b; EACH b.at[i] = (float)a.at[i]; return b; }
INLINE void store_low_bytes(int8_t *to, integers a) { EACH to[i] = (int8_t)(uint8_t)(a.at[i] & 255); }

INLINE integers integers_of_bits(floats a) { integers b; memcpy(&b, &a, sizeof(b)); return b; }
INLINE integers magnitude_bits(floats a) { integers b = integers_of_bits(a); EACH b.at[i] &= 0x7fffffff; return b; }
INLINE floats floats_from_bfloat16(const void *from) {
    uint16_t upper[OUTPUTS];
    uint32_t bits[OUTPUTS];
    memcpy(upper, from, sizeof(upper));
    EACH bits[i] = (uint32_t)upper[i] << 16;
    return floats_load(bits);
}
INLINE void floats_to_bfloat16(void *to, floats a) {
    integers bits = integers_of_bits(a);
    uint16_t upper[OUTPUTS];
    EACH {
        uint32_t each = (uint32_t)bits.at[i];
        int is_nan = (each & 0x7fffffff) > INFINITE_BITS;
        upper[i] = is_nan ? 0x7fc0 : (uint16_t)((each + 0x7fff + (each >> 16 & 1)) >> 16);
    }
    memcpy(to, upper, sizeof(upper));
}

INLINE bytes bytes_load(const void *from) { bytes a; memcpy(&a, from, sizeof(a)); return a; }
INLINE integers bytes_of(bytes a, int input) { integers b; EACH b.at[i] = a.at[DEPTH * i + input]; return b; }
INLINE bytes lower_halves(bytes a) { for (int i = 0; i < (OUTPUTS * DEPTH); ++i) a.at[i] &= 15; return a; }
INLINE bytes upper_halves(bytes a) { for (int i = 0; i < (OUTPUTS * DEPTH); ++i) a.at[i] >>= 4; return a; }
INLINE word word_load(const int8_t *from) { word a; memcpy(&a, from, sizeof(a)); return a; }
INLINE integers dot(integers sums, bytes weights, word inputs) {
    EACH for (int j = 0; j < DEPTH; ++j) sums.at[i] += weights.at[DEPTH * i + j] * inputs.at[j];
    return sums;
}
