// Products with quantized weights, in products.c.
#include <stdint.h>

#define BLOCK 32
enum { F32 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3 };

// a vector as blocks: bytes q, a scale per block, and scale · Σ q, which the offsets of q4_0 and q4_1 need
typedef struct {
    int8_t *q;
    float *scale;
    float *sum;
} Blocks;

Blocks *quantize_all(const float *x, int64_t n, int64_t size, uint8_t *memory);
float dot_f32(int variant, const float *w, const float *x, int64_t size);
void multiply_rows(int variant, int format, const uint8_t *w, const float *x, const Blocks *quantized, const float *bias,
                   float *out, int64_t n, int64_t size, int64_t outputs, int64_t first, int64_t last, int accumulate,
                   float *work);
