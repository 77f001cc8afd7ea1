/* Products with weights that are floats of 32 or 16 bits. Sums are float32, each in one order. */

/* `rows` rows of activations by `num` rows of weights at once: out[r * 4 + i] for i < num. Independent sums hide the latency of each. */
typedef void Tile(const uint8_t *const *w, const float *x, long x_stride, int k, float *out);

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
TILES(F16) TILES(BF16)
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
  = {ENTRY(F16), ENTRY(BF16)};

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

#define UNPACKED_FLOATS 32768
static inline int unpacked_rows(int k) { int n = UNPACKED_FLOATS / k & ~3; return n < 4 ? 4 : n > 32 ? 32 : n; }
static inline long unpacked_floats(int k) { return (long)unpacked_rows(k) * k; }

/* weight rows [first, last) by all rows of x; `unpacked` has room for unpacked_floats(k) */
static void multiply_as_floats(const Matrix *m, int first, int last, const float *x, long x_stride, int rows, Target to, float *unpacked) {
  const uint8_t *w[4];
  if (m->type == F32 || (rows <= PACKED_ROWS && m->k % 32 == 0)) {
    for (int i = first, num; i < last; i += num) {
      num = last - i >= 4 ? 4 : 1;
      for (int j = 0; j < num; j++) w[j] = row_of(m, i + j);
      (m->type == F32 ? multiply_floats : multiply_packed)(m, w, i, num, x, x_stride, rows, &to);
    }
    return;
  }
  int size = unpacked_rows(m->k);
  for (int start = first; start < last; start += size) {
    int end = last - start < size ? last : start + size;
    for (int i = start; i < end; i++) unpack_row(m, row_of(m, i), unpacked + (long)(i - start) * m->k);
    for (int r = 0; r < rows; r += FLOAT_ROWS) {
      int R = rows - r < FLOAT_ROWS ? rows - r : FLOAT_ROWS; Target part = to; part.y += r * to.stride;
      for (int i = start, num; i < end; i += num) {
        num = end - i >= 4 ? 4 : 1;
        for (int j = 0; j < num; j++) w[j] = (const uint8_t *)(unpacked + (long)(i - start + j) * m->k);
        multiply_floats(m, w, i, num, x + r * x_stride, x_stride, R, &part);
      }
    }
  }
}

