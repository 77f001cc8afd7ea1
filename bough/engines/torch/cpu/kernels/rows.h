/* Rows of keys and values: D numbers of one head, rounded once, when they are written, each row for itself. Every reader sees the rounded row.

   F32, F16 and BF16 are as usual. Q8_0 is ggml's block: a float16 scale and 32 numbers of 8 bits; the last block of a row may be shorter. */

#define BLOCK 32       /* numbers with one scale */
#define BLOCK_BYTES 34
#define LARGEST_HALF 65504.0f

static inline long kept_bytes(int type, int D) {
  if (type == Q8_0) return D + 2L * ((D + BLOCK - 1) / BLOCK);
  return type == F32 ? 4L * D : 2L * D;
}

/* x within what float16 can hold; returns how many numbers were not */
static inline long clip_to_halves(float *x, int D) {
  long num = 0;
  for (int j = 0; j < D; j++) {
    num += x[j] > LARGEST_HALF || x[j] < -LARGEST_HALF;
    x[j] = x[j] > LARGEST_HALF ? LARGEST_HALF : x[j] < -LARGEST_HALF ? -LARGEST_HALF : x[j];
  }
  return num;
}
static inline void to_bfloats(const float *x, uint8_t *out, int n) {
  for (int j = 0; j < n; j++) {
    uint32_t bits; memcpy(&bits, x + j, 4); uint16_t b = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if ((bits & 0x7fffffff) > 0x7f800000) b = 0x7fc0;
    memcpy(out + 2 * j, &b, 2);
  }
}
/* n numbers, at most a block: their scale, and each divided by it and rounded to the nearest */
static inline void to_block(const float *x, uint8_t *out, int n) {
  float most = 0, scale; const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number */
  for (int j = 0; j < n; j++) { float a = fabsf(x[j]); most = a > most ? a : most; }
  scale = most / 127.0f; to_halves(&scale, out, 1); scale = half(out);
  float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int j = 0; j < n; j++) {
    float q = (x[j] * inverse + shift) - shift;
    out[2 + j] = (uint8_t)(int8_t)(q > 127 ? 127 : q > -127 ? q : -127);
  }
}
/* Write one row; x may be changed. Returns how many of its numbers were too large for the type. */
static inline long write_row(int type, uint8_t *to, float *x, int D) {
  if (type == F32) { memcpy(to, x, sizeof(float) * D); return 0; }
  if (type == BF16) { to_bfloats(x, to, D); return 0; }
  if (type == F16) { long num = clip_to_halves(x, D); to_halves(x, to, D); return num; }
  long num = 0;
  for (int j = 0; j < D; j += BLOCK) num += clip_to_halves(x + j, D - j < BLOCK ? D - j : BLOCK);
  for (int j = 0; j < D; j += BLOCK) to_block(x + j, to + j / BLOCK * BLOCK_BYTES, D - j < BLOCK ? D - j : BLOCK);
  return num;
}

static inline void read_row(int type, const uint8_t *from, float *out, int D) {
  vf w[NV]; int whole = D / 32 * 32;
#define READ(type) for (int b = 0; b < whole / 32; b++) { decode_##type(from, b, w); for (int v = 0; v < NV; v++) store(out + 32 * b + v * VW, w[v]); }
  if (type == F16) { READ(F16) } else if (type == BF16) { READ(BF16) } else { READ(Q8_0) }
#undef READ
  for (int j = whole; j < D; j++) {
    if (type == F16) out[j] = half(from + 2 * j);
    else if (type == BF16) { uint32_t bits = 0; memcpy((char *)&bits + 2, from + 2 * j, 2); memcpy(out + j, &bits, 4); }
    else { const uint8_t *p = from + j / BLOCK * BLOCK_BYTES; out[j] = half(p) * (float)(int8_t)p[2 + j % BLOCK]; }
  }
}
/* rows [low, high) as floats: where they are, or read into `own`; row 0 is at `rows`, or would be */
static const float *rows_as_floats(int type, const uint8_t *rows, int low, int high, int D, float *own) {
  if (type == F32) return (const float *)rows;
  long size = kept_bytes(type, D);
  for (int i = low; i < high; i++) read_row(type, rows + i * size, own + (long)i * D, D);
  return own;
}
