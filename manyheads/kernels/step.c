// One step of decoding: a list of instructions for the new tokens of all sequences, run in one call.
//
// An instruction reads and writes registers, which hold a vector per token. The threads share the work of each
// instruction and meet after it. A token is computed from beginning to end in one order, so its bits depend neither
// on the number of threads nor on the other sequences.

#include "products.h"

#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { NORM, LINEAR, ROTATE_AND_STORE, ATTEND, ACTIVATE, ADD };

typedef struct {
    int64_t op, out, in, other;          // registers, as offsets into the memory of registers
    int64_t width, size, count, format;  // widths of out and in; vectors per token; format of weights, or a kind
    int64_t weight, bias;                // addresses, or 0
    int64_t flags, layer;
    double number, second;
} Instruction;

enum { SAME_INPUT = 1, ACCUMULATE = 2, NO_BARRIER = 4, SUBTRACT_MEAN = 8, INTERLEAVED = 16, INT8_ACTIVATIONS = 32 };

typedef struct {
    int64_t batch, length;          // sequences, and new tokens of each
    int64_t past, capacity;         // tokens in the caches, and room
    int64_t registers;              // address of the registers
    int64_t angles;                 // address of the Angles of each position scheme
    int64_t padding;                // address of batch × (past + length) bytes, 1 at padding, or 0
    int64_t keys, values;           // addresses of an address per layer
    int64_t work, work_bytes;       // memory of each thread
} Step;

typedef struct {
    const float *cos, *sin;  // rows × length × pairs
    int64_t rows;            // batch or 1
} Angles;

static float gelu_tanh(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))); }
static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static float activate(int64_t kind, float x) {
    switch (kind) {  // in the order of ACTIVATIONS in parts/feedforward.py
        case 0: return x > 0.0f ? x : 0.0f;
        case 1: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
        case 2: return gelu_tanh(x);
        case 3: return x * sigmoid(1.702f * x);
        case 4: return x * sigmoid(x);
        case 5: return x > 0.0f ? x * x : 0.0f;
        case 6: return tanhf(x);
        case 7: return sigmoid(x);
        default: return x;
    }
}

static void normalize(const Instruction *i, const float *x, float *out) {
    const float *weight = (const float *)i->weight, *bias = (const float *)i->bias;
    double mean = 0.0, square = 0.0;
    if (i->flags & SUBTRACT_MEAN) {
        for (int64_t k = 0; k < i->width; k++) mean += x[k];
        mean /= (double)i->width;
    }
    for (int64_t k = 0; k < i->width; k++) square += (x[k] - mean) * (x[k] - mean);
    float factor = (float)(1.0 / sqrt(square / (double)i->width + i->number)), shift = (float)mean;
    for (int64_t k = 0; k < i->width; k++) {
        float y = (x[k] - shift) * factor;
        if (weight) y *= weight[k] + (float)i->second;
        out[k] = bias ? y + bias[k] : y;
    }
}

static void multiply(const Instruction *i, const Step *s, int variant, int thread, int threads) {
    int64_t n = s->batch * s->length;
    const float *x = (const float *)s->registers + i->in;
    uint8_t *work = (uint8_t *)s->work + thread * s->work_bytes;
    Blocks *quantized = 0;
    if (i->format != F32 && i->flags & INT8_ACTIVATIONS)  // each thread for itself, which takes less time than to wait
        quantized = i->flags & SAME_INPUT ? (Blocks *)work : quantize_all(x, n, i->size, work);
    multiply_rows(variant, (int)i->format, (const uint8_t *)i->weight, x, quantized, (const float *)i->bias,
                  (float *)s->registers + i->out, n, i->size, i->width, i->width * thread / threads,
                  i->width * (thread + 1) / threads, (i->flags & ACCUMULATE) != 0, (float *)work);
}

static void rotate_head(const Instruction *i, const Step *s, int64_t token, float *x) {
    const Angles *angles = (const Angles *)s->angles + i->bias;
    int64_t pairs = i->count / 2, row = (angles->rows == 1 ? token % s->length : token) * pairs;
    const float *cos = angles->cos + row, *sin = angles->sin + row;
    int64_t step = i->flags & INTERLEAVED ? 2 : 1, distance = i->flags & INTERLEAVED ? 1 : pairs;
    for (int64_t k = 0; k < pairs; k++) {
        float a = x[k * step], b = x[k * step + distance];
        x[k * step] = a * cos[k] - b * sin[k];
        x[k * step + distance] = b * cos[k] + a * sin[k];
    }
}

// attention has its heads in width, its key heads in size, and the size of a head in format
static float *cache_row(const Instruction *i, const Step *s, int64_t address, int64_t sequence, int64_t group) {
    return ((float **)address)[i->layer] + (sequence * i->size + group) * s->capacity * i->format;
}

// rotates `count` coordinates of the queries (in) and keys (other), and appends keys and values (out) to the caches
static void rotate_and_store(const Instruction *i, const Step *s, int thread, int threads) {
    float *registers = (float *)s->registers;
    int64_t n = s->batch * s->length, shared = i->width / i->size, K = i->format;
    for (int64_t item = thread; item < n * i->size; item += threads) {
        int64_t token = item / i->size, group = item % i->size, sequence = token / s->length;
        float *query = registers + i->in + (token * i->width + group * shared) * K;
        float *key = registers + i->other + item * K, *value = registers + i->out + item * K;
        if (i->count) {
            rotate_head(i, s, token, key);
            for (int64_t h = 0; h < shared; h++) rotate_head(i, s, token, query + h * K);
        }
        int64_t position = s->past + token % s->length;
        memcpy(cache_row(i, s, s->keys, sequence, group) + position * K, key, 4 * K);
        memcpy(cache_row(i, s, s->values, sequence, group) + position * K, value, 4 * K);
    }
}

// softmax(number · q·k) v, over the keys that a token may see; count is the window, or 0
static void attend(const Instruction *i, const Step *s, int variant, int thread, int threads) {
    float *registers = (float *)s->registers, *weights = (float *)(s->work + thread * s->work_bytes);
    int64_t n = s->batch * s->length, K = i->format, total = s->past + s->length;
    for (int64_t item = thread; item < n * i->width; item += threads) {
        int64_t token = item / i->width, head = item % i->width, sequence = token / s->length;
        int64_t group = head / (i->width / i->size), last = s->past + token % s->length;
        const uint8_t *padding = s->padding ? (const uint8_t *)s->padding + sequence * total : 0;
        const float *query = registers + i->in + item * K;
        const float *keys = cache_row(i, s, s->keys, sequence, group);
        const float *values = cache_row(i, s, s->values, sequence, group);
        float *out = registers + i->out + item * K, largest = -INFINITY, sum = 0.0f;
        int64_t first = i->count && last >= i->count ? last - i->count + 1 : 0;
        for (int64_t k = first; k <= last; k++) {
            int visible = !padding || !padding[k];
            float score = visible ? (float)i->number * dot_f32(variant, keys + k * K, query, K) : -INFINITY;
            weights[k - first] = score;
            largest = score > largest || isnan(score) ? score : largest;
        }
        memset(out, 0, 4 * K);
        if (largest == -INFINITY) continue;  // a token that may see no key
        for (int64_t k = first; k <= last; k++) sum += weights[k - first] = expf(weights[k - first] - largest);
        for (int64_t k = first; k <= last; k++) {
            float weight = weights[k - first] / sum;
            if (weight == 0.0f) continue;  // the value of a padded key may be anything
            const float *value = values + k * K;
            for (int64_t d = 0; d < K; d++) out[d] += weight * value[d];
        }
    }
}

static void run_instruction(const Instruction *i, const Step *s, int variant, int thread, int threads) {
    float *registers = (float *)s->registers;
    int64_t n = s->batch * s->length;
    switch (i->op) {
        case NORM:
            for (int64_t v = thread; v < n * i->count; v += threads)
                normalize(i, registers + i->in + v * i->width, registers + i->out + v * i->width);
            break;
        case LINEAR: multiply(i, s, variant, thread, threads); break;
        case ROTATE_AND_STORE: rotate_and_store(i, s, thread, threads); break;
        case ATTEND: attend(i, s, variant, thread, threads); break;
        case ACTIVATE:  // f(in), or f(in) · other
            for (int64_t k = n * i->width * thread / threads; k < n * i->width * (thread + 1) / threads; k++) {
                float y = activate(i->format, registers[i->in + k]);
                registers[i->out + k] = i->other >= 0 ? y * registers[i->other + k] : y;
            }
            break;
        case ADD:
            for (int64_t k = n * i->width * thread / threads; k < n * i->width * (thread + 1) / threads; k++)
                registers[i->out + k] = registers[i->in + k] + registers[i->other + k];
            break;
    }
}

void run_step(const Instruction *instructions, int64_t count, const Step *step, int variant, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int thread = 0, all = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(), all = omp_get_num_threads();
#endif
        for (int64_t i = 0; i < count; i++) {
            run_instruction(instructions + i, step, variant, thread, all);
            if (all > 1 && !(instructions[i].flags & NO_BARRIER)) {
#pragma omp barrier
            }
        }
    }
}
