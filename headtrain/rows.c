// y[m, o] = Σ_i x[m, i] w[o, i] for a few rows m: w, which is large, is read once and ahead of its use.
// Compiled and called by headtrain/native.py. M rows, O outputs, I inputs, a multiple of 16; w is fp32 or bf16, x and y fp32.

#include <stdlib.h>

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

// Attention of a few queries over many keys: out[b, l, h] = Σ_s p_s v[b, h / G, s] with p = softmax of q · k times scale,
// plus the mask. q and out are fp32 [B, L, J G, D]; mask is fp32 [B, L, S] or null, and a slot below SEEN is not seen;
// k and v are fp32 or bf16, their elements (b, j, s, 0) at b kb + j kj + s ks. D is a multiple of 16, up to 256.

#define SEEN -1e30f
typedef int ints __attribute__((vector_size(4 * LANES)));

static inline floats exponential(floats x) {  // of numbers <= 0; relative error below 2e-7, never below e^-87
    const ints far = x < -87.f;
    x = (floats)(((ints)x & ~far) | ((ints)((floats){0} - 87.f) & far));
    const floats t = x * 1.44269504f + 12582912.f, n = t - 12582912.f;
    const floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return (floats)((ints)p + ((ints)t << 23));
}

// `queries` queries of one row and key head. `p`: room for their scores, `room` each, a multiple of LANES.
static inline __attribute__((always_inline)) void attend(const int queries, const int D, const int bf16, const float **q,
                                                         const float **mask, const char *k, const char *v, float **out,
                                                         float *p, long room, long end, long ks, float scale) {
    enum { MOST = 256 / LANES };
    const int parts = D / LANES;
    floats mine[4][MOST], sum[4][MOST];
    float best[4], total_of[4];
    for (int m = 0; m < queries; m++) {
        best[m] = SEEN;
        for (int c = 0; c < parts; c++) mine[m][c] = *(const floats *)(q[m] + c * LANES) * scale;
    }
    for (long s = 0; s < end; s++) {
        floats key[MOST];
#pragma GCC unroll 16
        for (int c = 0; c < parts; c++) key[c] = load(k, s * ks + c * LANES, bf16);
#pragma GCC unroll 4
        for (int m = 0; m < queries; m++) {
            floats product = mine[m][0] * key[0];
#pragma GCC unroll 16
            for (int c = 1; c < parts; c++) product += mine[m][c] * key[c];
            const float score = total(product) + (mask[m] ? mask[m][s] : 0);
            p[m * room + s] = score;
            best[m] = score > best[m] ? score : best[m];
        }
    }
    for (int m = 0; m < queries; m++) {
        floats all = {0};
        for (long s = end; s < room; s++) p[m * room + s] = SEEN * 2;
        for (long s = 0; s < end; s += LANES) {
            floats *at = (floats *)(p + m * room + s);
            all += *at = exponential(*at - best[m]);
        }
        total_of[m] = total(all);
    }
#pragma GCC unroll 4
    for (int m = 0; m < queries; m++)
#pragma GCC unroll 16
        for (int c = 0; c < parts; c++) sum[m][c] = (floats){0};
    for (long s = 0; s < end; s++) {
#pragma GCC unroll 16
        for (int c = 0; c < parts; c++) {
            const floats value = load(v, s * ks + c * LANES, bf16);
#pragma GCC unroll 4
            for (int m = 0; m < queries; m++) sum[m][c] += p[m * room + s] * value;
        }
    }
    for (int m = 0; m < queries; m++)
        for (int c = 0; c < parts; c++) *(floats *)(out[m] + c * LANES) = sum[m][c] / total_of[m];
}

void headtrain_attend(const float *q, const char *k, const char *v, const float *mask, float *out, long B, long J, long G,
                      long L, long S, long D, long kb, long kj, long ks, float scale, int bf16, int threads) {
    const long size = bf16 ? 2 : 4, room = (S + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long bj = 0; bj < B * J; bj++) {
        const long b = bj / J, j = bj % J;
        long end = S;
        for (int seen = !mask; !seen && end; end -= !seen)
            for (long l = 0; l < L; l++) seen |= mask[(b * L + l) * S + end - 1] > SEEN;
        end = end ? end : S;
        float *p = malloc(4 * room * sizeof(float));
        for (long first = 0; first < L * G; first += 4) {
            const float *from[4], *masks[4];
            float *to[4];
            const long count = L * G - first < 4 ? L * G - first : 4;
            for (long m = 0; m < count; m++) {
                const long l = (first + m) / G, at = ((b * L + l) * J * G + j * G + (first + m) % G) * D;
                from[m] = q + at, to[m] = out + at, masks[m] = mask ? mask + (b * L + l) * S : 0;
            }
#define ATTEND(queries, D, bf16) \
    attend(queries, D, bf16, from, masks, k + (b * kb + j * kj) * size, v + (b * kb + j * kj) * size, to, p, room, end, \
           ks, scale)
#define QUERIES(D, bf16) \
    switch (count) { \
        case 1: ATTEND(1, D, bf16); break; \
        case 2: ATTEND(2, D, bf16); break; \
        case 3: ATTEND(3, D, bf16); break; \
        case 4: ATTEND(4, D, bf16); break; \
    }
            if (D == 64 && bf16) { QUERIES(64, 1) }
            else if (D == 64) { QUERIES(64, 0) }
            else if (D == 128 && bf16) { QUERIES(128, 1) }
            else if (D == 128) { QUERIES(128, 0) }
            else { QUERIES(D, bf16) }
        }
        free(p);
    }
}
