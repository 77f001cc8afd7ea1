/* Panels: weights of 4 to 8 bits, turned once at load so that products read them in order.

   A panel is 16 rows of weights. It is a list of chunks, each with the scales and then the weights of up to eight blocks of 32 columns.
   A block of weights is a list of 64-byte lines; a line has four bytes of each row:

     line c < 4     bytes j of a row: column 4 c + j in the low four bits, column 16 + 4 c + j in the high four
     five bits:     one more line: bit c of byte j is the fifth bit of column 4 c + j, c < 8
     six bits:      two more lines: bits 2 f, 2 f + 1 of byte j of line h are the upper bits of column 4 (4 h + f) + j
     eight bits:    eight lines instead; line c has columns 4 c + j, 128 added

   So a vector of integers holds four columns of as many rows as it has lanes, whatever the instruction set. Scales are kept as in the
   file; only the scales of six bits that Q4_K and Q5_K have take a byte each. Rows beyond the last are zeros. */

#define PANEL_ROWS 16
#define CHUNK_BLOCKS 8

/* how a type is kept: bits of a weight; what is subtracted from it; its scales */
enum { BY_HALF, BY_HALF_AND_MINIMUM, BY_SIX_BITS, BY_SIXTEEN };
static inline __attribute__((always_inline)) int bits_of(int type) {
  return type == Q8_0 ? 8 : type == Q6_K ? 6 : type == Q5_0 || type == Q5_1 || type == Q5_K ? 5 : 4;
}
static inline __attribute__((always_inline)) int offset_of(int type) { return type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q8_0 ? 128 : type == Q6_K ? 32 : 0; }
static inline __attribute__((always_inline)) int scales_of(int type) {
  return type == Q6_K ? BY_SIXTEEN : type == Q4_K || type == Q5_K ? BY_SIX_BITS : type == Q4_1 || type == Q5_1 ? BY_HALF_AND_MINIMUM : BY_HALF;
}
static inline __attribute__((always_inline)) int weight_bytes(int type) { int bits = bits_of(type); return bits == 8 ? 512 : 256 + 64 * (bits - 4); }
/* of `blocks` blocks; whole lines, so that weights begin at one */
static inline __attribute__((always_inline)) int scale_bytes(int type, int blocks) {
  int kind = scales_of(type);
  return kind == BY_HALF ? (32 * blocks + 63) & ~63 : kind == BY_HALF_AND_MINIMUM ? 64 * blocks : (64 + 32 * blocks + 63) & ~63;
}
static inline __attribute__((always_inline)) long chunk_bytes(int type, int blocks) { return scale_bytes(type, blocks) + (long)blocks * weight_bytes(type); }
static inline long panel_bytes(int type, int k) {
  int blocks = k / 32, rest = blocks % CHUNK_BLOCKS;
  return blocks / CHUNK_BLOCKS * chunk_bytes(type, CHUNK_BLOCKS) + (rest ? chunk_bytes(type, rest) : 0);
}
static inline int is_integer(int type) { return type != F32 && type != F16 && type != BF16; }

/* 32 weights of one row as the file has them. `d` and `m` are float16 numbers; `s` two scales: by 16 columns, or scale and minimum. */
typedef struct { uint8_t q[32]; uint8_t d[2], m[2], s[2]; } Block;

static inline void low_and_high(const uint8_t *p, uint8_t *q) { for (int i = 0; i < 16; i++) { q[i] = p[i] & 15; q[16 + i] = p[i] >> 4; } }
static inline void join_low_and_high(uint8_t *p, const uint8_t *q) { for (int i = 0; i < 16; i++) p[i] = (q[i] & 15) | (q[16 + i] & 15) << 4; }

static inline __attribute__((always_inline)) void read_block(const int type, const uint8_t *row, int b, Block *o) {
  const uint8_t *p; int j = b & 7, scale, minimum; uint32_t high;
  switch (type) {
    case Q4_0: p = row + 18 * (long)b; memcpy(o->d, p, 2); low_and_high(p + 2, o->q); return;
    case Q4_1: p = row + 20 * (long)b; memcpy(o->d, p, 2); memcpy(o->m, p + 2, 2); low_and_high(p + 4, o->q); return;
    case Q5_0: case Q5_1:
      p = row + (type == Q5_0 ? 22 : 24) * (long)b; memcpy(o->d, p, 2); p += 2;
      if (type == Q5_1) { memcpy(o->m, p, 2); p += 2; }
      memcpy(&high, p, 4); low_and_high(p + 4, o->q);
      for (int i = 0; i < 32; i++) o->q[i] |= (high >> i & 1) << 4;
      return;
    case Q8_0: p = row + 34 * (long)b; memcpy(o->d, p, 2); for (int i = 0; i < 32; i++) o->q[i] = p[2 + i] ^ 128; return;
    case Q4_K: case Q5_K:
      p = row + (type == Q4_K ? 144 : 176) * (long)(b >> 3); memcpy(o->d, p, 2); memcpy(o->m, p + 2, 2);
      six_bits(p + 4, j, &scale, &minimum); o->s[0] = (uint8_t)scale; o->s[1] = (uint8_t)minimum;
      p += (type == Q4_K ? 16 : 48) + 32 * (j >> 1);
      if (j & 1) for (int i = 0; i < 32; i++) o->q[i] = p[i] >> 4; else for (int i = 0; i < 32; i++) o->q[i] = p[i] & 15;
      p = row + 176 * (long)(b >> 3) + 16;
      if (type == Q5_K) for (int i = 0; i < 32; i++) o->q[i] |= (p[i] >> j & 1) << 4;
      return;
    case Q6_K:
      p = row + 210 * (long)(b >> 3); memcpy(o->d, p + 208, 2); memcpy(o->s, p + 192 + 2 * j, 2);
      for (int i = 0; i < 32; i++) o->q[i] = (p[64 * (j >> 2) + 32 * (j & 1) + i] >> 4 * (j >> 1 & 1) & 15) | (p[128 + 32 * (j >> 2) + i] >> 2 * (j & 3) & 3) << 4;
  }
}
/* The inverse: writes block b into a row whose bytes were zeros before its first block. */
static void write_block(int type, uint8_t *row, int b, const Block *o) {
  uint8_t *p; int j = b & 7; uint32_t high = 0;
  switch (type) {
    case Q4_0: p = row + 18 * (long)b; memcpy(p, o->d, 2); join_low_and_high(p + 2, o->q); return;
    case Q4_1: p = row + 20 * (long)b; memcpy(p, o->d, 2); memcpy(p + 2, o->m, 2); join_low_and_high(p + 4, o->q); return;
    case Q5_0: case Q5_1:
      p = row + (type == Q5_0 ? 22 : 24) * (long)b; memcpy(p, o->d, 2); p += 2;
      if (type == Q5_1) { memcpy(p, o->m, 2); p += 2; }
      for (int i = 0; i < 32; i++) high |= (uint32_t)(o->q[i] >> 4) << i;
      memcpy(p, &high, 4); join_low_and_high(p + 4, o->q);
      return;
    case Q8_0: p = row + 34 * (long)b; memcpy(p, o->d, 2); for (int i = 0; i < 32; i++) p[2 + i] = o->q[i] ^ 128; return;
    case Q4_K: case Q5_K:
      p = row + (type == Q4_K ? 144 : 176) * (long)(b >> 3); memcpy(p, o->d, 2); memcpy(p + 2, o->m, 2);
      if (j < 4) { p[4 + j] |= o->s[0]; p[8 + j] |= o->s[1]; }
      else { p[8 + j] |= (o->s[0] & 15) | (o->s[1] & 15) << 4; p[j] |= (o->s[0] >> 4) << 6; p[4 + j] |= (o->s[1] >> 4) << 6; }
      for (int i = 0; i < 32; i++) p[(type == Q4_K ? 16 : 48) + 32 * (j >> 1) + i] |= (o->q[i] & 15) << 4 * (j & 1);
      if (type == Q5_K) for (int i = 0; i < 32; i++) p[16 + i] |= (o->q[i] >> 4) << j;
      return;
    case Q6_K:
      p = row + 210 * (long)(b >> 3); memcpy(p + 208, o->d, 2); memcpy(p + 192 + 2 * j, o->s, 2);
      for (int i = 0; i < 32; i++) {
        p[64 * (j >> 2) + 32 * (j & 1) + i] |= (o->q[i] & 15) << 4 * (j >> 1 & 1); p[128 + 32 * (j >> 2) + i] |= (o->q[i] >> 4) << 2 * (j & 3);
      }
  }
}

/* where the parts of block i of a chunk of `blocks` blocks are, for row r of the panel */
static inline uint8_t *scale_at(int type, uint8_t *chunk, int i, int r, int which) { /* which: 0 d, 1 m, 2 and 3 the two of `s` */
  int kind = scales_of(type);
  if (which >= 2) return chunk + 64 + 32 * i + 16 * (which - 2) + r;
  return kind == BY_HALF ? chunk + 32 * i + 2 * r : kind == BY_HALF_AND_MINIMUM ? chunk + 64 * i + 32 * which + 2 * r : chunk + 32 * which + 2 * r;
}
static inline uint32_t four_bytes(const uint8_t *p) { uint32_t t; memcpy(&t, p, 4); return t; }

static inline __attribute__((always_inline)) void block_to_panel(const int type, const Block *o, uint8_t *chunk, int blocks, int i, int r) {
  int kind = scales_of(type), bits = bits_of(type); uint8_t *w = chunk + scale_bytes(type, blocks) + (long)i * weight_bytes(type) + 4 * r;
  memcpy(scale_at(type, chunk, i, r, 0), o->d, 2);
  if (kind == BY_HALF_AND_MINIMUM || kind == BY_SIX_BITS) memcpy(scale_at(type, chunk, i, r, 1), o->m, 2);
  if (kind >= BY_SIX_BITS) { *scale_at(type, chunk, i, r, 2) = o->s[0]; *scale_at(type, chunk, i, r, 3) = o->s[1]; }
  if (bits == 8) { for (int c = 0; c < 8; c++) memcpy(w + 64 * c, o->q + 4 * c, 4); return; }
  uint8_t joined[16]; join_low_and_high(joined, o->q); uint32_t high[2] = {0, 0};
  for (int c = 0; c < 4; c++) memcpy(w + 64 * c, joined + 4 * c, 4);
  if (bits == 5) { for (int c = 0; c < 8; c++) high[0] |= (four_bytes(o->q + 4 * c) >> 4 & 0x01010101u) << c; memcpy(w + 256, high, 4); }
  if (bits == 6) for (int h = 0; h < 2; h++) {
    for (int f = 0; f < 4; f++) high[h] |= (four_bytes(o->q + 16 * h + 4 * f) >> 4 & 0x03030303u) << 2 * f;
    memcpy(w + 256 + 64 * h, high + h, 4);
  }
}
static void panel_to_block(int type, const uint8_t *chunk, int blocks, int i, int r, Block *o) {
  int kind = scales_of(type), bits = bits_of(type); const uint8_t *w = chunk + scale_bytes(type, blocks) + (long)i * weight_bytes(type) + 4 * r;
  uint8_t *at = (uint8_t *)chunk; /* scale_at only computes the place */
  memcpy(o->d, scale_at(type, at, i, r, 0), 2);
  if (kind == BY_HALF_AND_MINIMUM || kind == BY_SIX_BITS) memcpy(o->m, scale_at(type, at, i, r, 1), 2);
  if (kind >= BY_SIX_BITS) { o->s[0] = *scale_at(type, at, i, r, 2); o->s[1] = *scale_at(type, at, i, r, 3); }
  if (bits == 8) { for (int c = 0; c < 8; c++) memcpy(o->q + 4 * c, w + 64 * c, 4); return; }
  for (int c = 0; c < 4; c++) for (int j = 0; j < 4; j++) { uint8_t t = w[64 * c + j]; o->q[4 * c + j] = t & 15; o->q[16 + 4 * c + j] = t >> 4; }
  if (bits == 5) for (int c = 0; c < 8; c++) for (int j = 0; j < 4; j++) o->q[4 * c + j] |= (w[256 + j] >> c & 1) << 4;
  if (bits == 6) for (int c = 0; c < 8; c++) for (int j = 0; j < 4; j++) o->q[4 * c + j] |= (w[256 + 64 * (c / 4) + j] >> 2 * (c & 3) & 3) << 4;
}

/* rows [first, first + 16) of rows at equal distances, of which there are `n`, to one panel, which is all zeros */
static inline __attribute__((always_inline)) void pack_panel_of(const int type, const uint8_t *rows, int64_t stride, int first, int n, int k, uint8_t *panel) {
  int total = k / 32; Block block = {{0}, {0}, {0}, {0}};
  for (int b = 0; b < total; b += CHUNK_BLOCKS) {
    int blocks = total - b < CHUNK_BLOCKS ? total - b : CHUNK_BLOCKS; uint8_t *chunk = panel + b / CHUNK_BLOCKS * chunk_bytes(type, CHUNK_BLOCKS);
    for (int r = 0; r < PANEL_ROWS && first + r < n; r++)
      for (int i = 0; i < blocks; i++) { read_block(type, rows + (first + r) * stride, b + i, &block); block_to_panel(type, &block, chunk, blocks, i, r); }
  }
}
#define PACK_CASE(T) case T: pack_panel_of(T, rows, stride, first, n, k, panel); return;
static void pack_panel(int type, const uint8_t *rows, int64_t stride, int first, int n, int k, uint8_t *panel) { /* a loop for each type is quicker */
  switch (type) { PACK_CASE(Q4_0) PACK_CASE(Q4_1) PACK_CASE(Q5_0) PACK_CASE(Q5_1) PACK_CASE(Q8_0) PACK_CASE(Q4_K) PACK_CASE(Q5_K) PACK_CASE(Q6_K) }
}
/* row r of a panel as it was in the file */
static void unpack_panel_row(int type, const uint8_t *panel, int r, int k, uint8_t *row, long row_bytes) {
  int total = k / 32; Block block = {{0}, {0}, {0}, {0}}; memset(row, 0, row_bytes);
  for (int b = 0; b < total; b++) {
    int start = b & ~(CHUNK_BLOCKS - 1), blocks = total - start < CHUNK_BLOCKS ? total - start : CHUNK_BLOCKS;
    panel_to_block(type, panel + start / CHUNK_BLOCKS * chunk_bytes(type, CHUNK_BLOCKS), blocks, b - start, r, &block); write_block(type, row, b, &block);
  }
}
