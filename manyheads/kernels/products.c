// Products of a few vectors with a matrix: y = x Wᵀ + b, for decoding, where reading W is what takes time.
//
// W has float32 rows, or rows of blocks of 32 weights as GGUF files store them:
//   q8_0  a half-precision scale d and 32 signed bytes q            w = d q
//   q4_0  d and 16 bytes with q of weight i and i + 16              w = d (q − 8)
//   q4_1  d, an offset m and 16 bytes as q4_0                       w = d q + m
// A vector x is float32, or was quantized to blocks of signed bytes with a scale. One thread computes an output from
// beginning to end, so its bits depend neither on the number of threads nor on the other vectors.

#include "products.h"

#include <math.h>
#include <string.h>

enum { PLAIN = 0, AVX2 = 1, AVX512 = 2 };
#define ROWS 4  // rows of W that are computed at once
static const int64_t BLOCK_BYTES[] = {4 * BLOCK, 34, 18, 20};

int64_t row_bytes_of(int format, int64_t size) {
    return format == F32 ? 4 * size : size / BLOCK * BLOCK_BYTES[format];
}

static float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {  // zero, or below the smallest normal number
        float value = (float)mantissa * 5.9604644775390625e-08f;
        return sign ? -value : value;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return half_to_float(half);
}

static int nibble(const uint8_t *bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }

// ------------------------------------------------------------------------------------------------------- plain C

static float dot_f32_plain(const float *w, const float *x, int64_t size) {
    float lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        for (int k = 0; k < 8; k++) lanes[k] += w[i + k] * x[i + k];
    for (; i < size; i++) lanes[i & 7] += w[i] * x[i];
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

static float dot_blocks_plain(int format, const uint8_t *w, Blocks x, int64_t blocks) {
    float total = 0.0f;
    for (int64_t b = 0; b < blocks; b++, w += BLOCK_BYTES[format]) {
        const int8_t *q = x.q + b * BLOCK;
        int32_t dot = 0;
        if (format == Q8_0) {
            for (int i = 0; i < BLOCK; i++) dot += (int8_t)w[2 + i] * q[i];
        } else {
            const uint8_t *nibbles = w + (format == Q4_0 ? 2 : 4);
            for (int i = 0; i < BLOCK; i++) dot += nibble(nibbles, i) * q[i];
        }
        total += half_at(w) * x.scale[b] * (float)dot;
        if (format == Q4_0) total -= 8.0f * half_at(w) * x.sum[b];
        if (format == Q4_1) total += half_at(w + 2) * x.sum[b];
    }
    return total;
}

// a row of W as float32, for products with vectors that are not quantized
void dequantize_row(int format, const uint8_t *w, float *out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++, w += BLOCK_BYTES[format], out += BLOCK) {
        float d = half_at(w), m = format == Q4_1 ? half_at(w + 2) : -8.0f * d;
        if (format == Q8_0)
            for (int i = 0; i < BLOCK; i++) out[i] = d * (float)(int8_t)w[2 + i];
        else
            for (int i = 0; i < BLOCK; i++) out[i] = d * (float)nibble(w + (format == Q4_0 ? 2 : 4), i) + m;
    }
}

// ----------------------------------------------------------------------------------------------------------- x86

#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define WITH_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

WITH_AVX2 static float sum_of_lanes(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

WITH_AVX2 static float half_at_avx2(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return _cvtsh_ss(half);
}

WITH_AVX2 static float dot_f32_avx2(const float *w, const float *x, int64_t size) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        a = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i), a);
        b = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 8), _mm256_loadu_ps(x + i + 8), b);
        c = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 16), _mm256_loadu_ps(x + i + 16), c);
        d = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 24), _mm256_loadu_ps(x + i + 24), d);
    }
    float total = sum_of_lanes(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
    for (; i < size; i++) total += w[i] * x[i];
    return total;
}

WITH_AVX2 static __m256i unpack_nibbles(const uint8_t *bytes) {
    __m128i packed = _mm_loadu_si128((const __m128i *)bytes);
    __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// unsigned bytes u times signed bytes s, summed in fours
#define DOT_MADDUBS(u, s) _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1))
#define DOT_VNNI(u, s) _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s)

// one block of row k: the sums in fours, and what its offset adds; the sign of a weight goes to x
#define SUMS_Q8_0(k, DOT)                                                        \
    __m256i v = _mm256_loadu_si256((const __m256i *)(block + 2));                \
    __m256i sums = DOT(_mm256_abs_epi8(v), _mm256_sign_epi8(xq, v));
#define SUMS_Q4_0(k, DOT)                                                        \
    __m256i sums = DOT(unpack_nibbles(block + 2), xq);                           \
    offset[k] -= 8.0f * d * x.sum[b];
#define SUMS_Q4_1(k, DOT)                                                        \
    __m256i sums = DOT(unpack_nibbles(block + 4), xq);                           \
    offset[k] += half_at_avx2(block + 2) * x.sum[b];

// `rows` neighbouring rows of W: they read x once, and their sums do not wait for one another
#define DEFINE_DOTS(NAME, TARGET, FORMAT, DOT)                                                               \
    TARGET static inline __attribute__((always_inline)) void NAME##_of(const uint8_t *w, int64_t row_bytes,  \
                                                                       Blocks x, int64_t blocks, int rows,   \
                                                                       float *out) {                         \
        __m256 total[ROWS];                                                                                  \
        float offset[ROWS];                                                                                  \
        for (int k = 0; k < rows; k++) total[k] = _mm256_setzero_ps(), offset[k] = 0.0f;                     \
        for (int64_t b = 0; b < blocks; b++) {                                                               \
            __m256i xq = _mm256_loadu_si256((const __m256i *)(x.q + b * BLOCK));                             \
            for (int k = 0; k < rows; k++) {                                                                 \
                const uint8_t *block = w + k * row_bytes + b * BLOCK_BYTES[FORMAT];                          \
                float d = half_at_avx2(block);                                                               \
                SUMS_##FORMAT(k, DOT)                                                                        \
                __m256 scale = _mm256_set1_ps(d * x.scale[b]);                                               \
                total[k] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), total[k]);                       \
            }                                                                                                \
        }                                                                                                    \
        for (int k = 0; k < rows; k++) out[k] = sum_of_lanes(total[k]) + offset[k];                          \
    }                                                                                                        \
    TARGET static void NAME(const uint8_t *w, int64_t row_bytes, Blocks x, int64_t blocks, int rows,         \
                            float *out) {                                                                    \
        if (rows == ROWS)                                                                                    \
            NAME##_of(w, row_bytes, x, blocks, ROWS, out);                                                   \
        else                                                                                                 \
            for (int k = 0; k < rows; k++) NAME##_of(w + k * row_bytes, row_bytes, x, blocks, 1, out + k);   \
    }

DEFINE_DOTS(dot_q8_0_avx2, WITH_AVX2, Q8_0, DOT_MADDUBS)
DEFINE_DOTS(dot_q4_0_avx2, WITH_AVX2, Q4_0, DOT_MADDUBS)
DEFINE_DOTS(dot_q4_1_avx2, WITH_AVX2, Q4_1, DOT_MADDUBS)
DEFINE_DOTS(dot_q8_0_avx512, WITH_AVX512, Q8_0, DOT_VNNI)
DEFINE_DOTS(dot_q4_0_avx512, WITH_AVX512, Q4_0, DOT_VNNI)
DEFINE_DOTS(dot_q4_1_avx512, WITH_AVX512, Q4_1, DOT_VNNI)
#endif

// ------------------------------------------------------------------------------------------------------ dispatch

// the best variant that this processor can run
int best_variant(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return AVX512;
    if (avx2) return AVX2;
#endif
    return PLAIN;
}

float dot_f32(int variant, const float *w, const float *x, int64_t size) {
#if defined(__x86_64__)
    if (variant != PLAIN) return dot_f32_avx2(w, x, size);
#endif
    return dot_f32_plain(w, x, size);
}

// out[k] = row k of W · x, for at most ROWS rows
static void dots_of_rows(int variant, int format, const uint8_t *w, Blocks x, int64_t blocks, int rows, float *out) {
    int64_t row_bytes = blocks * BLOCK_BYTES[format];
#if defined(__x86_64__)
    switch (4 * variant + format) {
        case 4 * AVX2 + Q8_0: dot_q8_0_avx2(w, row_bytes, x, blocks, rows, out); return;
        case 4 * AVX2 + Q4_0: dot_q4_0_avx2(w, row_bytes, x, blocks, rows, out); return;
        case 4 * AVX2 + Q4_1: dot_q4_1_avx2(w, row_bytes, x, blocks, rows, out); return;
        case 4 * AVX512 + Q8_0: dot_q8_0_avx512(w, row_bytes, x, blocks, rows, out); return;
        case 4 * AVX512 + Q4_0: dot_q4_0_avx512(w, row_bytes, x, blocks, rows, out); return;
        case 4 * AVX512 + Q4_1: dot_q4_1_avx512(w, row_bytes, x, blocks, rows, out); return;
    }
#endif
    for (int k = 0; k < rows; k++) out[k] = dot_blocks_plain(format, w + k * row_bytes, x, blocks);
}

// rows `first` to `last` of W · x for n vectors: out[r * outputs + o], or added to it; `work` has room for a row of W
void multiply_rows(int variant, int format, const uint8_t *w, const float *x, const Blocks *quantized, const float *bias,
                   float *out, int64_t n, int64_t size, int64_t outputs, int64_t first, int64_t last, int accumulate,
                   float *work) {
    int64_t blocks = size / BLOCK, row_bytes = row_bytes_of(format, size);
    for (int64_t o = first; o < last; o += ROWS) {
        int rows = last - o < ROWS ? (int)(last - o) : ROWS;
        for (int64_t r = 0; r < n; r++) {  // the rows stay in the cache of the processor
            float sums[ROWS];
            if (quantized) {
                dots_of_rows(variant, format, w + o * row_bytes, quantized[r], blocks, rows, sums);
            } else {
                for (int k = 0; k < rows; k++) {
                    const uint8_t *row = w + (o + k) * row_bytes;
                    const float *floats = (const float *)row;
                    if (format != F32) {
                        if (r == 0) dequantize_row(format, row, work + k * size, blocks);
                        floats = work + k * size;
                    }
                    sums[k] = dot_f32(variant, floats, x + r * size, size);
                }
            }
            for (int k = 0; k < rows; k++) {
                float *target = out + r * outputs + o + k, y = bias ? sums[k] + bias[o + k] : sums[k];
                *target = accumulate ? *target + y : y;
            }
        }
    }
}

// quantizes one vector: q = round(127 x / max |x|) in each block
static void quantize(const float *x, Blocks out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++, x += BLOCK) {
        int8_t *q = out.q + b * BLOCK;
        float largest = 0.0f, check = 0.0f;
        int32_t total = 0;
        for (int i = 0; i < BLOCK; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
            check += x[i] * 0.0f;  // NaN if a number is NaN or infinite
        }
        // a block of numbers below 10⁻³⁶ is zero, because 127 / largest would be infinite
        float inverse = largest >= 1e-36f && check == 0.0f ? 127.0f / largest : 0.0f;
        for (int i = 0; i < BLOCK; i++)  // adding 1.5 · 2²³ rounds to an integer, a half to the even one
            total += q[i] = inverse == 0.0f ? 0 : (int8_t)(x[i] * inverse + 12582912.0f - 12582912.0f);
        out.scale[b] = (inverse == 0.0f ? 0.0f : largest / 127.0f) + check;
        out.sum[b] = out.scale[b] * (float)total;
    }
}

// n vectors as blocks, in memory of n · (sizeof(Blocks) + size + 8 · size / BLOCK) bytes
Blocks *quantize_all(const float *x, int64_t n, int64_t size, uint8_t *memory) {
    int64_t blocks = size / BLOCK;
    Blocks *vectors = (Blocks *)memory;
    float *scale = (float *)(vectors + n);
    int8_t *q = (int8_t *)(scale + 2 * n * blocks);
    for (int64_t r = 0; r < n; r++) {
        vectors[r] = (Blocks){q + r * size, scale + 2 * r * blocks, scale + (2 * r + 1) * blocks};
        quantize(x + r * size, vectors[r], blocks);
    }
    return vectors;
}

// out[n][outputs] = x[n][size] · w[outputs][size] + bias; `work` has room for n quantized vectors and their addresses
// (if `integers`), or for ROWS rows of W per thread
void linear(int variant, int format, const uint8_t *w, const float *x, const float *bias, float *out, int64_t n,
            int64_t size, int64_t outputs, int integers, uint8_t *work, int threads) {
    Blocks *quantized = integers && format != F32 ? quantize_all(x, n, size, work) : 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < threads; part++)
        multiply_rows(variant, format, w, x, quantized, bias, out, n, size, outputs, outputs * part / threads,
                      outputs * (part + 1) / threads, 0, (float *)work + part * ROWS * size);
}

// rows of W as float32
void dequantize(int format, const uint8_t *w, float *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        dequantize_row(format, w + row * row_bytes_of(format, size), out + row * size, size / BLOCK);
}
