/* Attention: keys and values are read once for all queries of a key head, of one token or of a run.

   Sums have one order, whatever is computed together: rows are taken by blocks of KEYS, counted from the start of the sequence; the blocks
   of a section of SECTION rows are added up one after the other, and then the sections. A row that a query may not see adds nothing. */

#define KEYS 64     /* rows in a block */
#define SECTION 256 /* rows of which one part of a step's work is made */
#define QUERIES 16  /* tokens of a run that look at the same rows together */
#define AT_ONCE 6   /* queries whose sums fill the registers */
enum { WIDE = VW == 8 ? 2 : 4 };

/* For each query over some rows: the largest score, the sum of exponentials, and the values weighed by them [queries][D]. */
typedef struct { float *top, *sum, *out; } Weighed;

static inline void clear_weighed(Weighed w, int num, int D) {
  for (int i = 0; i < num; i++) { w.top[i] = -INFINITY; w.sum[i] = 0; }
  memset(w.out, 0, sizeof(float) * num * D);
}
static inline float exp_one(float x) { vf e = exp_(splat(x)); return e[0]; }

/* what `more` has of query i is added to `all` */
static void join_weighed(Weighed all, Weighed more, int i, int D) {
  if (more.top[i] == -INFINITY) return;
  float top = more.top[i] > all.top[i] ? more.top[i] : all.top[i];
  float f = all.top[i] == -INFINITY ? 0.0f : exp_one(all.top[i] - top), g = exp_one(more.top[i] - top);
  float *a = all.out + (long)i * D; const float *b = more.out + (long)i * D;
  all.top[i] = top; all.sum[i] = all.sum[i] * f + more.sum[i] * g;
  for (int d = 0; d < D; d++) a[d] = a[d] * f + b[d] * g;
}

static inline void cap_scores(float *p, int n, float cap) {
  if (cap > 0) for (int i = 0; i < n; i++) p[i] = cap * tanhf(p[i] / cap);
}

/* the largest of p[0..KEYS) and `top`, in any order: a largest number has no rounding */
static inline float largest(const float *p, float top) {
  vf t = load(p); for (int i = VW; i < KEYS; i += VW) t = max_(t, load(p + i));
  float lanes[VW]; store(lanes, t);
  for (int j = 0; j < VW; j++) top = lanes[j] > top ? lanes[j] : top;
  return top;
}
/* exp(p - top) in place; returns the sum */
static inline float exponentials(float *p, float top) {
  vf sum = {0};
  for (int i = 0; i < KEYS; i += VW) { vf e = exp_(load(p + i) - top); store(p + i, e); sum = sum + e; }
  return total(sum);
}

/* columns [low, high) of out [D][KEYS] are rows [low, high) of keys [KEYS][D]; the other columns are zeros */
static void transpose_keys(const float *keys, int low, int high, int D, float *out) {
  if (low > 0 || high < KEYS) memset(out, 0, sizeof(float) * KEYS * D);
  int i = low;
  for (; i + 4 <= high && D % 4 == 0; i += 4)
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
  for (; i < high; i++) for (int d = 0; d < D; d++) out[(long)d * KEYS + i] = keys[(long)i * D + d];
}

/* scores[AT_ONCE][KEYS] of queries with transposed keys */
static void score_block(const float *const *q, const float *keys, int D, float scale, float *scores) {
  for (int c = 0; c < KEYS; c += WIDE * VW) {
    vf sum[AT_ONCE][WIDE]; UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = (vf){0};
    for (int d = 0; d < D; d++) {
      vf k[WIDE]; UNROLL for (int v = 0; v < WIDE; v++) k[v] = load(keys + (long)d * KEYS + c + v * VW);
      UNROLL for (int i = 0; i < AT_ONCE; i++) { vf t = splat(q[i][d]); UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = fma_(t, k[v], sum[i][v]); }
    }
    UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < WIDE; v++) store(scores + (long)i * KEYS + c + v * VW, sum[i][v] * scale);
  }
}
/* columns [j, j + W vectors) of out[i] = factor[i] * out[i] + rows [low, high) of values weighed by p[i] */
#define WEIGH(W) { \
    vf sum[AT_ONCE][W]; UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < W; v++) sum[i][v] = load(out[i] + j + v * VW) * factor[i]; \
    for (int r = low; r < high; r++) { \
      vf a[W]; UNROLL for (int v = 0; v < W; v++) a[v] = load(values + (long)r * D + j + v * VW); \
      UNROLL for (int i = 0; i < AT_ONCE; i++) { vf t = splat(p[i * KEYS + r]); UNROLL for (int v = 0; v < W; v++) sum[i][v] = fma_(t, a[v], sum[i][v]); } } \
    UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int v = 0; v < W; v++) store(out[i] + j + v * VW, sum[i][v]); }
static void weigh_block(const float *p, const float *factor, const float *values, int low, int high, int D, float *const *out) {
  int j = 0;
  for (; j + WIDE * VW <= D; j += WIDE * VW) WEIGH(WIDE)
  for (; j + VW <= D; j += VW) WEIGH(1)
  for (; j < D; j++) for (int i = 0; i < AT_ONCE; i++) {
    float t = out[i][j] * factor[i];
    for (int r = low; r < high; r++) t += p[i * KEYS + r] * values[(long)r * D + j];
    out[i][j] = t;
  }
}

/* memory of one thread, in floats */
static inline long own_attention_floats(const Model *m, int tokens) {
  int D = m->dim, num = (tokens > 1 ? QUERIES : 1) * (m->heads / m->kv_heads);
  return rounded((long)KEYS * D) * 2 + AT_ONCE * (KEYS + D) + 2 * rounded((long)num * (D + 2));
}

/* Some tokens of a lane and the queries that look at one of its key heads. */
typedef struct { const Model *m; const Layer *l; const Rows *lane; const float *q; long q_stride; int first, last, head; } Queries;

/* The queries over the rows [start, end) of the sequence, which are part of one section: into `w`, which is cleared. */
static void attend_section(const Queries *x, int64_t start, int64_t end, Weighed w, float *own) {
  const Model *m = x->m; const Rows *lane = x->lane; int D = m->dim, g = m->heads / m->kv_heads, num = (x->last - x->first) * g; long size = kept_bytes(m->row_type, D);
  float *keys = own, *copied = keys + rounded((long)KEYS * D), *scores = copied + rounded((long)KEYS * D), *unused = scores + AT_ONCE * KEYS;
  long at = x->l->layer_in_group * lane->layer + x->head * lane->head;
  clear_weighed(w, num, D);
  for (int64_t block = start / KEYS * KEYS; block < end; block += KEYS) {
    int low = start > block ? (int)(start - block) : 0, high = end - block < KEYS ? (int)(end - block) : KEYS;
    long offset = at + (block - lane->first) * size; /* where the block begins, or would */
    transpose_keys(rows_as_floats(m->row_type, lane->k + offset, low, high, D, copied), low, high, D, keys);
    const float *values = rows_as_floats(m->row_type, lane->v + offset, low, high, D, copied);
    for (int i = 0; i < num; i += AT_ONCE) {
      int some = num - i < AT_ONCE ? num - i : AT_ONCE; const float *q[AT_ONCE]; float factor[AT_ONCE], *out[AT_ONCE];
      for (int j = 0; j < AT_ONCE; j++) {
        int query = i + (j < some ? j : 0);
        q[j] = x->q + (x->first + query / g) * x->q_stride + (long)(x->head * g + query % g) * D; out[j] = j < some ? w.out + (long)query * D : unused; factor[j] = 0;
      }
      score_block(q, keys, D, m->scale, scores);
      for (int j = 0; j < some; j++) {
        float *p = scores + (long)j * KEYS; int64_t row = lane->first + lane->rows + x->first + (i + j) / g; /* the query's own */
        int64_t oldest = x->l->window && row + 1 > x->l->window ? row + 1 - x->l->window : 0;
        int from = oldest - block > low ? (oldest - block < KEYS ? (int)(oldest - block) : KEYS) : low, to = row + 1 - block < high ? (int)(row + 1 - block) : high;
        if (to < from) to = from;
        cap_scores(p, KEYS, m->score_cap);
        for (int c = 0; c < from; c++) p[c] = -INFINITY;
        for (int c = to; c < KEYS; c++) p[c] = -INFINITY;
        float top = largest(p, w.top[i + j]);
        factor[j] = 1;
        if (top == -INFINITY) { memset(p, 0, sizeof(float) * KEYS); continue; }
        factor[j] = w.top[i + j] == -INFINITY ? 0 : exp_one(w.top[i + j] - top);
        w.top[i + j] = top; w.sum[i + j] = w.sum[i + j] * factor[j] + exponentials(p, top);
      }
      weigh_block(scores, factor, values, low, high, D, out);
    }
  }
}

/* the first row that any of the queries may see, and the first that none may */
static inline int64_t first_row(const Queries *x) {
  int64_t row = x->lane->first + x->lane->rows + x->first;
  return x->l->window && row + 1 > x->l->window ? row + 1 - x->l->window : 0;
}
static inline int64_t end_row(const Queries *x) { return x->lane->first + x->lane->rows + x->last; }
static inline Weighed weighed_at(float *p, int num) { return (Weighed){p, p + num, p + 2 * num}; }

/* All rows that these queries may see; out[query] are the attended values. */
static void attend_all(const Queries *x, float *out, long out_stride, float *own) {
  const Model *m = x->m; int D = m->dim, g = m->heads / m->kv_heads, num = (x->last - x->first) * g; int64_t start = first_row(x), end = end_row(x);
  float *memory = own + rounded((long)KEYS * D) * 2 + AT_ONCE * (KEYS + D);
  Weighed all = weighed_at(memory, num), part = weighed_at(memory + rounded((long)num * (D + 2)), num);
  clear_weighed(all, num, D);
  for (int64_t section = start / SECTION * SECTION; section < end; section += SECTION) {
    attend_section(x, start > section ? start : section, end < section + SECTION ? end : section + SECTION, part, own);
    for (int i = 0; i < num; i++) join_weighed(all, part, i, D);
  }
  for (int i = 0; i < num; i++) {
    float *to = out + (x->first + i / g) * out_stride + (long)(x->head * g + i % g) * D;
    for (int d = 0; d < D; d++) to[d] = all.out[(long)i * D + d] / all.sum[i];
  }
}
