/* CPU kernels: products with packed weights, and the whole step of a llama-like model in one call.

   Weights stay in the blocks of their GGUF file, or in bfloat16, float16 or float32. Activations and sums are float32.
   This file is compiled once for each instruction set, with -DISA=name; every exported function carries that name.

   Always true:
   - a weight is unpacked to the same float32 number as gguf-py's `dequantize` gives;
   - the result of a row of activations depends on that row alone: not on the other rows, not on the number of threads.
     Hence every sum has one order, written out here, and the compiler may not reorder it (no -ffast-math, contraction off);
   - a thread that is late delays no phase: work is taken in small parts, and the next phase waits for parts, not for threads. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef ISA
#define ISA plain
#endif
#define JOIN_(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define FN(name) JOIN(bough_, ISA, name)
#define EXPORT __attribute__((visibility("default")))
#define ABI 3

/* ---- vectors of VW floats ---- */

#if defined(__AVX512F__)
#include <immintrin.h>
#define VW 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VW 8
#else
#define VW 4
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define NV (32 / VW) /* vectors in a block of 32 weights */

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef float v4 __attribute__((vector_size(16)));

/* four of the eight numbers of a and b, by their places */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t v4i __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v4i){__VA_ARGS__})
#endif

static inline vf load(const float *p) { vf t; memcpy(&t, p, sizeof t); return t; }
static inline void store(float *p, vf a) { memcpy(p, &a, sizeof a); }
static inline vf splat(float a) { return a - (vf){0}; }

#if defined(__AVX512F__)
static inline vf fma_(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline vf max_(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vi bytes_u(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline vi bytes_s(const uint8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline vf floats(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
static inline vf halves(const uint8_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vi shorts_u(const uint8_t *p) { return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
static inline v4 fold(vf a) {
  __m256 t = _mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1));
  return (v4)_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}
#elif defined(__AVX2__) && defined(__FMA__)
static inline vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline vf max_(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vi bytes_u(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vi bytes_s(const uint8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vf floats(vi a) { return (vf)_mm256_cvtepi32_ps((__m256i)a); }
static inline vf halves(const uint8_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vi shorts_u(const uint8_t *p) { return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline v4 fold(vf a) { return (v4)_mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1)); }
#elif defined(__aarch64__) && !defined(ISA_PLAIN_OBJECT)
static inline vf fma_(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
static inline vf max_(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
static inline uint32_t four(const uint8_t *p) { uint32_t t; memcpy(&t, p, 4); return t; }
static inline vi bytes_u(const uint8_t *p) { return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four(p))))); }
static inline vi bytes_s(const uint8_t *p) { return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four(p))))); }
static inline vf floats(vi a) { return (vf)vcvtq_f32_s32((int32x4_t)a); }
static inline vf halves(const uint8_t *p) { float16x4_t t; memcpy(&t, p, 8); return (vf)vcvt_f32_f16(t); }
static inline vi shorts_u(const uint8_t *p) { uint16x4_t t; memcpy(&t, p, 8); return (vi)vmovl_u16(t); }
static inline v4 fold(vf a) { return a; }
#else
static float half(const uint8_t *p);
static inline vf fma_(vf a, vf b, vf c) { return a * b + c; }
static inline vf max_(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); }
static inline vi bytes_u(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
static inline vi bytes_s(const uint8_t *p) { return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
static inline vf floats(vi a) { return __builtin_convertvector(a, vf); }
static inline vf halves(const uint8_t *p) { return (vf){half(p), half(p + 2), half(p + 4), half(p + 6)}; }
static inline vi shorts_u(const uint8_t *p) { uint16_t t[4]; memcpy(t, p, 8); return (vi){t[0], t[1], t[2], t[3]}; }
static inline v4 fold(vf a) { return a; }
#endif

/* a float16 number */
#if defined(__F16C__)
static inline float half(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return _cvtsh_ss(h); }
#elif defined(__aarch64__) && !defined(ISA_PLAIN_OBJECT)
static inline float half(const uint8_t *p) { __fp16 h; memcpy(&h, p, 2); return h; }
#else
static float half(const uint8_t *p) {
  uint16_t h; memcpy(&h, p, 2);
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
  else { float small = (float)mantissa * 0x1p-24f; memcpy(&bits, &small, 4); bits |= sign; }
  float f; memcpy(&f, &bits, 4); return f;
}
#endif

/* the sum of the lanes of a vector, and of four vectors at once: in the same order */
static inline float total(vf a) { v4 t = fold(a); return (t[0] + t[2]) + (t[1] + t[3]); }
static inline v4 total4(vf a, vf b, vf c, vf d) {
  v4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
  v4 x = SHUFFLE(p, q, 0, 4, 1, 5) + SHUFFLE(p, q, 2, 6, 3, 7); /* p02 q02 p13 q13 */
  v4 y = SHUFFLE(r, s, 0, 4, 1, 5) + SHUFFLE(r, s, 2, 6, 3, 7);
  return SHUFFLE(x, y, 0, 1, 4, 5) + SHUFFLE(x, y, 2, 3, 6, 7);
}

/* e to the x, within 2 units in the last place; 0 below -87 */
static inline vf exp_(vf x) {
  vf y = (vf)(((vi)x & (x < 88.0f)) | ((vi)splat(88.0f) & ~(x < 88.0f)));
  vf shifted = fma_(y, splat(1.44269504f), splat(12582912.0f)), n = shifted - 12582912.0f;
  vf r = fma_(n, splat(-0.693359375f), y); r = fma_(n, splat(2.12194440e-4f), r);
  vf p = fma_(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  p = fma_(p, r, splat(8.3334519073e-3f)); p = fma_(p, r, splat(4.1665795894e-2f));
  p = fma_(p, r, splat(1.6666665459e-1f)); p = fma_(p, r, splat(5.0000001201e-1f));
  p = fma_(p, r * r, r) + 1.0f;
  vi power = ((vi)shifted - (vi)splat(12582912.0f) + 127) << 23;
  return (vf)((vi)(p * (vf)power) & (x > -87.0f));
}
static inline vf tanh_(vf x) { return 1.0f - 2.0f / (exp_(x + x) + 1.0f); }

/* ---- weights ---- */

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 }; /* ggml's */

/* n rows of k weights. Row i starts at data + rows[i], or at data + i * stride where there are no `rows`. */
typedef struct { const uint8_t *data; const int64_t *rows; const float *bias; int64_t stride; int32_t type, n, k, unused; } Matrix;

static inline const uint8_t *row_of(const Matrix *m, int64_t i) { return m->data + (m->rows ? m->rows[i] : i * m->stride); }

/* bytes of 32 weights: for types with blocks of 256, an eighth */
enum { BYTES_F16 = 64, BYTES_BF16 = 64, BYTES_Q4_0 = 18, BYTES_Q4_1 = 20, BYTES_Q5_0 = 22, BYTES_Q5_1 = 24, BYTES_Q8_0 = 34, BYTES_Q4_K = 18,
       BYTES_Q5_K = 22, BYTES_Q6_K = 26 };

/* Each of these unpacks weights [32 b, 32 b + 32) of a row. */
#define DECODE(name) static inline __attribute__((always_inline)) void decode_##name(const uint8_t *row, int b, vf *w)

static inline void scaled(const vi *q, float d, float m, vf *w) {
  for (int v = 0; v < NV; v++) w[v] = fma_(floats(q[v]), splat(d), splat(m));
}

/* 16 values of four bits for each of 16 bytes at p, shifted right by `shift` */
static inline void nibbles(const uint8_t *p, int shift, float d, float m, vf *w) {
#if defined(__AVX512F__)
  static const vf steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  __m512 values = (__m512)fma_(steps, splat(d), splat(m)); /* one of 16 values each: looked up by the low four bits */
  w[0] = (vf)_mm512_permutexvar_ps((__m512i)(bytes_u(p) >> shift), values);
#else
  for (int v = 0; v < NV / 2; v++) w[v] = fma_(floats(bytes_u(p + v * VW) >> shift & 15), splat(d), splat(m));
#endif
}

DECODE(F32) { for (int v = 0; v < NV; v++) w[v] = load((const float *)row + 32 * (long)b + v * VW); }
DECODE(F16) { for (int v = 0; v < NV; v++) w[v] = halves(row + 64 * (long)b + 2 * v * VW); }
DECODE(BF16) { for (int v = 0; v < NV; v++) w[v] = (vf)(shorts_u(row + 64 * (long)b + 2 * v * VW) << 16); }
DECODE(Q4_0) {
  const uint8_t *p = row + 18 * (long)b; float d = half(p);
  nibbles(p + 2, 0, d, -8 * d, w); nibbles(p + 2, 4, d, -8 * d, w + NV / 2);
}
DECODE(Q4_1) {
  const uint8_t *p = row + 20 * (long)b; float d = half(p), m = half(p + 2);
  nibbles(p + 4, 0, d, m, w); nibbles(p + 4, 4, d, m, w + NV / 2);
}
static inline vi fifth_bits(uint32_t high, int first) { /* bits first, first + 1, … of `high`, as 16 or 0 */
  vi t; for (int j = 0; j < VW; j++) t[j] = (int32_t)(high >> (first + j) & 1) << 4;
  return t;
}
static inline void fives(const uint8_t *high, const uint8_t *p, float d, float m, vf *w) {
  uint32_t bits; memcpy(&bits, high, 4); vi q[NV];
  for (int v = 0; v < NV / 2; v++) {
    vi t = bytes_u(p + v * VW);
    q[v] = (t & 15) | fifth_bits(bits, v * VW); q[v + NV / 2] = (t >> 4) | fifth_bits(bits, 16 + v * VW);
  }
  scaled(q, d, m, w);
}
DECODE(Q5_0) { const uint8_t *p = row + 22 * (long)b; float d = half(p); fives(p + 2, p + 6, d, -16 * d, w); }
DECODE(Q5_1) { const uint8_t *p = row + 24 * (long)b; fives(p + 4, p + 8, half(p), half(p + 2), w); }
DECODE(Q8_0) {
  const uint8_t *p = row + 34 * (long)b; vf d = splat(half(p));
  for (int v = 0; v < NV; v++) w[v] = floats(bytes_s(p + 2 + v * VW)) * d;
}
/* the scale and the minimum of part j of 256 weights: six bits each, in 12 bytes */
static inline void six_bits(const uint8_t *s, int j, int *scale, int *minimum) {
  if (j < 4) { *scale = s[j] & 63; *minimum = s[j + 4] & 63; }
  else { *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4; *minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4; }
}
DECODE(Q4_K) {
  const uint8_t *p = row + 144 * (long)(b >> 3); int j = b & 7, scale, minimum; six_bits(p + 4, j, &scale, &minimum);
  float d = half(p) * (float)scale, m = -(half(p + 2) * (float)minimum); const uint8_t *q = p + 16 + 32 * (j >> 1);
  nibbles(q, 4 * (j & 1), d, m, w); nibbles(q + 16, 4 * (j & 1), d, m, w + NV / 2);
}
DECODE(Q5_K) {
  const uint8_t *p = row + 176 * (long)(b >> 3), *high = p + 16; int j = b & 7, scale, minimum; six_bits(p + 4, j, &scale, &minimum);
  const uint8_t *low = p + 48 + 32 * (j >> 1); vi q[NV];
  for (int v = 0; v < NV; v++) q[v] = (bytes_u(low + v * VW) >> 4 * (j & 1) & 15) | (bytes_u(high + v * VW) >> j & 1) << 4;
  scaled(q, half(p) * (float)scale, -(half(p + 2) * (float)minimum), w);
}
DECODE(Q6_K) {
  const uint8_t *p = row + 210 * (long)(b >> 3); int part = b & 7, j = part & 3, side = part >> 2;
  const uint8_t *low = p + 64 * side + 32 * (j & 1), *high = p + 128 + 32 * side; const int8_t *scales = (const int8_t *)p + 192 + 8 * side + 2 * j;
  float d = half(p + 208);
  for (int v = 0; v < NV; v++) {
    vi q = (bytes_u(low + v * VW) >> 4 * (j >> 1) & 15) | (bytes_u(high + v * VW) >> 2 * j & 3) << 4;
    w[v] = floats(q - 32) * splat(d * (float)scales[v * VW / 16]);
  }
}

/* ---- products ---- */

/* `rows` rows of activations by `num` rows of weights at once: out[r * 4 + i] for i < num. Independent sums hide the latency of each. */
typedef void Tile(const uint8_t *const *w, const float *x, long x_stride, int k, float *out);

#define UNROLL _Pragma("GCC unroll 8")
#define AHEAD 4096 /* bytes: the hardware does not foresee several rows at once */
#define TILE(type, R, B) \
static void tile_##type##_##R##_##B(const uint8_t *const *rows, const float *x, long x_stride, int k, float *out) { \
  vf sum[B][R]; UNROLL for (int i = 0; i < B; i++) UNROLL for (int r = 0; r < R; r++) sum[i][r] = (vf){0}; \
  for (int b = 0; b < k / 32; b++) { \
    vf w[B][NV]; UNROLL for (int i = 0; i < B; i++) { __builtin_prefetch(rows[i] + (long)b * BYTES_##type + AHEAD); decode_##type(rows[i], b, w[i]); } \
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) { \
      vf a = load(x + r * x_stride + 32 * (long)b + v * VW); \
      UNROLL for (int i = 0; i < B; i++) sum[i][r] = fma_(w[i][v], a, sum[i][r]); } } \
  FINISH(R, B) }
/* with plain floats there may be a rest beyond the last whole vector */
#define FLOAT_TILE(R, B) \
static void tile_F32_##R##_##B(const uint8_t *const *rows, const float *x, long x_stride, int k, float *out) { \
  vf sum[B][R]; UNROLL for (int i = 0; i < B; i++) UNROLL for (int r = 0; r < R; r++) sum[i][r] = (vf){0}; \
  int whole = k / VW * VW; \
  for (int j = 0; j < whole; j += VW) { \
    vf w[B]; UNROLL for (int i = 0; i < B; i++) w[i] = load((const float *)rows[i] + j); \
    UNROLL for (int r = 0; r < R; r++) { vf a = load(x + r * x_stride + j); \
      UNROLL for (int i = 0; i < B; i++) sum[i][r] = fma_(w[i], a, sum[i][r]); } } \
  FINISH(R, B) \
  for (int j = whole; j < k; j++) for (int r = 0; r < R; r++) for (int i = 0; i < B; i++) \
    out[r * 4 + i] += ((const float *)rows[i])[j] * x[r * x_stride + j]; }
#define FINISH(R, B) UNROLL for (int r = 0; r < R; r++) { \
    if (B == 4) { v4 t = total4(sum[0][r], sum[B > 1 ? 1 : 0][r], sum[B > 2 ? 2 : 0][r], sum[B > 3 ? 3 : 0][r]); memcpy(out + r * 4, &t, sizeof t); } \
    else out[r * 4] = total(sum[0][r]); }
#define TILES(type) TILE(type, 1, 4) TILE(type, 2, 4) TILE(type, 4, 4) TILE(type, 1, 1) TILE(type, 2, 1) TILE(type, 4, 1)
TILES(F16) TILES(BF16) TILES(Q4_0) TILES(Q4_1) TILES(Q5_0) TILES(Q5_1) TILES(Q8_0) TILES(Q4_K) TILES(Q5_K) TILES(Q6_K)
FLOAT_TILE(1, 4) FLOAT_TILE(2, 4) FLOAT_TILE(3, 4) FLOAT_TILE(1, 1) FLOAT_TILE(2, 1) FLOAT_TILE(3, 1)
#if VW != 8
FLOAT_TILE(4, 4) FLOAT_TILE(5, 4) FLOAT_TILE(6, 4) FLOAT_TILE(4, 1) FLOAT_TILE(5, 1) FLOAT_TILE(6, 1)
#define FLOAT_ROWS 6 /* rows of activations in a tile of floats: sums fill the registers */
static Tile *const FLOAT_TILES[7][2] = {{0, 0}, {tile_F32_1_1, tile_F32_1_4}, {tile_F32_2_1, tile_F32_2_4}, {tile_F32_3_1, tile_F32_3_4},
  {tile_F32_4_1, tile_F32_4_4}, {tile_F32_5_1, tile_F32_5_4}, {tile_F32_6_1, tile_F32_6_4}};
#else
#define FLOAT_ROWS 3
static Tile *const FLOAT_TILES[4][2] = {{0, 0}, {tile_F32_1_1, tile_F32_1_4}, {tile_F32_2_1, tile_F32_2_4}, {tile_F32_3_1, tile_F32_3_4}};
#endif
#define ENTRY(type) [type] = {{tile_##type##_1_1, tile_##type##_1_4}, {tile_##type##_2_1, tile_##type##_2_4}, {tile_##type##_4_1, tile_##type##_4_4}}
#define PACKED_ROWS 8 /* for more rows of activations than this, weights are unpacked first */
static Tile *const PACKED_TILES[31][3][2] /* for 1, 2 and 4 rows of activations; for one and four rows of weights */
  = {ENTRY(F16), ENTRY(BF16), ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K)};

#define UNPACK(type) case type: for (int b = 0; b < k / 32; b++) { decode_##type(row, b, w); for (int v = 0; v < NV; v++) store(out + 32 * (long)b + v * VW, w[v]); } break;
static void unpack_row(const Matrix *m, const uint8_t *row, float *out) {
  int k = m->k; vf w[NV];
  switch (m->type) {
    UNPACK(F32) UNPACK(F16) UNPACK(BF16) UNPACK(Q4_0) UNPACK(Q4_1) UNPACK(Q5_0) UNPACK(Q5_1) UNPACK(Q8_0) UNPACK(Q4_K) UNPACK(Q5_K) UNPACK(Q6_K)
  }
  for (int j = k / 32 * 32; j < k; j++) { /* only floats may have a rest */
    if (m->type == F32) memcpy(out + j, row + 4 * (long)j, 4);
    else if (m->type == F16) out[j] = half(row + 2 * (long)j);
    else { uint32_t bits = 0; memcpy((char *)&bits + 2, row + 2 * (long)j, 2); memcpy(out + j, &bits, 4); }
  }
}

/* Where the products of weight rows [first, last) go: y[r * stride + i], plus the bias; where `add`, scale times that is added to y. */
typedef struct { float *y; long stride; int add; float scale; } Target;

static inline void put(const Matrix *m, const Target *to, int r, int i, int num, const float *out) {
  float *y = to->y + r * to->stride + i;
  for (int j = 0; j < num; j++) {
    float t = out[j] + (m->bias ? m->bias[i + j] : 0.0f);
    y[j] = to->add ? y[j] + to->scale * t : t;
  }
}

/* weight rows w[0..num) by all rows of x, as packed as they are */
static void multiply_packed(const Matrix *m, const uint8_t *const *w, int i, int num, const float *x, long x_stride, int rows, const Target *to) {
  float out[16];
  for (int r = 0, size; r < rows; r += size) {
    int left = rows - r, level = left >= 4 ? 2 : left >= 2 ? 1 : 0;
    size = 1 << level;
    PACKED_TILES[m->type][level][num == 4](w, x + r * x_stride, x_stride, m->k, out);
    for (int l = 0; l < size; l++) put(m, to, r + l, i, num, out + 4 * l);
  }
}

/* the same with weights that are floats */
static void multiply_floats(const Matrix *m, const uint8_t *const *w, int i, int num, const float *x, long x_stride, int rows, const Target *to) {
  float out[4 * FLOAT_ROWS];
  for (int r = 0, size; r < rows; r += size) {
    size = rows - r < FLOAT_ROWS ? rows - r : FLOAT_ROWS;
    FLOAT_TILES[size][num == 4](w, x + r * x_stride, x_stride, m->k, out);
    for (int l = 0; l < size; l++) put(m, to, r + l, i, num, out + 4 * l);
  }
}

#define PANEL_FLOATS 32768
static inline int panel_rows(int k) { int n = PANEL_FLOATS / k & ~3; return n < 4 ? 4 : n > 32 ? 32 : n; }
static inline long panel_floats(int k) { return (long)panel_rows(k) * k; }

/* weight rows [first, last) by all rows of x; `panel` has room for panel_floats(k) */
static void multiply(const Matrix *m, int first, int last, const float *x, long x_stride, int rows, Target to, float *panel) {
  const uint8_t *w[4];
  if (m->type == F32 || (rows <= PACKED_ROWS && m->k % 32 == 0)) {
    for (int i = first, num; i < last; i += num) {
      num = last - i >= 4 ? 4 : 1;
      for (int j = 0; j < num; j++) w[j] = row_of(m, i + j);
      (m->type == F32 ? multiply_floats : multiply_packed)(m, w, i, num, x, x_stride, rows, &to);
    }
    return;
  }
  int size = panel_rows(m->k);
  for (int start = first; start < last; start += size) {
    int end = last - start < size ? last : start + size;
    for (int i = start; i < end; i++) unpack_row(m, row_of(m, i), panel + (long)(i - start) * m->k);
    for (int r = 0; r < rows; r += FLOAT_ROWS) {
      int R = rows - r < FLOAT_ROWS ? rows - r : FLOAT_ROWS; Target part = to; part.y += r * to.stride;
      for (int i = start, num; i < end; i += num) {
        num = end - i >= 4 ? 4 : 1;
        for (int j = 0; j < num; j++) w[j] = (const uint8_t *)(panel + (long)(i - start + j) * m->k);
        multiply_floats(m, w, i, num, x + r * x_stride, x_stride, R, &part);
      }
    }
  }
}

/* ---- threads ---- */

/* A region is a list of phases. Each phase has parts that any thread may take; a phase begins when all parts of the one before are done. */
typedef struct Region Region;
struct Region {
  int phases;
  int (*count)(const Region *, int phase);                    /* number of parts */
  void (*run)(const Region *, int phase, int part, int tid);
  int (*is_small)(const Region *, int phase);                 /* whether the thread that ended the phase before does it alone */
  const void *arg;
  atomic_int *next, *done;                                    /* parts taken and parts done of each phase, zero at first */
  atomic_int phase;
};

static inline void pause_(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void end_phase(Region *g, int phase, int tid) {
  while (++phase < g->phases && g->is_small(g, phase))
    for (int part = 0, num = g->count(g, phase); part < num; part++) g->run(g, phase, part, tid);
  atomic_store_explicit(&g->phase, phase, memory_order_release);
}

static void work_on(Region *g, int tid) {
  for (int phase; (phase = atomic_load_explicit(&g->phase, memory_order_acquire)) < g->phases;) {
    int num = g->count(g, phase), part;
    while ((part = atomic_fetch_add_explicit(&g->next[phase], 1, memory_order_relaxed)) < num) {
      g->run(g, phase, part, tid);
      if (atomic_fetch_add_explicit(&g->done[phase], 1, memory_order_acq_rel) == num - 1) end_phase(g, phase, tid);
    }
    for (int spins = 0; atomic_load_explicit(&g->phase, memory_order_acquire) == phase; spins++) {
      if (spins < 4000) pause_(); else sched_yield();
    }
  }
}

/* The threads of an OpenMP runtime that the process has already (GOMP_parallel), if the caller named it: torch's threads wait for work by
   spinning, and would take the cores from other threads. It joins all its threads at the end of a region. */
typedef void Parallel(void (*work)(void *), void *arg, unsigned threads, unsigned flags);
typedef struct { Region *region; int threads; atomic_int next; } Team;
static Parallel *_Atomic shared_threads;
static void join_team(void *arg) {
  Team *team = arg; int tid = atomic_fetch_add(&team->next, 1);
  if (tid < team->threads) work_on(team->region, tid);
}

/* Otherwise: threads of our own that help; one region at a time. A thread that comes late finds the gate closed, and nobody waits for it. */
#define MOST_THREADS 256
#define CLOSED (1 << 30)
static struct {
  pthread_mutex_t use, lock; pthread_cond_t wake;
  atomic_int gate, ticket; Region *region; int wanted, started, is_fork_safe;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, CLOSED, 0, NULL, 0, 0, 0};

static void *help(void *number) {
  int tid = (int)(intptr_t)number, seen = 0;
  for (;;) {
    for (int spins = 0; atomic_load_explicit(&pool.ticket, memory_order_acquire) == seen && spins < 2000; spins++) pause_();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.ticket) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    seen = atomic_load(&pool.ticket);
    pthread_mutex_unlock(&pool.lock);
    int gate = atomic_load(&pool.gate);
    while (!(gate & CLOSED) && !atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) {}
    if (gate & CLOSED) continue;
    if (tid < pool.wanted) work_on(pool.region, tid);
    atomic_fetch_sub(&pool.gate, 1);
  }
  return NULL;
}

/* A forked child has none of its parent's threads, but the locks that they held and the condition that they waited for. */
static void forget_threads(void) {
  pool.use = pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.started = 0; atomic_store(&pool.gate, CLOSED);
  atomic_store(&shared_threads, (Parallel *)NULL);
}
static void watch_forks(void) { if (!pool.is_fork_safe) pool.is_fork_safe = !pthread_atfork(NULL, NULL, forget_threads); }

static void start_threads(int threads) {
  watch_forks();
  pthread_attr_t attributes; pthread_attr_init(&attributes); pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (pthread_t thread; pool.started < threads - 1; pool.started++)
    if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)(pool.started + 1))) break; /* fewer threads do the same work */
  pthread_attr_destroy(&attributes);
}

static void run_region(Region *g, int threads) {
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  Parallel *parallel = atomic_load(&shared_threads);
  if (parallel && threads > 1) { Team team = {g, threads, 0}; parallel(join_team, &team, (unsigned)threads, 0); return; }
  if (threads < 2 || pthread_mutex_trylock(&pool.use)) { work_on(g, 0); return; } /* another engine has the threads: go on alone */
  start_threads(threads);
  pthread_mutex_lock(&pool.lock);
  pool.region = g; pool.wanted = threads; atomic_store(&pool.gate, 0);
  atomic_fetch_add(&pool.ticket, 1);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  work_on(g, 0);
  atomic_fetch_or(&pool.gate, CLOSED);
  for (int spins = 0; atomic_load_explicit(&pool.gate, memory_order_acquire) != CLOSED; spins++) { if (spins < 4000) pause_(); else sched_yield(); }
  pthread_mutex_unlock(&pool.use);
}

/* rows of a matrix in one part: small enough to share evenly, large enough that taking a part costs little */
static inline int part_rows(int n, int threads) { int size = (n / (threads * 4) + 3) & ~3; return size < 8 ? 8 : size; }
static inline int num_parts(int n, int size) { return (n + size - 1) / size; }

/* ---- products for callers ---- */

typedef struct { const Matrix *m; const float *x; float *y; float *panels; int rows, size; } Product;
static int one_is_small(const Region *g, int phase) { (void)g; (void)phase; return 0; }
static int product_parts(const Region *g, int phase) { const Product *p = g->arg; (void)phase; return num_parts(p->m->n, p->size); }
static void product_part(const Region *g, int phase, int part, int tid) {
  const Product *p = g->arg; int first = part * p->size, last = first + p->size < p->m->n ? first + p->size : p->m->n; (void)phase;
  multiply(p->m, first, last, p->x, p->m->k, p->rows, (Target){p->y, p->m->n, 0, 1}, p->panels + tid * panel_floats(p->m->k));
}
static void unpack_part(const Region *g, int phase, int part, int tid) {
  const Product *p = g->arg; (void)phase; (void)tid;
  for (int i = part * p->size; i < (part + 1) * p->size && i < p->m->n; i++) unpack_row(p->m, row_of(p->m, i), p->y + (long)i * p->m->k);
}
static void run_product(const Product *p, void (*run)(const Region *, int, int, int), int threads) {
  atomic_int next = 0, done = 0;
  if (!p->m->n) return; /* a phase without parts would never end */
  Region g = {1, product_parts, run, one_is_small, p, &next, &done, 0};
  run_region(&g, threads);
}

/* y[rows][n] = x[rows][k] W' + bias; `panels` has room for panel_floats(k) a thread. The caller checked shapes and types. */
EXPORT void FN(linear)(const Matrix *m, const float *x, float *y, int rows, float *panels, int threads) {
  Product p = {m, x, y, panels, rows, part_rows(m->n, threads)};
  run_product(&p, product_part, threads);
}
EXPORT void FN(unpack)(const Matrix *m, float *out, int threads) {
  Product p = {m, NULL, out, NULL, 0, part_rows(m->n, threads)};
  run_product(&p, unpack_part, threads);
}
/* rows `ids` of the matrix, unpacked */
EXPORT void FN(gather)(const Matrix *m, const int64_t *ids, int num, float *out) {
  for (int i = 0; i < num; i++) unpack_row(m, row_of(m, ids[i]), out + (long)i * m->k);
}
EXPORT int64_t FN(panel_floats)(int k) { return panel_floats(k); }
EXPORT int FN(abi)(void) { return ABI; }
/* Use the threads behind this GOMP_parallel from now on; NULL: threads of our own. A forked child always has its own. */
EXPORT void FN(share_threads)(Parallel *parallel) { watch_forks(); atomic_store(&shared_threads, parallel); }

/* ---- the whole step ---- */

enum { SILU = 0, GELU_TANH = 1 };

/* A pointer of NULL is a part that the layer does not have. norm_attention and norm_mlp_out are applied to what is added to x. */
typedef struct {
  const float *norm_in, *norm_attention, *norm_mlp, *norm_mlp_out, *q_norm, *k_norm;
  Matrix q, k, v, o, gate, up, down;
  int32_t group, layer_in_group, rotary, window; /* rotary -1: no rotation; window 0: none */
} Layer;
typedef struct {
  int32_t layers, hidden, heads, kv_heads, dim, inter, groups, rotary_dim, activation, unused;
  float eps, scale, score_cap, logit_cap, residual, unused2;
  const float *norm; const Layer *layer; Matrix head;
} Model;
/* The rows of one group on one lane. `rows` are those before this step; `layer` and `head` are strides in floats. */
typedef struct { float *k, *v; int64_t layer, head, rows; } Rows;
/* `tokens` tokens on each of `lanes` lanes, at these positions. cosines and sines: [kinds of rotation][table_rows][rotary_dim]. Logits
   of the last `logit_rows` rows are computed. */
typedef struct {
  const Rows *rows; const int32_t *positions; const float *cosines, *sines; float *x, *logits;
  int32_t lanes, tokens, logit_rows, threads; int64_t table_rows;
} Batch;

#define SEGMENT 128 /* rows of a lane that one part attends to */
#define KEYS 64     /* rows that queries of a run look at together */
#define QUERIES 16  /* tokens of a run that look at them together */

typedef struct {
  const Model *m; const Batch *b;
  float *h, *qkv, *attended, *partial, *delta, *mlp, *own; long own_floats; int rows, segments, size_o, size_mlp, size_down, size_head;
} Step;

static inline int width(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->dim; }
static inline long larger(long a, long b) { return a > b ? a : b; }
static inline long rounded(long n) { return (n + 15) & ~15L; }

static int most_rows(const Batch *b, int groups) {
  int64_t most = 0;
  for (int i = 0; i < b->lanes * groups; i++) most = larger(most, b->rows[i].rows);
  return (int)most + b->tokens;
}
static int num_segments(const Batch *b, int groups) { return b->tokens > 1 ? 1 : num_parts(most_rows(b, groups), SEGMENT); }
static long own_floats(const Model *m, int is_run) {
  int g = m->heads / m->kv_heads; long widest = larger(m->hidden, larger(m->inter, m->heads * m->dim));
  long attention = is_run ? (long)KEYS * m->dim + (long)QUERIES * g * (KEYS + 2 * m->dim + 2) : (long)g * SEGMENT;
  return rounded(larger(panel_floats((int)widest) + widest, attention + PANEL_FLOATS));
}
static long step_floats(const Model *m, const Batch *b, int segments) {
  long rows = (long)b->lanes * b->tokens;
  return rounded(rows * m->hidden) * 2 + rounded(rows * width(m)) + rounded(rows * m->heads * m->dim) + rounded(rows * 2 * m->inter)
       + rounded(segments > 1 ? rows * segments * m->heads * (m->dim + 2) : 0) + b->threads * own_floats(m, b->tokens > 1);
}

static void normalize(const float *x, const float *weight, float *y, int k, float eps) {
  vf sum = {0}; int whole = k / VW * VW;
  for (int j = 0; j < whole; j += VW) { vf a = load(x + j); sum = fma_(a, a, sum); }
  float t = total(sum);
  for (int j = whole; j < k; j++) t += x[j] * x[j];
  t = 1.0f / sqrtf(t / (float)k + eps);
  for (int j = 0; j < whole; j += VW) store(y + j, load(weight + j) * (load(x + j) * t));
  for (int j = whole; j < k; j++) y[j] = weight[j] * (x[j] * t);
}

static void rotate(float *x, const float *c, const float *s, int dim) {
  for (int d = 0; d < dim / 2; d++) {
    float a = x[d], b = x[d + dim / 2];
    x[d] = a * c[d] - b * s[d]; x[d + dim / 2] = b * c[d + dim / 2] + a * s[d + dim / 2];
  }
}

/* what the part before left to add, then the norm for the part that follows */
static void prepare_row(const Step *s, int row, const float *norm_delta, const float *norm) {
  int k = s->m->hidden; float *x = s->b->x + (long)row * k, *h = s->h + (long)row * k, *delta = s->delta + (long)row * k;
  if (norm_delta) {
    normalize(delta, norm_delta, delta, k, s->m->eps);
    for (int j = 0; j < k; j++) x[j] += s->m->residual * delta[j];
  }
  if (norm) normalize(x, norm, h, k, s->m->eps); else memcpy(h, x, sizeof(float) * k);
}

/* one head of queries, keys or values for all rows: product, norm, rotation; keys and values go to their lanes */
static void project_head(const Step *s, const Layer *l, int head, float *own) {
  const Model *m = s->m; const Batch *b = s->b; int D = m->dim, W = width(m), nh = m->heads, nk = m->kv_heads;
  int kind = head < nh ? 0 : head < nh + nk ? 1 : 2, index = head - (kind == 0 ? 0 : kind == 1 ? nh : nh + nk);
  const Matrix *w = kind == 0 ? &l->q : kind == 1 ? &l->k : &l->v;
  multiply(w, index * D, index * D + D, s->h, m->hidden, s->rows, (Target){s->qkv + (head - index) * D, W, 0, 1}, own);
  const float *norm = kind == 0 ? l->q_norm : kind == 1 ? l->k_norm : NULL;
  for (int r = 0; r < s->rows; r++) {
    float *x = s->qkv + (long)r * W + (long)head * D;
    if (norm) normalize(x, norm, x, D, m->eps);
    if (kind < 2 && l->rotary >= 0) {
      long at = (l->rotary * b->table_rows + b->positions[r]) * m->rotary_dim;
      rotate(x, b->cosines + at, b->sines + at, m->rotary_dim);
    }
    if (kind) {
      const Rows *lane = b->rows + (long)(r / b->tokens) * m->groups + l->group;
      float *to = kind == 1 ? lane->k : lane->v;
      memcpy(to + l->layer_in_group * lane->layer + index * lane->head + (lane->rows + r % b->tokens) * D, x, sizeof(float) * D);
    }
  }
}

static inline void cap_scores(float *p, int n, float cap) {
  if (cap > 0) for (int i = 0; i < n; i++) p[i] = cap * tanhf(p[i] / cap);
}

/* q[D] by rows of keys: scores[i]; four rows at a time, each summed in the same order as alone */
static void score_rows(const float *q, const float *keys, int n, int D, float scale, float *scores) {
  int whole = D / VW * VW, i = 0;
  for (; i + 4 <= n; i += 4) {
    const float *k0 = keys + (long)i * D, *k1 = k0 + D, *k2 = k1 + D, *k3 = k2 + D; vf a = {0}, b = {0}, c = {0}, d = {0};
    for (int j = 0; j < whole; j += VW) {
      vf t = load(q + j); a = fma_(t, load(k0 + j), a); b = fma_(t, load(k1 + j), b); c = fma_(t, load(k2 + j), c); d = fma_(t, load(k3 + j), d);
    }
    v4 t = total4(a, b, c, d); float out[4]; memcpy(out, &t, sizeof t);
    for (int j = whole; j < D; j++) { out[0] += q[j] * k0[j]; out[1] += q[j] * k1[j]; out[2] += q[j] * k2[j]; out[3] += q[j] * k3[j]; }
    for (int j = 0; j < 4; j++) scores[i + j] = out[j] * scale;
  }
  for (; i < n; i++) {
    vf a = {0}; for (int j = 0; j < whole; j += VW) a = fma_(load(q + j), load(keys + (long)i * D + j), a);
    float t = total(a); for (int j = whole; j < D; j++) t += q[j] * keys[(long)i * D + j];
    scores[i] = t * scale;
  }
}

/* the largest of p[0..n) and `top`, in any order: a largest number has no rounding */
static float largest(const float *p, int n, float top) {
  int i = 0;
  if (n >= VW) {
    vf t = load(p); float lanes[VW];
    for (i = VW; i + VW <= n; i += VW) t = max_(t, load(p + i));
    store(lanes, t);
    for (int j = 0; j < VW; j++) top = lanes[j] > top ? lanes[j] : top;
  }
  for (; i < n; i++) top = p[i] > top ? p[i] : top;
  return top;
}

/* exp(p - top) in place; returns the sum */
static float exponentials(float *p, int n, float top) {
  vf sum = {0}; int i = 0;
  for (; i + VW <= n; i += VW) { vf e = exp_(load(p + i) - top); store(p + i, e); sum = sum + e; }
  float t = total(sum);
  for (; i < n; i++) { vf e = exp_(splat(p[i] - top)); p[i] = e[0]; t += p[i]; }
  return t;
}

/* out[D] = sum of p[i] times row i of values */
static void weigh_rows(const float *p, const float *values, int n, int D, float *out) {
  int j = 0;
  for (; j + 4 * VW <= D; j += 4 * VW) {
    vf a = {0}, b = {0}, c = {0}, d = {0};
    for (int i = 0; i < n; i++) {
      const float *v = values + (long)i * D + j; vf t = splat(p[i]);
      a = fma_(t, load(v), a); b = fma_(t, load(v + VW), b); c = fma_(t, load(v + 2 * VW), c); d = fma_(t, load(v + 3 * VW), d);
    }
    store(out + j, a); store(out + j + VW, b); store(out + j + 2 * VW, c); store(out + j + 3 * VW, d);
  }
  for (; j + VW <= D; j += VW) { vf a = {0}; for (int i = 0; i < n; i++) a = fma_(splat(p[i]), load(values + (long)i * D + j), a); store(out + j, a); }
  for (; j < D; j++) { float t = 0; for (int i = 0; i < n; i++) t += p[i] * values[(long)i * D + j]; out[j] = t; }
}

/* One token's queries of one key head over one segment of its lane's rows. Of several segments each leaves its largest score, its sum and
   its unscaled output; `join_segments` puts them together. */
static void attend_segment(const Step *s, const Layer *l, int row, int head, int segment, float *own) {
  const Model *m = s->m; int D = m->dim, g = m->heads / m->kv_heads;
  const Rows *lane = s->b->rows + (long)row * m->groups + l->group;
  int64_t end = lane->rows + 1, first = l->window && end > l->window ? end - l->window : 0, start = (int64_t)segment * SEGMENT, stop = start + SEGMENT;
  if (start < first) start = first;
  if (stop > end) stop = end;
  long at = ((long)row * s->segments + segment) * m->heads * (D + 2) + (long)head * g * (D + 2);
  const float *K = lane->k + l->layer_in_group * lane->layer + head * lane->head, *V = lane->v + l->layer_in_group * lane->layer + head * lane->head;
  for (int i = 0; i < g; i++) {
    float *p = own + (long)i * SEGMENT, *partial = s->segments > 1 ? s->partial + at + i * (D + 2) : NULL;
    if (start >= stop) { partial[0] = -INFINITY; partial[1] = 0; memset(partial + 2, 0, sizeof(float) * D); continue; }
    int n = (int)(stop - start);
    score_rows(s->qkv + (long)row * width(m) + (long)(head * g + i) * D, K + start * D, n, D, m->scale, p);
    cap_scores(p, n, m->score_cap);
    float top = largest(p, n, -INFINITY), sum = exponentials(p, n, top);
    if (partial) { partial[0] = top; partial[1] = sum; weigh_rows(p, V + start * D, n, D, partial + 2); continue; }
    float *out = s->attended + ((long)row * m->heads + head * g + i) * D;
    weigh_rows(p, V + start * D, n, D, out);
    for (int d = 0; d < D; d++) out[d] /= sum;
  }
}

static void join_segments(const Step *s, int row) {
  const Model *m = s->m; int D = m->dim;
  for (int head = 0; head < m->heads; head++) {
    const float *first = s->partial + (long)row * s->segments * m->heads * (D + 2) + (long)head * (D + 2); long stride = (long)m->heads * (D + 2);
    float *out = s->attended + ((long)row * m->heads + head) * D, top = -INFINITY, sum = 0;
    for (int i = 0; i < s->segments; i++) top = first[i * stride] > top ? first[i * stride] : top;
    memset(out, 0, sizeof(float) * D);
    for (int i = 0; i < s->segments; i++) {
      const float *part = first + i * stride;
      if (part[1] == 0) continue;
      float f = expf(part[0] - top); sum += f * part[1];
      for (int d = 0; d < D; d++) out[d] += f * part[2 + d];
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
  }
}

/* keys [n][D] as [D][KEYS], zeros beyond n */
static void transpose_keys(const float *keys, int n, int D, float *out) {
  int i = 0;
  for (; i + 4 <= n && D % 4 == 0; i += 4)
    for (int d = 0; d < D; d += 4) {
      v4 a, b, c, e; const float *p = keys + (long)i * D + d;
      memcpy(&a, p, 16); memcpy(&b, p + D, 16); memcpy(&c, p + 2 * D, 16); memcpy(&e, p + 3 * D, 16);
      v4 ab0 = SHUFFLE(a, b, 0, 4, 1, 5), ab1 = SHUFFLE(a, b, 2, 6, 3, 7);
      v4 ce0 = SHUFFLE(c, e, 0, 4, 1, 5), ce1 = SHUFFLE(c, e, 2, 6, 3, 7);
      v4 t0 = SHUFFLE(ab0, ce0, 0, 1, 4, 5), t1 = SHUFFLE(ab0, ce0, 2, 3, 6, 7);
      v4 t2 = SHUFFLE(ab1, ce1, 0, 1, 4, 5), t3 = SHUFFLE(ab1, ce1, 2, 3, 6, 7);
      float *o = out + (long)d * KEYS + i;
      memcpy(o, &t0, 16); memcpy(o + KEYS, &t1, 16); memcpy(o + 2 * KEYS, &t2, 16); memcpy(o + 3 * KEYS, &t3, 16);
    }
  for (; i < KEYS; i++) for (int d = 0; d < D; d++) out[(long)d * KEYS + i] = i < n ? keys[(long)i * D + d] : 0;
}

#define AT_ONCE 4 /* queries whose sums fill the registers */
/* scores[num][KEYS] of `num` queries of D numbers with transposed keys */
static inline __attribute__((always_inline)) void score_block(const float *const *q, int num, const float *keys, int D, float scale, float *scores) {
  for (int c = 0; c < KEYS; c += 4 * VW < KEYS ? 4 * VW : KEYS) {
    enum { W = 4 * VW < KEYS ? 4 : KEYS / VW };
    vf sum[AT_ONCE][W]; UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < W; v++) sum[i][v] = (vf){0};
    for (int d = 0; d < D; d++) {
      vf k[W]; UNROLL for (int v = 0; v < W; v++) k[v] = load(keys + (long)d * KEYS + c + v * VW);
      UNROLL for (int i = 0; i < AT_ONCE; i++) { vf t = splat(q[i < num ? i : 0][d]); UNROLL for (int v = 0; v < W; v++) sum[i][v] = fma_(t, k[v], sum[i][v]); }
    }
    for (int i = 0; i < num; i++) UNROLL for (int v = 0; v < W; v++) store(scores + (long)i * KEYS + c + v * VW, sum[i][v] * scale);
  }
}
/* out[i][D] = factor[i] * out[i] + the rows of values weighed by p[i][n] */
static inline __attribute__((always_inline)) void weigh_block(const float *p, int num, const float *factor, const float *values, int n, int D, float *out) {
  int j = 0;
  for (; j + 4 * VW <= D; j += 4 * VW) {
    vf sum[AT_ONCE][4];
    UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < 4; v++) sum[i][v] = i < num ? load(out + (long)i * D + j + v * VW) * factor[i] : (vf){0};
    for (int r = 0; r < n; r++) {
      vf a[4]; UNROLL for (int v = 0; v < 4; v++) a[v] = load(values + (long)r * D + j + v * VW);
      UNROLL for (int i = 0; i < AT_ONCE; i++) { vf t = splat(p[(i < num ? i : 0) * KEYS + r]); UNROLL for (int v = 0; v < 4; v++) sum[i][v] = fma_(t, a[v], sum[i][v]); }
    }
    for (int i = 0; i < num; i++) UNROLL for (int v = 0; v < 4; v++) store(out + (long)i * D + j + v * VW, sum[i][v]);
  }
  for (; j < D; j++) for (int i = 0; i < num; i++) {
    float t = out[(long)i * D + j] * factor[i];
    for (int r = 0; r < n; r++) t += p[i * KEYS + r] * values[(long)r * D + j];
    out[(long)i * D + j] = t;
  }
}

/* Up to QUERIES tokens of a run with the queries of one key head, over all rows that they may see */
static void attend_run(const Step *s, const Layer *l, int lane_index, int block, int head, float *own) {
  const Model *m = s->m; int D = m->dim, g = m->heads / m->kv_heads, T = s->b->tokens, W = width(m);
  const Rows *lane = s->b->rows + (long)lane_index * m->groups + l->group;
  int first = block * QUERIES, last = first + QUERIES < T ? first + QUERIES : T, num = (last - first) * g;
  float *keys = own, *scores = keys + (long)KEYS * D, *out = scores + (long)QUERIES * g * KEYS, *top = out + (long)QUERIES * g * D, *sum = top + QUERIES * g;
  const float *K = lane->k + l->layer_in_group * lane->layer + head * lane->head, *V = lane->v + l->layer_in_group * lane->layer + head * lane->head;
  const float *q[AT_ONCE]; float factor[AT_ONCE];
  memset(out, 0, sizeof(float) * num * D);
  for (int i = 0; i < num; i++) { top[i] = -INFINITY; sum[i] = 0; }
  int64_t newest = lane->rows + last, oldest = l->window && lane->rows + first + 1 > l->window ? lane->rows + first + 1 - l->window : 0;
  for (int64_t start = oldest / KEYS * KEYS; start < newest; start += KEYS) {
    int n = newest - start < KEYS ? (int)(newest - start) : KEYS;
    transpose_keys(K + start * D, n, D, keys);
    for (int i = 0; i < num; i += AT_ONCE) {
      int some = num - i < AT_ONCE ? num - i : AT_ONCE; float *p = scores;
      for (int j = 0; j < some; j++) q[j] = s->qkv + ((long)lane_index * T + first + (i + j) / g) * W + (long)(head * g + (i + j) % g) * D;
      for (int j = some; j < AT_ONCE; j++) q[j] = q[0];
      score_block(q, some, keys, D, m->scale, p);
      for (int j = 0; j < some; j++) {
        float *mine = p + (long)j * KEYS; int64_t own_row = lane->rows + first + (i + j) / g;
        int64_t from = l->window && own_row + 1 > l->window ? own_row + 1 - l->window : 0;
        int low = from > start ? (from - start < KEYS ? (int)(from - start) : KEYS) : 0, high = own_row + 1 - start < n ? (int)(own_row + 1 - start) : n;
        if (high < low) high = low;
        cap_scores(mine, KEYS, m->score_cap);
        for (int c = 0; c < low; c++) mine[c] = -INFINITY;
        for (int c = high; c < KEYS; c++) mine[c] = -INFINITY;
        float best = largest(mine, KEYS, top[i + j]);
        if (best == -INFINITY) { memset(mine, 0, sizeof(float) * KEYS); factor[j] = 1; continue; }
        factor[j] = top[i + j] == -INFINITY ? 0 : expf(top[i + j] - best); top[i + j] = best;
        sum[i + j] = sum[i + j] * factor[j] + exponentials(mine, KEYS, best);
      }
      weigh_block(p, some, factor, V + start * D, n, D, out + (long)i * D);
    }
  }
  for (int i = 0; i < num; i++) {
    float *to = s->attended + (((long)lane_index * T + first + i / g) * m->heads + head * g + i % g) * D;
    for (int d = 0; d < D; d++) to[d] = out[(long)i * D + d] / sum[i];
  }
}

/* columns [first, last) of the activated product of gate and up */
static void gate_up(const Step *s, const Layer *l, int first, int last, float *own) {
  const Model *m = s->m; long I = m->inter;
  float *gates = s->mlp, *ups = s->mlp + (long)s->rows * I;
  multiply(&l->gate, first, last, s->h, m->hidden, s->rows, (Target){gates, I, 0, 1}, own);
  multiply(&l->up, first, last, s->h, m->hidden, s->rows, (Target){ups, I, 0, 1}, own);
  for (int r = 0; r < s->rows; r++) {
    float *a = gates + r * I, *b = ups + r * I; int j = first;
    for (; j < last; j += VW) {
      float in[VW], with[VW]; int n = last - j < VW ? last - j : VW; memset(in, 0, sizeof in); memset(with, 0, sizeof with);
      memcpy(in, a + j, sizeof(float) * n); memcpy(with, b + j, sizeof(float) * n);
      vf x = load(in), y = m->activation == SILU ? x / (1.0f + exp_(-x)) : 0.5f * x * (1.0f + tanh_(0.7978845608f * (x + 0.044715f * x * x * x)));
      store(in, y * load(with)); memcpy(a + j, in, sizeof(float) * n);
    }
  }
}

enum { PREPARE, PROJECT, ATTEND, JOIN_PARTS, OUT, PREPARE_MLP, GATE_UP, DOWN, PHASES };

static int step_parts(const Region *g, int phase) {
  const Step *s = g->arg; const Model *m = s->m; int layer = phase / PHASES, kind = phase % PHASES;
  if (layer == m->layers) return kind == 0 ? s->rows : num_parts(m->head.n, s->size_head);
  switch (kind) {
    case PROJECT: return m->heads + 2 * m->kv_heads;
    case ATTEND: return s->b->tokens > 1 ? s->b->lanes * num_parts(s->b->tokens, QUERIES) * m->kv_heads : s->rows * m->kv_heads * s->segments;
    case OUT: return num_parts(m->hidden, s->size_o);
    case GATE_UP: return num_parts(m->layer[layer].gate.n, s->size_mlp);
    case DOWN: return num_parts(m->hidden, s->size_down);
    default: return s->rows; /* PREPARE, JOIN_PARTS, PREPARE_MLP */
  }
}
static int step_is_small(const Region *g, int phase) {
  const Step *s = g->arg; int kind = phase % PHASES;
  if (phase / PHASES < s->m->layers && kind == JOIN_PARTS) return s->segments == 1 || s->rows == 1;
  return (kind == PREPARE || (kind == PREPARE_MLP && phase / PHASES < s->m->layers)) && (long)s->rows * s->m->hidden <= 8192;
}
static void add_product(const Step *s, const Matrix *w, const float *x, int part, int size, const float *norm, float *own) {
  int first = part * size, last = first + size < w->n ? first + size : w->n; long H = s->m->hidden;
  multiply(w, first, last, x, w->k, s->rows, norm ? (Target){s->delta, H, 0, 1} : (Target){s->b->x, H, 1, s->m->residual}, own);
}
static void step_part(const Region *g, int phase, int part, int tid) {
  const Step *s = g->arg; const Model *m = s->m; int layer = phase / PHASES; float *own = s->own + tid * s->own_floats;
  const Layer *l = m->layer + layer, *before = layer ? l - 1 : NULL;
  if (layer == m->layers) {
    if (phase % PHASES == 0) { prepare_row(s, part, before->norm_mlp_out, m->norm); return; }
    int first = part * s->size_head, last = first + s->size_head < m->head.n ? first + s->size_head : m->head.n, skipped = s->rows - s->b->logit_rows;
    multiply(&m->head, first, last, s->h + (long)skipped * m->hidden, m->hidden, s->b->logit_rows, (Target){s->b->logits, m->head.n, 0, 1}, own);
    for (int r = 0; r < s->b->logit_rows; r++) cap_scores(s->b->logits + (long)r * m->head.n + first, last - first, m->logit_cap);
    return;
  }
  switch (phase % PHASES) {
    case PREPARE: prepare_row(s, part, before ? before->norm_mlp_out : NULL, l->norm_in); return;
    case PROJECT: project_head(s, l, part, own); return;
    case ATTEND:
      if (s->b->tokens > 1) { /* the last tokens see most: they come first */
        int blocks = num_parts(s->b->tokens, QUERIES), at = part / m->kv_heads;
        attend_run(s, l, at / blocks, blocks - 1 - at % blocks, part % m->kv_heads, own);
      } else attend_segment(s, l, part / (m->kv_heads * s->segments), part / s->segments % m->kv_heads, part % s->segments, own);
      return;
    case JOIN_PARTS: if (s->segments > 1) join_segments(s, part); return;
    case OUT: add_product(s, &l->o, s->attended, part, s->size_o, l->norm_attention, own); return;
    case PREPARE_MLP: prepare_row(s, part, l->norm_attention, l->norm_mlp); return;
    case GATE_UP: { int first = part * s->size_mlp, last = first + s->size_mlp < l->gate.n ? first + s->size_mlp : l->gate.n; gate_up(s, l, first, last, own); return; }
    default: add_product(s, &l->down, s->mlp, part, s->size_down, l->norm_mlp_out, own); return;
  }
}

/* Floats of `work` that a step takes. */
EXPORT int64_t FN(step_floats)(const Model *m, const Batch *b) { return step_floats(m, b, num_segments(b, m->groups)); }

/* One step: x holds the embeddings [lanes * tokens][hidden], and is changed. Each lane has room for its new rows. `counters` are
   2 * (8 * layers + 2) zeros. */
EXPORT void FN(step)(const Model *m, const Batch *b, float *work, int32_t *counters) {
  Step s = {.m = m, .b = b, .rows = b->lanes * b->tokens, .segments = num_segments(b, m->groups)};
  s.h = work; s.delta = s.h + rounded((long)s.rows * m->hidden); s.qkv = s.delta + rounded((long)s.rows * m->hidden);
  s.attended = s.qkv + rounded((long)s.rows * width(m)); s.mlp = s.attended + rounded((long)s.rows * m->heads * m->dim);
  s.partial = s.mlp + rounded((long)s.rows * 2 * m->inter);
  s.own = s.partial + rounded(s.segments > 1 ? (long)s.rows * s.segments * m->heads * (m->dim + 2) : 0);
  s.own_floats = own_floats(m, b->tokens > 1);
  s.size_o = part_rows(m->hidden, b->threads); s.size_down = s.size_o; s.size_mlp = part_rows(m->inter, b->threads); s.size_head = part_rows(m->head.n, b->threads * 4);
  int phases = m->layers * PHASES + 2;
  Region g = {phases, step_parts, step_part, step_is_small, &s, (atomic_int *)counters, (atomic_int *)counters + phases, 0};
  if (step_is_small(&g, 0)) end_phase(&g, -1, 0);
  run_region(&g, b->threads);
}

#ifdef ISA_PLAIN_OBJECT
/* The best instruction set that this machine can run, of those that this file can be compiled for. */
EXPORT const char *bough_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
      && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return "v3";
  return "plain";
#elif defined(__aarch64__)
  return "neon";
#else
  return "plain";
#endif
}
#endif
