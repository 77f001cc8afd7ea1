/* The types of weights: ggml's blocks, and floats. A weight unpacks to the same float32 number as gguf-py's `dequantize` gives. */

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 }; /* ggml's */

/* n rows of k weights: row i starts at data + i * stride; or, with `panels`, in panels (see panels.h). Products with weights of 4 to 8 bits
   need panels; others are never in them. */
typedef struct { const uint8_t *data; const float *bias; int64_t stride; int32_t type, n, k, panels; } Matrix;

static inline const uint8_t *row_of(const Matrix *m, int64_t i) { return m->data + i * m->stride; }

enum { BYTES_F16 = 64, BYTES_BF16 = 64 }; /* of 32 weights */
static long row_bytes(int type, int k) {
  switch (type) {
    case F32: return 4L * k;
    case F16: case BF16: return 2L * k;
    case Q4_0: return k / 32 * 18L;
    case Q4_1: return k / 32 * 20L;
    case Q5_0: return k / 32 * 22L;
    case Q5_1: return k / 32 * 24L;
    case Q8_0: return k / 32 * 34L;
    case Q4_K: return k / 256 * 144L;
    case Q5_K: return k / 256 * 176L;
    default: return k / 256 * 210L; /* Q6_K */
  }
}

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
