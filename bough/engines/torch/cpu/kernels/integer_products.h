/* Products of panels with activations that are rounded to integers, block by block of 32 columns.

   An activation is x = scale * (256 * high + low), high and low of eight bits each: 16 bits, exact to about 2e-5 of the block's largest.
   With `terms` 1 there is no low term, and it is x = scale * high, as llama.cpp rounds. Each row is rounded by itself.
   The sum over a block is an exact integer; then one multiply-add in float a block, or two where the type has minima, blocks in order.
   So a result depends on its row of activations and its row of weights alone: alone, in a batch or in a run, it has the same bits. */

typedef struct { int8_t high[32], low[32]; float scale, total; int32_t sums[2]; } Digits; /* total: scale times all sums; sums: by 16 columns */
typedef struct { vf d, m, first, second; } Scales; /* m: minimum; first, second: by 16 columns */

static inline float largest_of(vf a) { float t[VW], top = 0; store(t, a); for (int i = 0; i < VW; i++) top = t[i] > top ? t[i] : top; return top; }

static void round_block(const float *x, int terms, Digits *o) {
  vf top = {0}; int32_t p[32], low[32];
  for (int v = 0; v < NV; v++) top = max_(top, (vf)((vi)load(x + v * VW) & 0x7fffffff));
  float most = largest_of(top), steps = terms == 2 ? 32512.0f : 127.0f;
  int is_zero = !(most > 1e-30f); float factor = is_zero ? 0.0f : steps / most, check = 0;
  for (int i = 0; i < 32; i++) check += x[i] * 0.0f; /* NaN if one of them is not finite: so is then the result */
  vf magic = splat(12582912.0f);
  for (int v = 0; v < NV; v++) { vi t = (vi)(load(x + v * VW) * factor + magic) - (vi)magic; memcpy(p + v * VW, &t, sizeof t); }
  if (terms == 2) {
    for (int i = 0; i < 32; i++) { int32_t h = (p[i] + 128) >> 8, l = p[i] - h * 256; low[i] = l < -127 ? -127 : l; p[i] = h; }
    for (int i = 0; i < 32; i++) { o->high[i] = (int8_t)p[i]; o->low[i] = (int8_t)low[i]; p[i] = p[i] * 256 + low[i]; }
  } else for (int i = 0; i < 32; i++) o->high[i] = (int8_t)p[i];
  int32_t a = 0, b = 0;
  for (int i = 0; i < 16; i++) { a += p[i]; b += p[16 + i]; }
  o->scale = (is_zero ? 0.0f : most / steps) + check; o->sums[0] = a; o->sums[1] = b; o->total = o->scale * (float)(a + b);
}
static void round_row(const float *x, int k, int terms, Digits *out) { for (int b = 0; b < k / 32; b++) round_block(x + 32 * b, terms, out + b); }

/* ---- integer vectors: each lane of an accumulator gets the sum of four products of bytes ---- */

#define INLINE static inline __attribute__((always_inline))
INLINE vi load_i(const void *p) { vi t; memcpy(&t, p, sizeof t); return t; }
INLINE int32_t dword(const int8_t *p) { int32_t t; memcpy(&t, p, 4); return t; }
#define HAS_DOT 0
#if defined(__AVX512VNNI__)
#undef HAS_DOT
#define HAS_DOT 1 /* unsigned bytes of any size: eight bits need no sign */
INLINE vi dot4(vi acc, vi w, int32_t x) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x)); }
#elif defined(__AVX512F__)
INLINE vi dot4(vi acc, vi w, int32_t x) {
  return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x)), _mm512_set1_epi16(1));
}
INLINE vi dot4_signed(vi acc, vi w, int32_t x) {
  __m512i y = _mm512_set1_epi32(x); y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), y);
  return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), y), _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && defined(__AVXVNNI__)
#undef HAS_DOT
#define HAS_DOT 1
INLINE vi dot4(vi acc, vi w, int32_t x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x)); }
#elif defined(__AVX2__)
INLINE vi dot4(vi acc, vi w, int32_t x) {
  return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x)), _mm256_set1_epi16(1));
}
INLINE vi dot4_signed(vi acc, vi w, int32_t x) {
  __m256i y = _mm256_sign_epi8(_mm256_set1_epi32(x), (__m256i)w);
  return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), y), _mm256_set1_epi16(1));
}
#elif defined(__aarch64__) && !defined(ISA_PLAIN_OBJECT)
INLINE vi pair_up(int16x8_t a, int16x8_t b) { return (vi)vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)); }
INLINE vi dot4(vi acc, vi w, int32_t x) {
  uint8x16_t a = (uint8x16_t)w; int8x8_t b = vreinterpret_s8_s32(vdup_n_s32(x)); int16x8_t y = vmovl_s8(b);
  return acc + pair_up(vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), y), vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(a)), y));
}
INLINE vi dot4_signed(vi acc, vi w, int32_t x) {
  int8x16_t a = (int8x16_t)w; int8x8_t b = vreinterpret_s8_s32(vdup_n_s32(x));
  return acc + pair_up(vmull_s8(vget_low_s8(a), b), vmull_s8(vget_high_s8(a), b));
}
#else
INLINE vi dot4(vi acc, vi w, int32_t x) {
  int8_t y[4]; uint8_t a[4 * VW]; memcpy(y, &x, 4); memcpy(a, &w, sizeof a);
  for (int l = 0; l < VW; l++) for (int j = 0; j < 4; j++) acc[l] += a[4 * l + j] * y[j];
  return acc;
}
INLINE vi dot4_signed(vi acc, vi w, int32_t x) {
  int8_t y[4], a[4 * VW]; memcpy(y, &x, 4); memcpy(a, &w, sizeof a);
  for (int l = 0; l < VW; l++) for (int j = 0; j < 4; j++) acc[l] += a[4 * l + j] * y[j];
  return acc;
}
#endif
#if HAS_DOT
INLINE vi dot(const int bits, vi acc, vi w, int32_t x) { (void)bits; return dot4(acc, w, x); }
#else /* sums of two products of unsigned eight bits do not fit into 16 bits: those are signed */
INLINE vi dot(const int bits, vi acc, vi w, int32_t x) { return bits == 8 ? dot4_signed(acc, w, x) : dot4(acc, w, x); }
#endif
/* what is to be subtracted from a weight as `read_weights` gives it */
INLINE int rest_of(const int type) { return bits_of(type) == 8 && !HAS_DOT ? 0 : offset_of(type); }

/* ---- from a panel to vectors: `lanes` is the first of the rows that a vector holds, in a panel ---- */

INLINE void read_weights(const int bits, const uint8_t *block, int lanes, vi *w) {
  const uint8_t *p = block + 4 * lanes;
  if (bits == 8) { UNROLL for (int c = 0; c < 8; c++) w[c] = HAS_DOT ? load_i(p + 64 * c) : load_i(p + 64 * c) ^ (int32_t)0x80808080; return; }
  UNROLL for (int c = 0; c < 4; c++) { vi t = load_i(p + 64 * c); w[c] = t & 0x0f0f0f0f; w[4 + c] = (t >> 4) & 0x0f0f0f0f; }
  if (bits == 5) { vi h = load_i(p + 256); UNROLL for (int c = 0; c < 8; c++) w[c] |= (c < 4 ? h << (4 - c) : h >> (c - 4)) & 0x10101010; }
  if (bits == 6) UNROLL for (int c = 0; c < 8; c++) {
    vi h = load_i(p + 256 + 64 * (c / 4)); int f = c & 3;
    w[c] |= (f < 2 ? h << (4 - 2 * f) : h >> (2 * f - 4)) & 0x30303030;
  }
}
INLINE Scales read_scales(const int type, const uint8_t *chunk, int i, int lanes) {
  const int kind = scales_of(type); Scales o = {{0}, {0}, {0}, {0}};
  if (kind == BY_HALF) o.d = halves(chunk + 32 * i + 2 * lanes);
  else if (kind == BY_HALF_AND_MINIMUM) { o.d = halves(chunk + 64 * i + 2 * lanes); o.m = halves(chunk + 64 * i + 32 + 2 * lanes); }
  else {
    const uint8_t *s = chunk + 64 + 32 * i + lanes; o.d = halves(chunk + 2 * lanes);
    if (kind == BY_SIXTEEN) { o.first = floats(bytes_s(s)); o.second = floats(bytes_s(s + 16)); }
    else { o.m = (vf){0} - halves(chunk + 32 + 2 * lanes) * floats(bytes_u(s + 16)); o.d = o.d * floats(bytes_u(s)); }
  }
  return o;
}

/* one block of weights by one of activations, added to acc */
INLINE vf multiply_block(const int type, const int terms, const vi *w, const Scales *s, const Digits *a, vf acc) {
  const int bits = bits_of(type); vi x = {0}, y = {0};
  UNROLL for (int c = 0; c < 4; c++) { x = dot(bits, x, w[c], dword(a->high + 4 * c)); y = dot(bits, y, w[4 + c], dword(a->high + 16 + 4 * c)); }
  if (terms == 2) {
    vi l = {0}, n = {0};
    UNROLL for (int c = 0; c < 4; c++) { l = dot(bits, l, w[c], dword(a->low + 4 * c)); n = dot(bits, n, w[4 + c], dword(a->low + 16 + 4 * c)); }
    x = (x << 8) + l; y = (y << 8) + n;
  }
  if (scales_of(type) == BY_SIXTEEN) {
    x -= 32 * a->sums[0]; y -= 32 * a->sums[1];
    return fma_(fma_(floats(x), s->first, floats(y) * s->second), s->d * a->scale, acc);
  }
  x += y;
  if (rest_of(type)) x -= rest_of(type) * (a->sums[0] + a->sums[1]);
  acc = fma_(floats(x), s->d * a->scale, acc);
  return scales_of(type) == BY_HALF ? acc : fma_(s->m, splat(a->total), acc);
}

/* ---- few rows of activations: weights stay in registers ---- */

#define AHEAD_BYTES 6144
INLINE void few(const int type, const int terms, const int R, const uint8_t *panel, int lanes, int blocks, const Digits *const *a, vf *acc) {
  vf sum[4]; const uint8_t *chunk = panel;
  UNROLL for (int r = 0; r < R; r++) sum[r] = (vf){0};
  for (int b = 0; b < blocks; b += CHUNK_BLOCKS) {
    int here = blocks - b < CHUNK_BLOCKS ? blocks - b : CHUNK_BLOCKS; const uint8_t *w = chunk + scale_bytes(type, here);
    for (int i = 0; i < here; i++, w += weight_bytes(type)) {
      for (int line = 0; line < weight_bytes(type); line += 64) __builtin_prefetch(w + line + AHEAD_BYTES, 0, 3);
      vi q[8]; read_weights(bits_of(type), w, lanes, q); Scales s = read_scales(type, chunk, i, lanes);
      UNROLL for (int r = 0; r < R; r++) sum[r] = multiply_block(type, terms, q, &s, a[r] + b + i, sum[r]);
    }
    chunk = w;
  }
  UNROLL for (int r = 0; r < R; r++) acc[r] = sum[r];
}
typedef void Few(const uint8_t *panel, int lanes, int blocks, const Digits *const *a, vf *acc);
#define FEW(T, N, R) static __attribute__((noinline)) void few_##T##_##N##_##R(const uint8_t *p, int lanes, int blocks, const Digits *const *a, vf *acc) { few(T, N, R, p, lanes, blocks, a, acc); }
#define FEWS(T) FEW(T, 1, 1) FEW(T, 1, 2) FEW(T, 1, 4) FEW(T, 2, 1) FEW(T, 2, 2) FEW(T, 2, 4)
FEWS(Q4_0) FEWS(Q4_1) FEWS(Q5_0) FEWS(Q5_1) FEWS(Q8_0) FEWS(Q4_K) FEWS(Q5_K) FEWS(Q6_K)
#define FEW_ENTRY(T) [T] = {{few_##T##_1_1, few_##T##_1_2, few_##T##_1_4}, {few_##T##_2_1, few_##T##_2_2, few_##T##_2_4}}
static Few *const FEW_OF[15][2][3] /* by type, terms and rows: 1, 2, 4 */
  = {FEW_ENTRY(Q4_0), FEW_ENTRY(Q4_1), FEW_ENTRY(Q5_0), FEW_ENTRY(Q5_1), FEW_ENTRY(Q8_0), FEW_ENTRY(Q4_K), FEW_ENTRY(Q5_K), FEW_ENTRY(Q6_K)};

/* ---- many rows: weights of STRIPS vectors of rows are unpacked once, then multiplied by MANY rows at a time ---- */

#if VW == 8
enum { STRIPS = 2, MANY = 3 };
#else
enum { STRIPS = 2, MANY = 6 }; /* sums fill the registers */
#endif
typedef struct { vi w[8]; Scales s; } Unpacked; /* a block of one vector of rows */

INLINE void unpack_strip(const int type, const uint8_t *panel, int lanes, int blocks, Unpacked *o) {
  const uint8_t *chunk = panel;
  for (int b = 0; b < blocks; b += CHUNK_BLOCKS) {
    int here = blocks - b < CHUNK_BLOCKS ? blocks - b : CHUNK_BLOCKS; const uint8_t *w = chunk + scale_bytes(type, here);
    for (int i = 0; i < here; i++, w += weight_bytes(type), o++) { read_weights(bits_of(type), w, lanes, o->w); o->s = read_scales(type, chunk, i, lanes); }
    chunk = w;
  }
}
/* sum over c of w[c] and the digits of every row, for lines [from, to) */
#define ADD_LINES(digits, from, to) UNROLL for (int c = from; c < to; c++) { \
    vi w[STRIPS]; UNROLL for (int p = 0; p < STRIPS; p++) w[p] = u[p][b].w[c]; \
    UNROLL for (int r = 0; r < MANY; r++) { int32_t t = dword(a[r][b].digits + 4 * c); UNROLL for (int p = 0; p < STRIPS; p++) x[p][r] = dot(bits, x[p][r], w[p], t); } }
INLINE void many(const int type, const int terms, const Unpacked *const *u, int blocks, const Digits *const *a, vf (*out)[MANY]) {
  vf acc[STRIPS][MANY], half_done[STRIPS][MANY]; /* sizes must be constants: else the compiler keeps the sums in memory */
  const int bits = bits_of(type), is_by_sixteen = scales_of(type) == BY_SIXTEEN, num_parts = is_by_sixteen ? 2 : 1;
  UNROLL for (int p = 0; p < STRIPS; p++) UNROLL for (int r = 0; r < MANY; r++) acc[p][r] = (vf){0};
  for (int b = 0; b < blocks; b++) {
    UNROLL for (int part = num_parts - 1; part >= 0; part--) { /* the second 16 columns first: as `multiply_block` rounds */
      const int from = part * 4, to = is_by_sixteen ? from + 4 : 8;
      vi x[STRIPS][MANY]; UNROLL for (int p = 0; p < STRIPS; p++) UNROLL for (int r = 0; r < MANY; r++) x[p][r] = (vi){0};
      ADD_LINES(high, from, to)
      if (terms == 2) {
        UNROLL for (int p = 0; p < STRIPS; p++) UNROLL for (int r = 0; r < MANY; r++) x[p][r] <<= 8;
        ADD_LINES(low, from, to)
      }
      UNROLL for (int r = 0; r < MANY; r++) {
        const Digits *d = a[r] + b;
        UNROLL for (int p = 0; p < STRIPS; p++) {
          const Scales *s = &u[p][b].s;
          if (is_by_sixteen) {
            vf t = floats(x[p][r] - 32 * d->sums[part]);
            if (part) half_done[p][r] = t * s->second;
            else acc[p][r] = fma_(fma_(t, s->first, half_done[p][r]), s->d * d->scale, acc[p][r]);
            continue;
          }
          if (rest_of(type)) x[p][r] -= rest_of(type) * (d->sums[0] + d->sums[1]);
          acc[p][r] = fma_(floats(x[p][r]), s->d * d->scale, acc[p][r]);
          if (scales_of(type) != BY_HALF) acc[p][r] = fma_(s->m, splat(d->total), acc[p][r]);
        }
      }
    }
  }
  UNROLL for (int p = 0; p < STRIPS; p++) UNROLL for (int r = 0; r < MANY; r++) out[p][r] = acc[p][r];
}
typedef void Unpack(const uint8_t *panel, int lanes, int blocks, Unpacked *o);
typedef void Many(const Unpacked *const *u, int blocks, const Digits *const *a, vf (*acc)[MANY]);
#define MANY_(T, N) static __attribute__((noinline)) void many_##T##_##N(const Unpacked *const *u, int blocks, const Digits *const *a, vf (*acc)[MANY]) { many(T, N, u, blocks, a, acc); }
#define MANYS(T) static __attribute__((noinline)) void unpack_##T(const uint8_t *p, int lanes, int blocks, Unpacked *o) { unpack_strip(T, p, lanes, blocks, o); } \
  MANY_(T, 1) MANY_(T, 2)
MANYS(Q4_0) MANYS(Q4_1) MANYS(Q5_0) MANYS(Q5_1) MANYS(Q8_0) MANYS(Q4_K) MANYS(Q5_K) MANYS(Q6_K)
#define MANY_ENTRY(T) [T] = {many_##T##_1, many_##T##_2}
static Many *const MANY_OF[15][2] /* by type and terms */
  = {MANY_ENTRY(Q4_0), MANY_ENTRY(Q4_1), MANY_ENTRY(Q5_0), MANY_ENTRY(Q5_1), MANY_ENTRY(Q8_0), MANY_ENTRY(Q4_K), MANY_ENTRY(Q5_K), MANY_ENTRY(Q6_K)};
static Unpack *const UNPACK_OF[15] = {[Q4_0] = unpack_Q4_0, [Q4_1] = unpack_Q4_1, [Q5_0] = unpack_Q5_0, [Q5_1] = unpack_Q5_1, [Q8_0] = unpack_Q8_0,
  [Q4_K] = unpack_Q4_K, [Q5_K] = unpack_Q5_K, [Q6_K] = unpack_Q6_K};

#define FEW_ROWS 8 /* with more rows of activations than this, weights are unpacked first */
static inline const uint8_t *panel_of(const Matrix *m, int row) { return m->data + row / PANEL_ROWS * panel_bytes(m->type, m->k); }

/* the products of weight rows [at, at + VW) with one row of activations, as far as they are in [first, last) */
static inline void put_lanes(const Matrix *m, const Target *to, int r, int at, int first, int last, vf sum) {
  float out[VW]; store(out, sum);
  int from = at < first ? first : at, end = at + VW < last ? at + VW : last;
  if (from < end) put(m, to, r, from, end - from, out + from - at);
}
/* weight rows [first, last) by rows [done, rows) of activations */
static void multiply_few(const Matrix *m, int first, int last, const Digits *x, int done, int rows, int terms, const Target *to) {
  int blocks = m->k / 32;
  for (int at = first / VW * VW; at < last; at += VW) {
    const uint8_t *panel = panel_of(m, at);
    for (int r = done, size; r < rows; r += size) {
      int level = rows - r >= 4 ? 2 : rows - r >= 2 ? 1 : 0; const Digits *a[4]; vf acc[4]; size = 1 << level;
      for (int j = 0; j < size; j++) a[j] = x + (long)(r + j) * blocks;
      FEW_OF[m->type][terms - 1][level](panel, at % PANEL_ROWS, blocks, a, acc);
      for (int j = 0; j < size; j++) put_lanes(m, to, r + j, at, first, last, acc[j]);
    }
  }
}
static void multiply_many(const Matrix *m, int first, int last, const Digits *x, int rows, int terms, const Target *to, Unpacked *scratch) {
  int blocks = m->k / 32, whole = rows / MANY * MANY; const Unpacked *u[STRIPS]; vf acc[STRIPS][MANY];
  for (int at = first / VW * VW; at < last; at += STRIPS * VW) {
    for (int p = 0; p < STRIPS; p++) {
      Unpacked *strip = scratch + (long)p * blocks; int row = at + p * VW; u[p] = row < last ? strip : u[0];
      if (row < last) UNPACK_OF[m->type](panel_of(m, row), row % PANEL_ROWS, blocks, strip);
    }
    for (int r = 0; r < whole; r += MANY) {
      const Digits *a[MANY]; for (int j = 0; j < MANY; j++) a[j] = x + (long)(r + j) * blocks;
      MANY_OF[m->type][terms - 1](u, blocks, a, acc);
      for (int p = 0; p < STRIPS; p++) for (int j = 0; j < MANY; j++) put_lanes(m, to, r + j, at + p * VW, first, last, acc[p][j]);
    }
    if (whole < rows) multiply_few(m, at < first ? first : at, at + STRIPS * VW < last ? at + STRIPS * VW : last, x, whole, rows, terms, to);
  }
}
