// y[m, o] = Σ_i x[m, i] w[o, i] for a few rows m: w, which is large, is read once and ahead of its use.
// Compiled and called by headtrain/native.py. M rows, O outputs, I inputs, a multiple of 16; w is fp32 or bf16, x and y fp32.

typedef float floats __attribute__((vector_size(32), aligned(4)));
typedef unsigned int words __attribute__((vector_size(32)));
typedef unsigned short halves __attribute__((vector_size(16), aligned(2)));

enum { ROWS = 6, STEP = 16, TILE = 24576 };  // rows at once; inputs at once; bytes of w that stay in the nearest cache

static inline floats load(const char *w, long i, int bf16) {
    if (!bf16) return *(const floats *)(w + 4 * i);
    return (floats)(__builtin_convertvector(*(const halves *)(w + 2 * i), words) << 16);
}

// `rows` rows against `outputs` rows of w. Both are constants wherever this is inlined: the sums stay in registers.
static inline __attribute__((always_inline)) void block(const int rows, const int outputs, const int bf16,
                                                        const float *x, const char *w, float *y, long I, long O) {
    const long width = I * (bf16 ? 2 : 4);
    floats sum[ROWS][4];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) sum[m][o] = (floats){0};
    for (long i = 0; i < I; i += STEP) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) __builtin_prefetch(w + (o + outputs) * width + i * (bf16 ? 2 : 4));
#pragma GCC unroll 2
        for (int part = 0; part < STEP; part += 8) {
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
        for (int o = 0; o < outputs; o++) {
            const floats s = sum[m][o];
            y[m * O + o] = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
        }
}

static inline __attribute__((always_inline)) void tile(const int rows, const int outputs, const int bf16, const float *x,
                                                       const char *w, float *y, long I, long O, long count) {
    long o = 0;
    for (; o + outputs <= count; o += outputs) block(rows, outputs, bf16, x, w + o * I * (bf16 ? 2 : 4), y + o, I, O);
    for (; o < count; o++) block(rows, 1, bf16, x, w + o * I * (bf16 ? 2 : 4), y + o, I, O);
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
            switch (rows) {
                case 1: tile(1, 4, bf16, from, w + o * size, to, I, O, count); break;
                case 2: tile(2, 4, bf16, from, w + o * size, to, I, O, count); break;
                case 3: tile(3, 4, bf16, from, w + o * size, to, I, O, count); break;
                case 4: tile(4, 3, bf16, from, w + o * size, to, I, O, count); break;
                case 5: tile(5, 2, bf16, from, w + o * size, to, I, O, count); break;
                default: tile(6, 2, bf16, from, w + o * size, to, I, O, count);
            }
        }
    }
}

void headtrain_rows(const float *x, const char *w, float *y, long M, long I, long O, int bf16, int threads) {
    if (bf16) all(1, x, w, y, M, I, O, threads);
    else all(0, x, w, y, M, I, O, threads);
}
