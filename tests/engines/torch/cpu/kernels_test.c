/* Compares the kernels of a built library with straightforward scalar code in double precision.

   kernels_test LIBRARY ISA: loads the library as Bough does, without Python, so that it also runs under an emulator. Each check
   prints one line for each mistake; the exit code is 1 if there was one. Memory that a kernel must not read holds NaN, and memory
   that it must not write is looked at afterwards; none is given back. The test that builds this
   program writes structs.h: the structs as they are in the kernels. */

#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "structs.h"

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 }; /* ggml's */

static void (*linear)(const Matrix *, const float *, float *, int, int, float *, int);
static int64_t (*linear_floats)(const Matrix *, int, int);
static void (*pack)(const Matrix *, const uint8_t *, int);
static int64_t (*panels_bytes)(int, int, int);
static void (*unpack)(const Matrix *, float *, int);
static void (*gather)(const Matrix *, const int64_t *, int, float *);
static int64_t (*step_floats)(const Model *, const Batch *);
static void (*step)(const Model *, const Batch *, float *, int32_t *);

/* ---- random numbers, memory, complaints ---- */

static uint64_t state = 88172645463325252ull;
static uint32_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (uint32_t)(state >> 16); }
static float uniform(void) { return (float)(int32_t)draw() * 0x1p-31f; }

static int mistakes;
static void complain(const char *check, const char *what, double found, double wanted) {
  if (mistakes++ < 20) printf("%s, %s: %.9g instead of %.9g\n", check, what, found, wanted);
}

/* n floats of NaN, and behind them a border that no kernel may change */
#define BORDER 64
static float *room(long n) {
  float *p = aligned_alloc(64, (sizeof(float) * (n + BORDER) + 63) & ~63L);
  for (long i = 0; i < n; i++) p[i] = NAN;
  for (int i = 0; i < BORDER; i++) p[n + i] = 12345.0f;
  return p;
}
static void check_border(const char *check, const float *p, long n) {
  for (int i = 0; i < BORDER; i++) if (p[n + i] != 12345.0f) { complain(check, "written beyond the end", p[n + i], 12345.0); return; }
}
static float *randoms(long n, float scale) { float *p = room(n); for (long i = 0; i < n; i++) p[i] = uniform() * scale; return p; }

/* ---- the types of weights, number by number ---- */

typedef struct { int type; const char *name; int block, bytes; } Type;
static const Type TYPES[] = {{F32, "F32", 1, 4}, {F16, "F16", 1, 2}, {BF16, "BF16", 1, 2}, {Q4_0, "Q4_0", 32, 18}, {Q4_1, "Q4_1", 32, 20}, {Q5_0, "Q5_0", 32, 22},
  {Q5_1, "Q5_1", 32, 24}, {Q8_0, "Q8_0", 32, 34}, {Q4_K, "Q4_K", 256, 144}, {Q5_K, "Q5_K", 256, 176}, {Q6_K, "Q6_K", 256, 210}};
#define NUM_TYPES (int)(sizeof TYPES / sizeof *TYPES)
static const Type *type_of(int type) { for (int i = 0; i < NUM_TYPES; i++) if (TYPES[i].type == type) return TYPES + i; abort(); }

static double half(const uint8_t *p) {
  int h = p[0] | p[1] << 8, exponent = h >> 10 & 31, mantissa = h & 1023;
  double t = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return h & 0x8000 ? -t : t;
}
static void put_half(uint8_t *p, int exponent) { /* a random number of about 2 to the exponent */
  int h = (draw() & 1023) | (exponent + 15) << 10 | (draw() & 1) << 15; p[0] = h & 255; p[1] = h >> 8;
}
static double weight(int type, const uint8_t *row, int j) {
  int b = j / 32, i = j % 32, s = j % 256 / 32;
  const uint8_t *p; float f; uint32_t bits;
  switch (type) {
    case F32: memcpy(&f, row + 4 * j, 4); return f;
    case F16: return half(row + 2 * j);
    case BF16: bits = (uint32_t)(row[2 * j] | row[2 * j + 1] << 8) << 16; memcpy(&f, &bits, 4); return f;
    case Q4_0: p = row + 18 * b; return half(p) * ((i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4) - 8);
    case Q4_1: p = row + 20 * b; return half(p) * (i < 16 ? p[4 + i] & 15 : p[4 + i - 16] >> 4) + half(p + 2);
    case Q5_0: p = row + 22 * b; memcpy(&bits, p + 2, 4);
      return half(p) * ((int)((i < 16 ? p[6 + i] & 15 : p[6 + i - 16] >> 4) | (bits >> i & 1) << 4) - 16);
    case Q5_1: p = row + 24 * b; memcpy(&bits, p + 4, 4);
      return half(p) * (int)((i < 16 ? p[8 + i] & 15 : p[8 + i - 16] >> 4) | (bits >> i & 1) << 4) + half(p + 2);
    case Q8_0: p = row + 34 * b; return half(p) * (int8_t)p[2 + i];
    case Q6_K: { p = row + 210 * (j / 256); int at = j % 256, side = at / 128, k = at % 128, low = p[64 * side + k % 64], high = p[128 + 32 * side + k % 32];
      int q = (k < 64 ? low & 15 : low >> 4) | (high >> 2 * (k / 32) & 3) << 4;
      return half(p + 208) * (int8_t)p[192 + at / 16] * (q - 32); }
  }
  p = row + (type == Q4_K ? 144 : 176) * (j / 256); /* Q4_K, Q5_K */
  const uint8_t *c = p + 4; int scale = c[s] & 63, minimum = c[s + 4] & 63;
  if (s >= 4) { scale = (c[s + 4] & 15) | (c[s - 4] >> 6) << 4; minimum = c[s + 4] >> 4 | (c[s] >> 6) << 4; }
  const uint8_t *low = p + (type == Q4_K ? 16 : 48) + s / 2 * 32; int q = s % 2 ? low[i] >> 4 : low[i] & 15;
  if (type == Q5_K) q |= (p[16 + i] >> s & 1) << 4;
  return half(p) * scale * q - half(p + 2) * minimum;
}

/* The rows of every matrix in panels, as they would be in a file. */
static struct { const uint8_t *panels, *rows; long stride; } packed[4096]; static int num_packed;

/* A matrix of random blocks whose weights are mostly in (-1, 1). Rows lie apart. */
static Matrix make_matrix(int type, int n, int k, int has_bias) {
  const Type *t = type_of(type); long row_bytes = (long)k / t->block * t->bytes, stride = row_bytes + (type == F32 ? 8 : 6);
  uint8_t *data = malloc(stride * n);
  for (long i = 0; i < stride * n; i++) data[i] = draw() & 255;
  for (int i = 0; i < n; i++) {
    for (uint8_t *p = data + i * stride, *end = p + row_bytes; p < end; p += t->bytes) {
      float f = uniform() * 0.25f;
      if (type == F32) memcpy(p, &f, 4);
      else if (type == BF16) { uint32_t bits; memcpy(&bits, &f, 4); p[0] = bits >> 16 & 255; p[1] = bits >> 24; }
      else if (type == F16) put_half(p, draw() % 16 ? -3 - (int)(draw() % 3) : -15); /* -15: below the normal numbers */
      else if (type == Q6_K) put_half(p + 208, -13);
      else {
        put_half(p, type == Q8_0 ? -9 : t->block == 256 ? -11 : -6);
        if (type == Q4_1 || type == Q5_1) put_half(p + 2, -4);
        if (t->block == 256) put_half(p + 2, -9);
      }
    }
  }
  float *bias = has_bias ? randoms(n, 1) : NULL;
  Matrix m = {.data = data, .bias = bias, .stride = stride, .type = type, .n = n, .k = k};
  if (t->block == 1) return m;
  long size = panels_bytes(type, n, k); uint8_t *panels = aligned_alloc(64, (size + 127) & ~63L); memset(panels, 0, size); memset(panels + size, 77, 64);
  m.panels = 1; m.data = panels; pack(&m, data, 2);
  for (int i = 0; i < 64; i++) if (panels[size + i] != 77) { complain("pack", "written beyond the end", panels[size + i], 77); break; }
  if (num_packed == 4096) abort();
  packed[num_packed].panels = panels; packed[num_packed].rows = data; packed[num_packed++].stride = stride;
  return m;
}
static const uint8_t *row_of(const Matrix *m, int i) {
  if (!m->panels) return m->data + i * m->stride;
  for (int j = num_packed - 1; j >= 0; j--) if (packed[j].panels == m->data) return packed[j].rows + i * packed[j].stride;
  abort();
}

/* all weights [n][k] of a matrix; those of the last matrices are kept, because a step uses each for many tokens */
static const double *weights_of(const Matrix *m) {
  static struct { const uint8_t *data; double *weights; } kept[16]; static int next;
  for (int i = 0; i < 16; i++) if (kept[i].data == m->data) return kept[i].weights;
  next = (next + 1) % 16; kept[next].data = m->data; free(kept[next].weights);
  double *out = kept[next].weights = malloc(sizeof(double) * m->n * m->k);
  for (int i = 0; i < m->n; i++) for (int j = 0; j < m->k; j++) out[(long)i * m->k + j] = weight(m->type, row_of(m, i), j);
  return out;
}

/* ---- unpack, gather, linear ---- */

static void check_unpack(const Type *t, int n, int k, int threads) {
  Matrix m = make_matrix(t->type, n, k, 0); char check[64]; snprintf(check, sizeof check, "unpack %s %dx%d", t->name, n, k);
  long size = (long)n * k; float *out = room(size), *some = room(2L * k); int64_t ids[2] = {n - 1, 1};
  unpack(&m, out, threads); gather(&m, ids, 2, some);
  for (int i = 0; i < n; i++) for (int j = 0; j < k; j++) {
    float wanted = (float)weights_of(&m)[(long)i * k + j];
    if (out[(long)i * k + j] != wanted) complain(check, "weight", out[(long)i * k + j], wanted);
  }
  for (int i = 0; i < 2; i++) if (memcmp(some + (long)i * k, out + ids[i] * k, sizeof(float) * k)) complain(check, "gathered row", i, ids[i]);
  check_border(check, out, size); check_border(check, some, 2L * k);
}

/* Rounding activations of a block of 32 to 16 bits moves a product by so much at the most, for weights that sum up to `weights`. */
static double rounding(int terms, double weights) { return weights * (terms == 2 ? 1.0 / 32512 : 0.5 / 127); }

static void check_linear(const Type *t, int n, int k, int rows, int terms, int threads) {
  Matrix m = make_matrix(t->type, n, k, rows & 1); char check[80];
  snprintf(check, sizeof check, "linear %s %dx%d, %d rows, %d terms, %d threads", t->name, n, k, rows, terms, threads);
  long size = (long)n * rows, floats = linear_floats(&m, rows, threads);
  float *x = randoms((long)rows * k, 1), *y = room(size), *alone = room(n), *work = room(floats), *own = room(linear_floats(&m, 1, 1));
  const double *w = weights_of(&m);
  linear(&m, x, y, rows, terms, work, threads);
  for (int r = 0; r < rows; r++) {
    linear(&m, x + (long)r * k, alone, 1, terms, own, 1);
    if (memcmp(alone, y + (long)r * n, sizeof(float) * n)) complain(check, "row that differs from the same row alone", r, r);
    for (int i = 0; i < n; i++) {
      double wanted = m.bias ? m.bias[i] : 0, most = fabs(wanted) + 1e-6, weights = 0;
      for (int j = 0; j < k; j++) { double a = w[(long)i * k + j] * x[(long)r * k + j]; wanted += a; most += fabs(a); weights += fabs(w[(long)i * k + j]); }
      if (!(fabs(y[(long)r * n + i] - wanted) <= 1e-6 * most + (m.panels ? rounding(terms, weights) : 0))) complain(check, "product", y[(long)r * n + i], wanted);
    }
  }
  check_border(check, y, size); check_border(check, alone, n); check_border(check, work, floats);
}

/* ---- the whole step ---- */

static void normed(const double *x, const float *w, double *y, int k, double eps) {
  double t = 0;
  for (int i = 0; i < k; i++) t += x[i] * x[i];
  t = 1 / sqrt(t / k + eps);
  for (int i = 0; i < k; i++) y[i] = w ? w[i] * (x[i] * t) : x[i];
}
static void product(const Matrix *m, const double *x, double *y) {
  const double *w = weights_of(m);
  for (int i = 0; i < m->n; i++) {
    y[i] = m->bias ? m->bias[i] : 0;
    for (int j = 0; j < m->k; j++) y[i] += w[(long)i * m->k + j] * x[j];
  }
}
static double activated(int kind, double x) { return kind == 0 ? x / (1 + exp(-x)) : 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double capped(double x, double cap) { return cap > 0 ? cap * tanh(x / cap) : x; }
static void turn(const Model *m, const Batch *b, const Layer *l, int row, double *x) {
  const float *c, *s; int half_dim = m->rotary_dim / 2; long at = (l->rotary * b->table_rows + b->positions[row]) * m->rotary_dim;
  if (l->rotary < 0) return;
  c = b->cosines + at; s = b->sines + at;
  for (int d = 0; d < half_dim; d++) {
    double p = x[d], q = x[d + half_dim];
    x[d] = p * c[d] - q * s[d]; x[d + half_dim] = q * c[d + half_dim] + p * s[d + half_dim];
  }
}

/* ---- rows of keys and values, number by number ---- */

static const struct { int type; const char *name; double limit; } ROW_TYPES[] = {{F32, "float32", 0}, {F16, "float16", 2e-2}, {BF16, "bfloat16", 5e-2}, {Q8_0, "int8", 8e-2}};
enum { NUM_ROW_TYPES = 4 };
static long kept_bytes(int type, int D) { return type == F32 ? 4L * D : type == Q8_0 ? D + 2L * ((D + 31) / 32) : 2L * D; }

static double keep_half(uint8_t *to, double x) { _Float16 h = (_Float16)x; memcpy(to, &h, 2); return (double)h; }
static void keep_row(int type, uint8_t *to, const double *x, int D) {
  for (int d = 0; d < D; d++) {
    float f = (float)x[d]; double most = 0, scale, q; uint32_t bits;
    if (type == F32) memcpy(to + 4 * d, &f, 4);
    else if (type == F16) keep_half(to + 2 * d, f);
    else if (type == BF16) { memcpy(&bits, &f, 4); bits += 0x7fff + (bits >> 16 & 1); bits >>= 16; memcpy(to + 2 * d, &bits, 2); }
    else {
      uint8_t *block = to + d / 32 * 34;
      for (int i = d / 32 * 32; i < D && i < d / 32 * 32 + 32; i++) most = fmax(most, fabs((float)x[i]));
      scale = keep_half(block, (float)most / 127.0f); q = scale > 0 ? nearbyint(f / scale) : 0; block[2 + d % 32] = (uint8_t)(int8_t)fmax(-127, fmin(127, q));
    }
  }
}
/* number d of row i of one head */
static double kept(const Model *m, const uint8_t *rows, const Rows *lane, int layer, int head, int64_t i, int d) {
  return weight(m->row_type, rows + layer * lane->layer + head * lane->head + i * kept_bytes(m->row_type, m->dim), d);
}

/* attention of one token that stands at row `own` of its lane */
static void attended(const Model *m, const Layer *l, const Rows *lane, int64_t own, const double *q, double *out) {
  int D = m->dim; double *p = malloc(sizeof(double) * (own + 1));
  for (int h = 0; h < m->heads; h++) {
    int layer = l->layer_in_group, head = h / (m->heads / m->kv_heads); double sum = 0;
    int64_t first = l->window && own + 1 > l->window ? own + 1 - l->window : 0;
    for (int64_t i = first; i <= own; i++) {
      p[i] = 0;
      for (int d = 0; d < D; d++) p[i] += q[h * D + d] * kept(m, lane->k, lane, layer, head, i, d);
      p[i] = exp(capped(p[i] * m->scale, m->score_cap)); sum += p[i];
    }
    for (int d = 0; d < D; d++) { out[h * D + d] = 0; for (int64_t i = first; i <= own; i++) out[h * D + d] += p[i] / sum * kept(m, lane->v, lane, layer, head, i, d); }
  }
  free(p);
}

/* one token through all layers: writes its keys and values, and changes x to what the head is applied to */
static void follow_token(const Model *m, const Batch *b, int row, double *x) {
  int D = m->dim, H = m->hidden; int lane_index = row / b->tokens, token = row % b->tokens;
  double h[1024], q[1024], kv[1024], a[1024], up[2048], gate[2048], delta[1024];
  for (int i = 0; i < m->layers; i++) {
    const Layer *l = m->layer + i; const Rows *lane = b->rows + (long)lane_index * m->groups + l->group; int64_t own = lane->rows + token;
    normed(x, l->norm_in, h, H, m->eps);
    product(&l->q, h, q);
    for (int j = 0; j < m->heads; j++) { if (l->q_norm) normed(q + j * D, l->q_norm, q + j * D, D, m->eps); turn(m, b, l, row, q + j * D); }
    for (int kind = 0; kind < 2; kind++) {
      product(kind ? &l->v : &l->k, h, kv);
      for (int j = 0; j < m->kv_heads; j++) {
        if (!kind) { if (l->k_norm) normed(kv + j * D, l->k_norm, kv + j * D, D, m->eps); turn(m, b, l, row, kv + j * D); }
        keep_row(m->row_type, (kind ? lane->v : lane->k) + l->layer_in_group * lane->layer + j * lane->head + own * kept_bytes(m->row_type, D), kv + j * D, D);
      }
    }
    attended(m, l, lane, own, q, a);
    product(&l->o, a, delta);
    if (l->norm_attention) normed(delta, l->norm_attention, delta, H, m->eps);
    for (int j = 0; j < H; j++) x[j] += m->residual * delta[j];
    normed(x, l->norm_mlp, h, H, m->eps);
    product(&l->gate, h, gate); product(&l->up, h, up);
    for (int j = 0; j < m->inter; j++) gate[j] = activated(m->activation, gate[j]) * up[j];
    product(&l->down, gate, delta);
    if (l->norm_mlp_out) normed(delta, l->norm_mlp_out, delta, H, m->eps);
    for (int j = 0; j < H; j++) x[j] += m->residual * delta[j];
  }
  normed(x, m->norm, x, H, m->eps);
}

/* Which parts a model has. All are llama-like: two layers, the second with its rows in a group of its own. */
typedef struct {
  const char *name; int type, head_type, hidden, heads, kv_heads, dim, rotary_dim, inter, activation, window, has_bias, has_qk_norm, has_out_norms;
  float score_cap, logit_cap, residual;
} Shape;
static const Shape SHAPES[] = {
  {"llama", Q4_1, Q8_0, 192, 3, 1, 64, 64, 320, 0, 0, 0, 0, 0, 0, 0, 1},
  {"qwen with biases", Q5_0, F16, 128, 4, 2, 32, 32, 96, 0, 0, 1, 0, 0, 0, 0, 1},
  {"qwen with q and k norms", Q4_0, BF16, 128, 4, 4, 48, 48, 160, 0, 0, 0, 1, 0, 0, 0, 1},
  {"gemma with windows and caps", Q6_K, Q5_1, 256, 4, 2, 128, 128, 256, 1, 70, 0, 0, 1, 5, 3, 1},
  {"part of a head turned, odd sizes", F32, F32, 100, 5, 1, 20, 8, 52, 0, 3, 1, 1, 0, 0, 0, 0.5f},
  {"narrow matrices that need more memory than wide ones", BF16, F16, 1024, 2, 1, 64, 64, 1104, 0, 0, 0, 0, 0, 0, 0, 1},
  {"k-blocks", Q4_K, Q5_K, 256, 8, 2, 32, 32, 512, 0, 0, 0, 0, 0, 0, 0, 1},
};

static Model make_model(const Shape *s, int row_type) {
  Layer *layers = calloc(2, sizeof *layers); int width = s->heads * s->dim, kv = s->kv_heads * s->dim, H = s->hidden;
  for (int i = 0; i < 2; i++) {
    Layer *l = layers + i;
    *l = (Layer){.norm_in = randoms(H, 1), .norm_mlp = randoms(H, 1), .group = i, .layer_in_group = 1 - i, .rotary = i, .window = i ? s->window : 0};
    if (s->has_out_norms) { l->norm_attention = randoms(H, 1); l->norm_mlp_out = randoms(H, 1); }
    if (s->has_qk_norm) { l->q_norm = randoms(s->dim, 1); l->k_norm = randoms(s->dim, 1); }
    l->q = make_matrix(s->type, width, H, s->has_bias); l->k = make_matrix(s->type, kv, H, s->has_bias); l->v = make_matrix(s->type, kv, H, s->has_bias);
    l->o = make_matrix(s->type, H, width, 0); l->gate = make_matrix(s->type, s->inter, H, 0);
    l->up = make_matrix(s->type, s->inter, H, 0); l->down = make_matrix(s->type, H, s->inter, 0);
  }
  return (Model){
    .layers = 2, .hidden = H, .heads = s->heads, .kv_heads = s->kv_heads, .dim = s->dim, .inter = s->inter, .groups = 2, .rotary_dim = s->rotary_dim,
    .activation = s->activation, .terms = 2, .row_type = row_type, .eps = 1e-5f, .scale = 1 / sqrtf((float)s->dim), .score_cap = s->score_cap, .logit_cap = s->logit_cap,
    .residual = s->residual, .norm = randoms(H, 1), .layer = layers, .head = make_matrix(s->head_type, 75, H, 0)};
}

/* a lane with `before` random rows and room for `tokens` more, in both groups; `floats` is the size of its keys */
static void fill_lane(const Model *m, Rows *lane, int before, int tokens, int64_t *floats) {
  long row = kept_bytes(m->row_type, m->dim); int64_t head = (before + tokens) * row, layer = head * m->kv_heads; double x[256];
  *floats = (2 * layer + 3) / 4;
  for (int g = 0; g < 2; g++) {
    lane[g] = (Rows){.k = (uint8_t *)room(*floats), .v = (uint8_t *)room(*floats), .layer = layer, .head = head, .rows = before};
    for (int h = 0; h < 2 * m->kv_heads; h++) for (int i = 0; i < 2 * before; i++) {
      for (int d = 0; d < m->dim; d++) x[d] = uniform();
      keep_row(m->row_type, (i % 2 ? lane[g].k : lane[g].v) + h * head + i / 2 * row, x, m->dim);
    }
  }
}
static void copy_lanes(const Rows *from, Rows *to, int num, const int64_t *floats) {
  for (int i = 0; i < num; i++) {
    to[i] = from[i]; to[i].k = (uint8_t *)room(floats[i / 2]); to[i].v = (uint8_t *)room(floats[i / 2]);
    memcpy(to[i].k, from[i].k, sizeof(float) * floats[i / 2]); memcpy(to[i].v, from[i].v, sizeof(float) * floats[i / 2]);
  }
}
static void run_step(const char *check, const Model *m, Batch b, const float *x, float *logits) {
  long size = (long)b.lanes * b.tokens * m->hidden, floats; int32_t *counters = calloc(2 * (8 * m->layers + 2), sizeof *counters);
  b.x = room(size); b.logits = logits; memcpy(b.x, x, sizeof(float) * size);
  floats = step_floats(m, &b); float *work = room(floats);
  step(m, &b, work, counters);
  check_border(check, work, floats); check_border(check, b.x, size); check_border(check, logits, (long)b.logit_rows * m->head.n);
  free(work); free(b.x); free(counters);
}
static void compare_row(const char *check, const Model *m, const uint8_t *found, const uint8_t *wanted, double limit) {
  for (int d = 0; d < m->dim; d++) {
    double a = weight(m->row_type, found, d), b = weight(m->row_type, wanted, d);
    if (!(fabs(a - b) <= limit * (1 + fabs(b)))) complain(check, "a key or value", a, b);
  }
}
/* the rows of both layers of each group, of which the step used one */
static void compare_rows(const char *check, const Model *m, const Rows *found, const Rows *wanted, int num, int tokens, const int64_t *floats, double limit) {
  long row = kept_bytes(m->row_type, m->dim);
  for (int i = 0; i < num; i++) {
    for (int h = 0; h < 2 * m->kv_heads; h++) {
      long at = h * found[i].head, size = (found[i].rows + tokens) * row;
      if (h / m->kv_heads != 1 - i % 2) {
        if (memcmp(found[i].k + at, wanted[i].k + at, size) || memcmp(found[i].v + at, wanted[i].v + at, size)) complain(check, "rows of another layer", 1, 0);
      } else for (long j = 0; j < size; j += row) {
        compare_row(check, m, found[i].k + at + j, wanted[i].k + at + j, limit); compare_row(check, m, found[i].v + at + j, wanted[i].v + at + j, limit);
      }
    }
    check_border(check, (const float *)found[i].k, floats[i / 2]); check_border(check, (const float *)found[i].v, floats[i / 2]);
  }
}

/* forget the rows that a window has passed, as a lane does that was restored there */
static void drop_rows(const Model *m, Rows *lane) {
  int window = m->layer[1].window; int64_t gone = window ? lane->rows - (window - 1) : 0;
  if (gone > 0) { long bytes = gone * kept_bytes(m->row_type, m->dim); lane->k += bytes; lane->v += bytes; lane->first += gone; lane->rows -= gone; }
}

#define TABLE_ROWS 50
/* Compare with the definition, and each lane with the same lane alone on one thread: to the bit. */
static void check_step(const Shape *shape, int kind, const int *before, int lanes, int tokens, int threads) {
  Model m = make_model(shape, ROW_TYPES[kind].type); int rows = lanes * tokens, n = m.head.n; char check[128]; int64_t floats[8]; atomic_llong clipped = 0;
  double limit = fmax(m.layer->q.panels ? 1e-2 : 1e-4, ROW_TYPES[kind].limit); /* layers of random weights multiply what is rounded */
  snprintf(check, sizeof check, "step of %s, rows of %s, %d lanes, %d tokens, %d threads", shape->name, ROW_TYPES[kind].name, lanes, tokens, threads);
  Rows at_first[16], ours[16], theirs[16];
  for (int i = 0; i < lanes; i++) fill_lane(&m, at_first + 2 * i, before[i], tokens, floats + i);
  copy_lanes(at_first, ours, 2 * lanes, floats); copy_lanes(at_first, theirs, 2 * lanes, floats);
  float *x = randoms((long)rows * m.hidden, 1), *cosines = randoms(2L * TABLE_ROWS * m.rotary_dim, 1), *sines = randoms(2L * TABLE_ROWS * m.rotary_dim, 1);
  int32_t positions[256];
  for (int r = 0; r < rows; r++) positions[r] = (int32_t)(draw() % TABLE_ROWS);
  float *logits = room((long)rows * n), *alone = room(n);
  Batch b = {.rows = ours, .positions = positions, .cosines = cosines, .sines = sines, .table_rows = TABLE_ROWS, .lanes = lanes, .tokens = tokens,
             .logit_rows = rows, .threads = threads, .clipped = &clipped};
  run_step(check, &m, b, x, logits);

  Batch definition = b; definition.rows = theirs;
  double *end = malloc(sizeof(double) * (rows * m.hidden + n));
  for (int r = 0; r < rows; r++) {
    double *mine = end + (long)r * m.hidden, out[128];
    for (int j = 0; j < m.hidden; j++) mine[j] = x[(long)r * m.hidden + j];
    follow_token(&m, &definition, r, mine); product(&m.head, mine, out);
    for (int j = 0; j < n; j++) {
      double wanted = capped(out[j], m.logit_cap), found = logits[(long)r * n + j];
      if (!(fabs(found - wanted) <= limit * (1 + fabs(wanted)))) complain(check, "logit", found, wanted);
    }
  }
  compare_rows(check, &m, ours, theirs, 2 * lanes, tokens, floats, limit);
  if (clipped) complain(check, "numbers that were clipped", (double)clipped, 0);

  for (int i = 0; i < lanes; i++) {
    Rows own[2]; copy_lanes(at_first + 2 * i, own, 2, floats + i);
    Batch single = b; single.rows = own; single.positions = positions + i * tokens; single.lanes = single.logit_rows = single.threads = 1;
    run_step(check, &m, single, x + (long)i * tokens * m.hidden, alone);
    const float *last = logits + ((long)(i + 1) * tokens - 1) * n;
    for (int j = 0; j < n; j++) if (alone[j] != last[j]) { complain(check, "logit that depends on other lanes or threads", last[j], alone[j]); break; }

    Rows stepped[2]; copy_lanes(at_first + 2 * i, stepped, 2, floats + i);
    for (int t = 0; t < tokens; t++) {
      drop_rows(&m, stepped + 1);
      Batch one = single; one.rows = stepped; one.positions = positions + i * tokens + t; one.tokens = 1;
      run_step(check, &m, one, x + ((long)i * tokens + t) * m.hidden, alone);
      if (memcmp(alone, logits + ((long)i * tokens + t) * n, sizeof(float) * n)) { complain(check, "logits of a run that differ from those of a step, at token", t, t); break; }
      stepped[0].rows++; stepped[1].rows++;
    }
  }
}

/* ---- all checks ---- */

static void *find(void *library, const char *isa, const char *name) {
  char full[64]; snprintf(full, sizeof full, "bough_%s_%s", isa, name); void *found = dlsym(library, full);
  if (!found) { printf("there is no %s\n", full); exit(2); }
  return found;
}

int main(int count, char **words) {
  if (count != 3) { printf("kernels_test LIBRARY ISA\n"); return 2; }
  void *library = dlopen(words[1], RTLD_NOW); const char *isa = words[2];
  if (!library) { printf("%s\n", dlerror()); return 2; }
  linear = find(library, isa, "linear"); linear_floats = find(library, isa, "linear_floats"); unpack = find(library, isa, "unpack");
  gather = find(library, isa, "gather"); pack = find(library, isa, "pack"); panels_bytes = find(library, isa, "panels_bytes"); step_floats = find(library, isa, "step_floats"); step = find(library, isa, "step");
  for (const Type *t = TYPES; t < TYPES + NUM_TYPES; t++) {
    int k = t->block == 1 ? 70 : t->block == 32 ? 96 : 512;
    for (int threads = 1; threads <= 3; threads += 2) { check_unpack(t, 13, k, threads); check_unpack(t, 6, 512, threads); }
    for (int rows = 1; rows <= 14; rows++) check_linear(t, 45, k, rows, 2, 1 + rows % 3);
    for (int rows = 1; rows <= 13; rows += 4) check_linear(t, 37, 512, rows, 1, 2);
    check_linear(t, 70, 2048, 5, 2, 2); check_linear(t, 9, 32 * 256, 7, 2, 3); check_linear(t, 100, 768, 23, 2, 3);
  }
  for (const Shape *s = SHAPES; s < SHAPES + sizeof SHAPES / sizeof *SHAPES; s++) {
    for (int kind = 0; kind < NUM_ROW_TYPES; kind++) {
      check_step(s, kind, (int[]){130, 0, 300, 64, 700}, 5, 1, 3);
      check_step(s, kind, (int[]){63}, 1, 37, 2);
    }
    check_step(s, 0, (int[]){0}, 1, 1, 1); check_step(s, 0, (int[]){0}, 1, 2, 2); check_step(s, 0, (int[]){500}, 1, 30, 3); check_step(s, 0, (int[]){9, 100}, 2, 18, 3);
  }
  printf(mistakes ? "%d mistakes\n" : "all is right\n", mistakes);
  return mistakes > 0;
}
