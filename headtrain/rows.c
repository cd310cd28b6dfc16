// y[m, o] = Σ_i x[m, i] w[o, i] for a few rows m: w, which is large, is read once and ahead of its use.
// Compiled and called by headtrain/native.py. M rows, O outputs, I inputs, a multiple of 16; w is fp32 or bf16, x and y fp32.

#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8, WIDE = 4 };  // floats of a register; rows at once; outputs at once of six rows
#else
enum { LANES = 8, ROWS = 6, WIDE = 2 };
#endif
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef unsigned int words __attribute__((vector_size(4 * LANES)));
typedef unsigned short halves __attribute__((vector_size(2 * LANES), aligned(2)));

enum { STEP = 16, TILE = 24576, PART = 768 };  // inputs at once; bytes of w, and inputs, that stay in the nearest cache

static inline floats load(const char *w, long i, int bf16) {
    if (!bf16) return *(const floats *)(w + 4 * i);
    return (floats)(__builtin_convertvector(*(const halves *)(w + 2 * i), words) << 16);
}

static inline float total(floats sum) {
    const eight *parts = (const eight *)&sum;
    const eight s = LANES > 8 ? parts[0] + parts[LANES / 8 - 1] : parts[0];
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}

// `rows` rows against `outputs` rows of w. Both are constants wherever this is inlined: the sums stay in registers.
static inline __attribute__((always_inline)) void block(const int rows, const int outputs, const int bf16,
                                                        const float *x, const char *w, float *y, long I, long O,
                                                        long begin, long end) {
    const long width = I * (bf16 ? 2 : 4);
    floats sum[8][4];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) sum[m][o] = (floats){0};
    for (long i = begin; i < end; i += STEP) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) __builtin_prefetch(w + (o + outputs) * width + i * (bf16 ? 2 : 4));
#pragma GCC unroll 2
        for (int part = 0; part < STEP; part += LANES) {
            floats b[4];
#pragma GCC unroll 8
            for (int o = 0; o < outputs; o++) b[o] = load(w + o * width, i + part, bf16);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const floats a = *(const floats *)(x + m * I + i + part);
#pragma GCC unroll 8
                for (int o = 0; o < outputs; o++) sum[m][o] += a * b[o];
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int o = 0; o < outputs; o++) y[m * O + o] = total(sum[m][o]) + (begin ? y[m * O + o] : 0);
}

static inline __attribute__((always_inline)) void tile(const int rows, const int outputs, const int bf16, const float *x,
                                                       const char *w, float *y, long I, long O, long count) {
    const long width = I * (bf16 ? 2 : 4);
    for (long begin = 0; begin < I; begin += PART) {
        const long end = I - begin < PART ? I : begin + PART;
        long o = 0;
        for (; o + outputs <= count; o += outputs) block(rows, outputs, bf16, x, w + o * width, y + o, I, O, begin, end);
        for (; o < count; o++) block(rows, 1, bf16, x, w + o * width, y + o, I, O, begin, end);
    }
}

static inline __attribute__((always_inline)) void all(const int bf16, const float *x, const char *w, float *y, long M,
                                                      long I, long O, int threads) {
    const long size = I * (bf16 ? 2 : 4), wide = 12 * (TILE / (12 * size) + 1);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long o = 0; o < O; o += wide) {
        const long count = O - o < wide ? O - o : wide;
        for (long m = 0, rows; m < M; m += rows) {
            const long parts = (M - m + ROWS - 1) / ROWS;  // of about the same size
            rows = (M - m + parts - 1) / parts;
            const float *from = x + m * I;
            float *to = y + m * O + o;
#define CASE(rows, outputs) \
    case rows: tile(rows, outputs, bf16, from, w + o * size, to, I, O, count); break;
            switch (rows) {
                CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, WIDE > 3 ? 4 : 3) CASE(5, WIDE) CASE(6, WIDE) CASE(7, 3) CASE(8, 3)
            }
        }
    }
}

void headtrain_rows(const float *x, const char *w, float *y, long M, long I, long O, int bf16, int threads) {
    if (bf16) all(1, x, w, y, M, I, O, threads);
    else all(0, x, w, y, M, I, O, threads);
}
