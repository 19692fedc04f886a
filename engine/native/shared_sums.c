#define _GNU_SOURCE /* for ppoll */
#include "shared_sums.h"

#if defined(__linux__)
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE __builtin_ia32_pause
#else
#define PAUSE() ((void)0)
#endif

#define SPINS 2000      /* iterations before another process may have the core */
#define BUSY_NS 1000000 /* time of waiting before naps */
#define NAP_NS 50000
#define LATE (-1)
#define GONE (-2)

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t round; /* the last round that the rank has written */
} Said;

int32_t shared_sums_version(void) { return SHARED_SUMS_VERSION; }

int64_t shared_sums_bytes(int32_t size, int64_t slot_bytes) { return size * (sizeof(Said) + 2 * slot_bytes); }

static Said *said_by(const SharedSums *sums, int32_t rank) { return (Said *)sums->memory + rank; }

static uint8_t *slot_of(const SharedSums *sums, int32_t rank) {
    int64_t number = 2 * rank + (int64_t)(sums->round & 1);
    return sums->memory + sums->size * sizeof(Said) + number * sums->slot_bytes;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int has_said(const SharedSums *sums, int32_t rank) {
    return atomic_load_explicit(&said_by(sums, rank)->round, memory_order_acquire) >= sums->round;
}

/* Sleeps for a while, at most until a rank ends; returns whether one has. */
static int has_lost_one(const SharedSums *sums) {
    struct pollfd peers[MOST_RANKS];
    for (int32_t rank = 0; rank < sums->size; ++rank) peers[rank] = (struct pollfd){sums->peers[rank], POLLIN, 0};
    struct timespec nap = {0, NAP_NS};
    return ppoll(peers, (nfds_t)sums->size, &nap, NULL) > 0;
}

static int32_t wait_for(const SharedSums *sums, int32_t rank) {
    for (int32_t spin = 0; spin < SPINS; ++spin) {
        if (has_said(sums, rank)) return 0;
        PAUSE();
    }
    int64_t began_ns = now_ns();
    while (!has_said(sums, rank)) {
        int64_t waited_ns = now_ns() - began_ns;
        if (waited_ns < BUSY_NS) {
            sched_yield();
        } else if (waited_ns > sums->patience_ns) {
            return LATE;
        } else if (has_lost_one(sums) && !has_said(sums, rank)) {
            return GONE;
        }
    }
    return 0;
}

/* Begins a round by publishing num_bytes bytes, and waits until all ranks have published theirs. */
static int32_t meet(SharedSums *sums, const uint8_t *given, int64_t num_bytes) {
    if (sums->failed) return sums->failed;
    ++sums->round;
    memcpy(slot_of(sums, sums->rank), given, (size_t)num_bytes);
    atomic_store_explicit(&said_by(sums, sums->rank)->round, sums->round, memory_order_release);
    for (int32_t rank = 0; rank < sums->size && !sums->failed; ++rank)
        if (rank != sums->rank) sums->failed = wait_for(sums, rank);
    return sums->failed;
}

static float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even. */
static uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static void add_floats(float *restrict total, const float *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; ++i) total[i] += other[i];
}

static void add_halves(uint16_t *restrict total, const uint16_t *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; ++i) total[i] = rounded(widened(total[i]) + widened(other[i]));
}

int32_t shared_sums_add(SharedSums *sums, const void *given, int64_t count, int32_t element, int64_t first,
                        int64_t end, void *added) {
    int64_t width = element == 0 ? sizeof(float) : sizeof(uint16_t), most = sums->slot_bytes / width;
    for (int64_t begin = 0; begin < count; begin += most) {
        int64_t stop = begin + most < count ? begin + most : count;
        int32_t failed = meet(sums, (const uint8_t *)given + begin * width, (stop - begin) * width);
        if (failed) return failed;
        int64_t from = begin > first ? begin : first, to = stop < end ? stop : end;
        if (from >= to) continue;
        uint8_t *total = (uint8_t *)added + (from - first) * width;
        memcpy(total, slot_of(sums, 0) + (from - begin) * width, (size_t)((to - from) * width));
        for (int32_t rank = 1; rank < sums->size; ++rank) {
            const uint8_t *other = slot_of(sums, rank) + (from - begin) * width;
            if (element == 0) add_floats((float *)total, (const float *)other, to - from);
            else add_halves((uint16_t *)total, (const uint16_t *)other, to - from);
        }
    }
    return 0;
}

int32_t shared_sums_gather(SharedSums *sums, const void *given, const int64_t *bytes, void *gathered) {
    int64_t longest = 0;
    for (int32_t rank = 0; rank < sums->size; ++rank)
        if (bytes[rank] > longest) longest = bytes[rank];
    int64_t own = bytes[sums->rank];
    for (int64_t begin = 0; begin < longest; begin += sums->slot_bytes) {
        int64_t stop = begin + sums->slot_bytes;
        int64_t num_given = own < begin ? 0 : (own < stop ? own : stop) - begin;
        int32_t failed = meet(sums, (const uint8_t *)given + (num_given ? begin : 0), num_given);
        if (failed) return failed;
        if (gathered == NULL) continue;
        uint8_t *place = (uint8_t *)gathered;
        for (int32_t rank = 0; rank < sums->size; place += bytes[rank++]) {
            int64_t to = bytes[rank] < stop ? bytes[rank] : stop;
            if (to > begin) memcpy(place + begin, slot_of(sums, rank), (size_t)(to - begin));
        }
    }
    return 0;
}

/* One unit: the ranks meet once. */
typedef struct {
    SharedSums *sums;
    void *rows;
    int64_t num_columns;
    int64_t num_elements;
    int32_t element;
} SumData;

_Static_assert(sizeof(SumData) <= DATA_BYTES, "an operation has no room for it");

static int32_t begin_sum(Operation *operation, int32_t num_rows) {
    SumData *data = (SumData *)operation->data;
    data->num_elements = num_rows * data->num_columns;
    operation->num_units = 1;
    return 0;
}

static void compute_sum(const Operation *operation, Units units, int32_t thread) {
    (void)units;
    (void)thread;
    const SumData *data = (const SumData *)operation->data;
    shared_sums_add(data->sums, data->rows, data->num_elements, data->element, 0, data->num_elements, data->rows);
}

static const OperationKind sum_over_ranks = {begin_sum, compute_sum, NULL};

int32_t shared_sums_record(Program *program, SharedSums *sums, void *rows, int64_t num_columns, int32_t element) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    operation->kind = &sum_over_ranks;
    *(SumData *)operation->data = (SumData){.sums = sums, .rows = rows, .num_columns = num_columns, .element = element};
    return 0;
}
#endif
