#include "_digest.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_X86 1
#endif

#define LANES 8
#define STRIPE 64
#define MAX_THREADS 64
#define MIN_BYTES_PER_THREAD (512 * 1024)
#define AHEAD_BYTES 4096
#define MIN_AHEAD 2
#define MAX_AHEAD 16
#define FIRST_BYTES 512

/* The first 27 numbers of splitmix64 from 0, in this order: keys; factors of the first sums, made odd; factors of the
 * second sums, made even; factors of a unit's number, of the stream, and of a piece's offset, made odd. */
static const uint64_t keys[LANES] = {
    0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec,
    0x1b39896a51a8749b, 0x53cb9f0c747ea2ea, 0x2c829abe1f4532e1, 0xc584133ac916ab3c,
};
static const uint64_t first_factors[LANES] = {
    0x3ee5789041c98ac3, 0xf3b8488c368cb0a7, 0x657eecdd3cb13d09, 0xc2d326e0055bdef7,
    0x8621a03fe0bbdb7b, 0x8e1f7555983aa92f, 0xb54e0f1600cc4d19, 0x84bb3f97971d80ab,
};
static const uint64_t second_factors[LANES] = {
    0x7d29825c75521254, 0xc3cf17102b7f7f86, 0x3466e9a083914f64, 0xd81a8d2b5a4485ac,
    0xdb01602b100b9ed6, 0xa9038a921825f10c, 0xedf5f1d90dca2f6a, 0x54496ad67bd2634c,
};
#define NUMBER_FACTOR 0xdd7c01d4f5407269
#define STREAM_FACTOR 0x935e82f1db4c4f7b
#define OFFSET_FACTOR 0x69b82ebc92233301

typedef struct {
    uint64_t first[LANES], second[LANES];
} Sums;

/* A bijection: the last steps of splitmix64. */
static inline uint64_t mixed(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

static inline uint64_t folded(const Sums *sums)
{
    uint64_t value = 0;
    for (int lane = 0; lane < LANES; lane++)
        value += sums->first[lane] * first_factors[lane] + sums->second[lane] * second_factors[lane];
    return value;
}

static inline int64_t units_ahead(const Box *box)
{
    int64_t ahead = AHEAD_BYTES / box->bytes;
    return ahead < MIN_AHEAD ? MIN_AHEAD : ahead > MAX_AHEAD ? MAX_AHEAD : ahead;
}

/* One loop for each set of instructions. BEGIN makes the two accumulators, ADD takes in a stripe, END stores the sums. */
#define WALK(NAME, TARGET, BEGIN, ADD, END)                                                                            \
    TARGET static uint64_t NAME(const Job *job, const int64_t *numbers, uint64_t stream, int64_t from, int64_t to)     \
    {                                                                                                                  \
        uint64_t total = 0;                                                                                            \
        for (const Box *box = job->boxes; box < job->boxes + job->count; box++) {                                      \
            const Side *side = &box->source;                                                                           \
            int64_t run = box->run, ahead = units_ahead(box), beginning = run < FIRST_BYTES ? run : FIRST_BYTES;       \
            for (int64_t unit = from; unit < to; unit++) {                                                             \
                const char *place = unit_address(side, job->source_units[unit]);                                       \
                if (unit + ahead < to) {                                                                               \
                    const char *next = unit_address(side, job->source_units[unit + ahead]);                            \
                    for (int64_t at = 0; at < beginning; at += STRIPE)                                                 \
                        __builtin_prefetch(next + at, 0);                                                              \
                }                                                                                                      \
                uint64_t seed = (uint64_t)numbers[unit] * NUMBER_FACTOR + stream * STREAM_FACTOR;                      \
                uint64_t offset = (uint64_t)box->start;                                                                \
                for (int64_t i0 = 0; i0 < box->count0; i0++) {                                                         \
                    const char *piece = place + i0 * side->stride0;                                                    \
                    for (int64_t i1 = 0; i1 < box->count1; i1++, piece += side->stride1, offset += (uint64_t)run) {    \
                        const char *at = piece, *whole = piece + run / STRIPE * STRIPE;                                \
                        Sums sums;                                                                                     \
                        BEGIN;                                                                                         \
                        for (; at < whole; at += STRIPE)                                                               \
                            ADD(at);                                                                                   \
                        if (run % STRIPE) {                                                                            \
                            char last[STRIPE] = {0};                                                                   \
                            memcpy(last, whole, (size_t)(run % STRIPE));                                               \
                            ADD(last);                                                                                 \
                        }                                                                                              \
                        END;                                                                                           \
                        total += mixed(folded(&sums) + seed + offset * OFFSET_FACTOR);                                 \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        return total;                                                                                                  \
    }

static inline void add_stripe(Sums *sums, const char *at)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t word;
        memcpy(&word, at + 8 * lane, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        word ^= keys[lane];
        uint64_t low = (uint32_t)word, high = word >> 32;
        sums->first[lane] += low * high + ((low + high) << 32);
        sums->second[lane] += sums->first[lane];
    }
}

#define PLAIN_BEGIN memset(&sums, 0, sizeof sums)
#define PLAIN_ADD(FROM) add_stripe(&sums, FROM)
WALK(walk_plain, , PLAIN_BEGIN, PLAIN_ADD, (void)0)

#ifdef HAS_X86

#define AVX2_TERM(FROM, HALF)                                                                                          \
    do {                                                                                                               \
        __m256i word = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)(FROM) + (HALF)), key##HALF); \
        __m256i high = _mm256_srli_epi64(word, 32), low_first = _mm256_slli_epi64(word, 32);                           \
        __m256i sum = _mm256_add_epi64(low_first, _mm256_slli_epi64(high, 32));                                        \
        first##HALF = _mm256_add_epi64(first##HALF, _mm256_add_epi64(_mm256_mul_epu32(word, high), sum));              \
        second##HALF = _mm256_add_epi64(second##HALF, first##HALF);                                                    \
    } while (0)
#define AVX2_BEGIN                                                                                                     \
    const __m256i key0 = _mm256_loadu_si256((const __m256i *)keys);                                                    \
    const __m256i key1 = _mm256_loadu_si256((const __m256i *)keys + 1);                                                \
    __m256i first0 = _mm256_setzero_si256(), first1 = first0, second0 = first0, second1 = first0
#define AVX2_ADD(FROM)                                                                                                 \
    do {                                                                                                               \
        AVX2_TERM(FROM, 0);                                                                                            \
        AVX2_TERM(FROM, 1);                                                                                            \
    } while (0)
#define AVX2_END                                                                                                       \
    do {                                                                                                               \
        _mm256_storeu_si256((__m256i *)sums.first, first0);                                                            \
        _mm256_storeu_si256((__m256i *)sums.first + 1, first1);                                                        \
        _mm256_storeu_si256((__m256i *)sums.second, second0);                                                          \
        _mm256_storeu_si256((__m256i *)sums.second + 1, second1);                                                      \
    } while (0)
WALK(walk_avx2, __attribute__((target("avx2"))), AVX2_BEGIN, AVX2_ADD, AVX2_END)

#define AVX512_BEGIN                                                                                                   \
    const __m512i key = _mm512_loadu_si512(keys);                                                                      \
    __m512i first = _mm512_setzero_si512(), second = first
#define AVX512_ADD(FROM)                                                                                               \
    do {                                                                                                               \
        __m512i word = _mm512_xor_si512(_mm512_loadu_si512(FROM), key);                                                \
        __m512i high = _mm512_srli_epi64(word, 32);                                                                    \
        __m512i sum = _mm512_slli_epi64(_mm512_add_epi64(word, high), 32);                                             \
        first = _mm512_add_epi64(first, _mm512_add_epi64(_mm512_mul_epu32(word, high), sum));                          \
        second = _mm512_add_epi64(second, first);                                                                      \
    } while (0)
#define AVX512_END                                                                                                     \
    do {                                                                                                               \
        _mm512_storeu_si512(sums.first, first);                                                                        \
        _mm512_storeu_si512(sums.second, second);                                                                      \
    } while (0)
WALK(walk_avx512, __attribute__((target("avx512f"))), AVX512_BEGIN, AVX512_ADD, AVX512_END)

#endif

typedef uint64_t (*Walk)(const Job *job, const int64_t *numbers, uint64_t stream, int64_t from, int64_t to);

static const struct {
    const char *name;
    Walk walk;
} walks[] = {
#ifdef HAS_X86
    {"avx512", walk_avx512},
    {"avx2", walk_avx2},
#endif
    {"plain", walk_plain},
};

static int has(const char *name)
{
#ifdef HAS_X86
    __builtin_cpu_init();
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") != 0;
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") != 0;
#endif
    return strcmp(name, "plain") == 0;
}

static Walk walk_with(const char *name)
{
    for (size_t index = 0; index < sizeof walks / sizeof *walks; index++)
        if ((!*name || strcmp(walks[index].name, name) == 0) && has(walks[index].name))
            return walks[index].walk;
    return NULL;
}

int digest_has(const char *name)
{
    return walk_with(name) != NULL;
}

typedef struct {
    Walk walk;
    const Job *job;
    const int64_t *numbers;
    uint64_t stream, total;
    int64_t from, to;
} Share;

static void *walk_share(void *argument)
{
    Share *share = argument;
    share->total = share->walk(share->job, share->numbers, share->stream, share->from, share->to);
    return NULL;
}

uint64_t digest_job(const Job *job, const int64_t *numbers, int64_t units, uint64_t stream, int threads,
                    const char *with)
{
    Share shares[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    int64_t most = units * job->unit_bytes / MIN_BYTES_PER_THREAD;
    most = most < units ? most : units;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    threads = threads < most ? threads : (int)most;
    threads = threads > 1 ? threads : 1;
    Walk walk = walk_with(with);
    int started = 0;
    for (; started < threads - 1; started++) {
        shares[started] = (Share){walk, job, numbers, stream, 0, units * started / threads, units * (started + 1) / threads};
        if (pthread_create(&handles[started], NULL, walk_share, &shares[started]) != 0)
            break;
    }
    uint64_t total = walk(job, numbers, stream, units * started / threads, units);
    for (int index = 0; index < started; index++) {
        pthread_join(handles[index], NULL);
        total += shares[index].total;
    }
    return total;
}
