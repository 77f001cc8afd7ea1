/* Vectors of VW floats or integers, for every instruction set that this is compiled for. */

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

#if VW > 4 || defined(__aarch64__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL /* plain C is to be small, not fast */
#endif

/* n floats as float16 numbers, rounded to the nearest */
#if defined(__F16C__)
static inline void to_halves(const float *x, uint8_t *out, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(out + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) { uint16_t h = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT); memcpy(out + 2 * i, &h, 2); }
}
#elif defined(__aarch64__) && !defined(ISA_PLAIN_OBJECT)
static inline void to_halves(const float *x, uint8_t *out, int n) { for (int i = 0; i < n; i++) { __fp16 h = x[i]; memcpy(out + 2 * i, &h, 2); } }
#else
static inline void to_halves(const float *x, uint8_t *out, int n) {
  for (int i = 0; i < n; i++) {
    uint32_t bits; memcpy(&bits, x + i, 4); uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff; uint16_t h;
    if (rest > 0x7f800000) h = 0x7e00;
    else if (rest >= 0x477ff000) h = 0x7c00; /* rounds to infinity */
    else if (rest < 0x38800000) { float small; memcpy(&small, &rest, 4); h = (uint16_t)nearbyintf(small * 0x1p24f); }
    else { rest += 0xfff + (rest >> 13 & 1); h = (uint16_t)((rest - 0x38000000) >> 13); }
    h |= (uint16_t)sign; memcpy(out + 2 * i, &h, 2);
  }
}
#endif
