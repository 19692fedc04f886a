/* Samples a token of a row; a part of ops_kernel.h.
 *
 * No row is sorted. How many weights, or how much of their mass, is at least some number falls as the number grows, in
 * float32 too. So the last weight that stays is found by halving the bits between which it lies, each time with one
 * pass over those that can still be it.
 */
#define GROUP (NUM_SUMS * LANES) /* weights that are read at once */

_Static_assert(GROUP <= MOST_GROUP && SAMPLE_CHUNK % GROUP == 0, "a chunk is of whole groups");

typedef struct {
    int64_t num_chunks;
    float *weights;    /* [num_chunks, SAMPLE_CHUNK]: of the tokens, relative to the likeliest; zeros beyond the end */
    float *maxima;     /* [num_chunks], of each chunk; zeros beyond the end */
    double *masses;    /* [num_chunks], of what stays */
    float *candidates; /* as many as weights, and a group */
} Weighed;

INLINE float number_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE int64_t whole_groups(int64_t num) { return (num + GROUP - 1) / GROUP * GROUP; }

INLINE Weighed laid_out(uint8_t *scratch, int64_t num_columns) {
    int64_t num_chunks = (num_columns + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    double *masses = (double *)scratch;
    float *weights = (float *)(masses + num_chunks), *candidates = weights + num_chunks * SAMPLE_CHUNK;
    return (Weighed){num_chunks, weights, candidates + num_chunks * SAMPLE_CHUNK + GROUP, masses, candidates};
}

/* Of weights of at least `least` their number or their mass; of up to a chunk, in whole groups. */
INLINE double total_from(const float *weights, int64_t num, vec least, int counts) {
    vec a = vec_zero(), b = a, c = a, d = a, one = vec_all(1.0f);
    for (const float *end = weights + num; weights < end; weights += GROUP) {
        vec first = vec_load(weights), second = vec_load(weights + LANES);
        vec third = vec_load(weights + 2 * LANES), fourth = vec_load(weights + 3 * LANES);
        a = vec_add(a, vec_where_reached(first, least, counts ? one : first));
        b = vec_add(b, vec_where_reached(second, least, counts ? one : second));
        c = vec_add(c, vec_where_reached(third, least, counts ? one : third));
        d = vec_add(d, vec_where_reached(fourth, least, counts ? one : fourth));
    }
    return vec_sum_of(vec_add(vec_add(a, b), vec_add(c, d)));
}

/* The largest number, from `from` to 1, that enough of the weights reach; `from`, if none is. */
INLINE float last_within(const float *weights, int64_t num, double enough, float from, int counts) {
    uint32_t low = bits_of(from), high = bits_of(1.0f) + 1;
    while (low + 1 < high) {
        uint32_t middle = low + (high - low) / 2;
        vec least = vec_all(number_of(middle));
        double total = 0;
        for (int64_t first = 0; first < num; first += SAMPLE_CHUNK)
            total += total_from(weights + first, num - first < SAMPLE_CHUNK ? num - first : SAMPLE_CHUNK, least, counts);
        if (total >= enough) low = middle;
        else high = middle;
    }
    return number_of(low);
}

INLINE void weigh_as(int32_t element, const SamplingBatch *op, const Sampling *sampling, Weighed *row, float highest) {
    const uint8_t *logits = op->rows + sampling->row * op->stride;
    double most = 3e38, factor = (double)LOG2_E / sampling->temperature;
    vec scale = vec_all((float)(factor < most ? factor : most)), lowered = vec_all(-highest);
    for (int64_t chunk = 0; chunk < row->num_chunks; ++chunk) {
        int64_t first = chunk * SAMPLE_CHUNK, left = op->num_columns - first;
        float *weights = row->weights + first;
        const uint8_t *from = logits + first * bytes_of(element);
        int32_t num = left < SAMPLE_CHUNK ? (int32_t)left : SAMPLE_CHUNK;
        vec top = vec_zero();
        for (int32_t at = 0; at < num; at += LANES)
            vec_store(weights + at, vec_exp2(vec_mul(vec_add(read(element, from, at, num), lowered), scale)));
        memset(weights + num, 0, (size_t)(SAMPLE_CHUNK - num) * sizeof(float));
        for (int32_t at = 0; at < num; at += LANES) top = vec_max(top, vec_load(weights + at));
        row->maxima[chunk] = vec_max_of(top);
    }
    for (int64_t chunk = row->num_chunks; chunk < whole_groups(row->num_chunks); ++chunk) row->maxima[chunk] = 0;
}

/* The mass of all weights of at least `least`, and of those of each chunk. */
static double add_masses(Weighed *row, float least) {
    double mass = 0;
    vec reached = vec_all(least);
    for (int64_t chunk = 0; chunk < row->num_chunks; ++chunk) {
        const float *weights = row->weights + chunk * SAMPLE_CHUNK;
        row->masses[chunk] = row->maxima[chunk] >= least ? total_from(weights, SAMPLE_CHUNK, reached, 0) : 0;
        mass += row->masses[chunk];
    }
    return mass;
}

/* Makes the weights of at least `least` the candidates; gives their number, in whole groups. */
static int64_t gather(Weighed *row, float least) {
    int64_t num = 0;
    vec reached = vec_all(least);
    for (int64_t chunk = 0; chunk < row->num_chunks; ++chunk) {
        const float *weights = row->weights + chunk * SAMPLE_CHUNK;
        if (row->maxima[chunk] < least) continue;
        for (int32_t at = 0; at < SAMPLE_CHUNK; at += LANES)
            num += vec_append(row->candidates + num, vec_load(weights + at), reached);
    }
    memset(row->candidates + num, 0, (size_t)(whole_groups(num) - num) * sizeof(float));
    return whole_groups(num);
}

/* The top_k-th largest weight, or `least` if that is larger. It is no less than the top_k-th of the chunks' largest. */
static float least_of_top(Weighed *row, int64_t top_k, float least) {
    if (top_k <= row->num_chunks)
        least = last_within(row->maxima, whole_groups(row->num_chunks), (double)top_k, least, 1);
    return last_within(row->candidates, gather(row, least), (double)top_k, least, 1);
}

/* The least weight of the likeliest tokens that hold top_p of the mass of what reaches `least`. All weights below the
 * cut together are no more than the rest of the mass. */
static float nucleus_edge(Weighed *row, double top_p, double mass, float least) {
    float cut = (float)((1 - top_p) * mass / (double)(row->num_chunks * SAMPLE_CHUNK));
    if (cut > least) least = cut;
    return last_within(row->candidates, gather(row, least), top_p * mass, least, 0);
}

/* The first token up to which the masses exceed `target`; the last that stays, if rounding leaves none. */
static int64_t token_at(const Weighed *row, double target, float least) {
    double before = 0, passed = 0;
    int64_t chosen = 0;
    for (int64_t chunk = 0; chunk < row->num_chunks && passed <= target; ++chunk) {
        if (row->masses[chunk] == 0) continue;
        chosen = chunk;
        before = passed;
        passed += row->masses[chunk];
    }
    int64_t token = chosen * SAMPLE_CHUNK;
    for (int64_t at = token, end = at + SAMPLE_CHUNK; at < end && before <= target; ++at) {
        if (row->weights[at] < least) continue;
        token = at;
        before += row->weights[at];
    }
    return token;
}

static void sample(const SamplingBatch *op, int64_t index, uint8_t *scratch) {
    const Sampling *sampling = &op->samplings[index];
    Weighed row = laid_out(scratch, op->num_columns);
    float highest = op->highest[sampling->row], least = fminf(fmaxf((float)sampling->min_p, FLT_MIN), 1.0f);
    if (!isfinite(highest)) { /* nothing may come, or the model is broken */
        op->tokens[index] = op->num_columns - 1;
        op->masses[index] = NAN;
        return;
    }
    if (op->element == BFLOAT16) weigh_as(BFLOAT16, op, sampling, &row, highest);
    else weigh_as(FLOAT32, op, sampling, &row, highest);
    if (sampling->top_k > 0 && sampling->top_k < op->num_columns) least = least_of_top(&row, sampling->top_k, least);
    double mass = add_masses(&row, least);
    if (sampling->top_p < 1) {
        least = nucleus_edge(&row, sampling->top_p, mass, least);
        mass = add_masses(&row, least);
    }
    op->masses[index] = mass;
    op->tokens[index] = token_at(&row, sampling->number * mass, least);
}
