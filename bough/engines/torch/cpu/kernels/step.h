/* The whole step of a model: every layer's phases in one region, and the head.

   `h` is what the next products read; its digits are made together with it, so that no phase is there for rounding alone. */

typedef struct {
  const Model *m; const Batch *b;
  float *h, *delta, *qkv, *attended, *mlp, *partial, *own; Digits *h_digits, *attended_digits, *mlp_digits;
  long own_floats; int rows, sections, size_o, size_mlp, size_down, size_head;
} Step;

static inline int uses_digits(const Model *m, int k) { return m->terms && k % 32 == 0; }
/* sections that a lane's rows lie in, at most, if each lane gets one token; a run takes all sections in one part */
static int num_sections(const Model *m, const Batch *b) {
  int64_t most = 1;
  if (b->tokens == 1) for (int i = 0; i < b->lanes * m->groups; i++) {
    const Rows *lane = b->rows + i; most = larger(most, (lane->first + lane->rows) / SECTION - lane->first / SECTION + 1);
  }
  return (int)most;
}
static long own_floats(const Model *m, int tokens) {
  long products = larger(own_product_floats(m->hidden), larger(own_product_floats(m->inter), own_product_floats(m->heads * m->dim)));
  return rounded(larger(products, own_attention_floats(m, tokens))); /* a narrower product may need more than the widest */
}
static inline long partial_floats(const Model *m) { int g = m->heads / m->kv_heads; return rounded((long)g * (m->dim + 2)); }
/* Lay out a step's memory from `work` on; returns the floats that it takes. */
static long lay_out(Step *s, float *work) {
  const Model *m = s->m; long rows = s->rows, at = 0;
#define TAKE(name, type, floats) s->name = (type)(work + at); at += rounded(floats);
  TAKE(h, float *, rows * m->hidden) TAKE(delta, float *, rows * m->hidden) TAKE(qkv, float *, rows * width(m)) TAKE(attended, float *, rows * m->heads * m->dim)
  TAKE(mlp, float *, rows * 2 * m->inter) TAKE(h_digits, Digits *, digit_floats(rows, m->hidden)) TAKE(attended_digits, Digits *, digit_floats(rows, m->heads * m->dim))
  TAKE(mlp_digits, Digits *, digit_floats(rows, m->inter)) TAKE(partial, float *, s->b->tokens > 1 ? 0 : rows * m->kv_heads * s->sections * partial_floats(m))
  s->own_floats = own_floats(m, s->b->tokens); TAKE(own, float *, s->b->threads * s->own_floats)
#undef TAKE
  return at;
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
  if (uses_digits(s->m, k)) round_row(h, k, s->m->terms, s->h_digits + (long)row * (k / 32));
}

/* one head of queries, keys or values for all rows: product, norm, rotation; keys and values go to their lanes */
static void project_head(const Step *s, const Layer *l, int head, float *own) {
  const Model *m = s->m; const Batch *b = s->b; int D = m->dim, W = width(m), nh = m->heads, nk = m->kv_heads; long size = kept_bytes(m->row_type, D), clipped = 0;
  int kind = head < nh ? 0 : head < nh + nk ? 1 : 2, index = head - (kind == 0 ? 0 : kind == 1 ? nh : nh + nk);
  const Matrix *w = kind == 0 ? &l->q : kind == 1 ? &l->k : &l->v; Input in = {s->h, m->hidden, s->h_digits, m->terms};
  multiply(w, index * D, index * D + D, &in, s->rows, (Target){s->qkv + (head - index) * D, W, 0, 1}, own);
  const float *norm = kind == 0 ? l->q_norm : kind == 1 ? l->k_norm : NULL;
  for (int r = 0; r < s->rows; r++) {
    float *x = s->qkv + (long)r * W + (long)head * D;
    if (norm) normalize(x, norm, x, D, m->eps);
    if (kind < 2 && l->rotary >= 0) {
      long at = (l->rotary * b->table_rows + b->positions[r]) * m->rotary_dim;
      rotate(x, b->cosines + at, b->sines + at, m->rotary_dim);
    }
    if (kind) {
      const Rows *lane = b->rows + (long)(r / b->tokens) * m->groups + l->group; uint8_t *to = kind == 1 ? lane->k : lane->v;
      clipped += write_row(m->row_type, to + l->layer_in_group * lane->layer + index * lane->head + (lane->rows + r % b->tokens) * size, x, D);
    }
  }
  if (clipped) atomic_fetch_add_explicit(b->clipped, clipped, memory_order_relaxed);
}

static Queries queries_of(const Step *s, const Layer *l, int lane, int first, int last, int head) {
  const Model *m = s->m; int T = s->b->tokens, W = width(m);
  return (Queries){m, l, s->b->rows + (long)lane * m->groups + l->group, s->qkv + (long)lane * T * W, W, first, last, head};
}
static inline float *partial_at(const Step *s, int row, int head, int section) {
  return s->partial + (((long)row * s->m->kv_heads + head) * s->sections + section) * partial_floats(s->m);
}
/* One token's queries of one key head over one section of its lane's rows. */
static void attend_token(const Step *s, const Layer *l, int row, int head, int section, float *own) {
  Queries x = queries_of(s, l, row, 0, 1, head); int64_t start = first_row(&x), end = end_row(&x), at = (start / SECTION + section) * SECTION;
  if (at < end) attend_section(&x, start > at ? start : at, end < at + SECTION ? end : at + SECTION, weighed_at(partial_at(s, row, head, section), s->m->heads / s->m->kv_heads), own);
}
/* The sections of one token's lane, one after the other. */
static void join_sections(const Step *s, const Layer *l, int row) {
  const Model *m = s->m; int D = m->dim, g = m->heads / m->kv_heads;
  for (int head = 0; head < m->kv_heads; head++) {
    Queries x = queries_of(s, l, row, 0, 1, head); int64_t first = first_row(&x) / SECTION; int num = (int)((end_row(&x) - 1) / SECTION - first) + 1;
    for (int i = 0; i < g; i++) {
      float top = -INFINITY, sum = 0, *out = s->attended + ((long)row * m->heads + head * g + i) * D; Weighed all = {&top, &sum, out};
      memset(out, 0, sizeof(float) * D);
      for (int j = 0; j < num; j++) {
        Weighed part = weighed_at(partial_at(s, row, head, j), g);
        join_weighed(all, (Weighed){part.top + i, part.sum + i, part.out + (long)i * D}, 0, D);
      }
      for (int d = 0; d < D; d++) out[d] /= sum;
    }
  }
}
/* the attended values of one row are complete: their digits */
static void finish_attention(const Step *s, const Layer *l, int row) {
  int k = s->m->heads * s->m->dim;
  if (s->b->tokens == 1) join_sections(s, l, row);
  if (uses_digits(s->m, k)) round_row(s->attended + (long)row * k, k, s->m->terms, s->attended_digits + (long)row * (k / 32));
}

/* columns [first, last) of the activated product of gate and up, and their digits */
static void gate_up(const Step *s, const Layer *l, int first, int last, float *own) {
  const Model *m = s->m; long I = m->inter; Input in = {s->h, m->hidden, s->h_digits, m->terms};
  float *gates = s->mlp, *ups = s->mlp + (long)s->rows * I;
  multiply(&l->gate, first, last, &in, s->rows, (Target){gates, I, 0, 1}, own);
  multiply(&l->up, first, last, &in, s->rows, (Target){ups, I, 0, 1}, own);
  for (int r = 0; r < s->rows; r++) {
    float *a = gates + r * I, *b = ups + r * I; int j = first;
    for (; j < last; j += VW) {
      float in_[VW], with[VW]; int n = last - j < VW ? last - j : VW; memset(in_, 0, sizeof in_); memset(with, 0, sizeof with);
      memcpy(in_, a + j, sizeof(float) * n); memcpy(with, b + j, sizeof(float) * n);
      vf x = load(in_), y = m->activation == SILU ? x / (1.0f + exp_(-x)) : 0.5f * x * (1.0f + tanh_(0.7978845608f * (x + 0.044715f * x * x * x)));
      store(in_, y * load(with)); memcpy(a + j, in_, sizeof(float) * n);
    }
    if (uses_digits(m, (int)I)) round_row(a + first, last - first, m->terms, s->mlp_digits + (r * I + first) / 32);
  }
}

enum { PREPARE, PROJECT, ATTEND, FINISH_ATTENTION, OUT, PREPARE_MLP, GATE_UP, DOWN, PHASES };

static int step_parts(const Region *g, int phase) {
  const Step *s = g->arg; const Model *m = s->m; int layer = phase / PHASES, kind = phase % PHASES;
  if (layer == m->layers) return kind == 0 ? s->rows : num_parts(m->head.n, s->size_head);
  switch (kind) {
    case PROJECT: return m->heads + 2 * m->kv_heads;
    case ATTEND: return s->b->tokens > 1 ? s->b->lanes * num_parts(s->b->tokens, QUERIES) * m->kv_heads : s->rows * m->kv_heads * s->sections;
    case OUT: return num_parts(m->hidden, s->size_o);
    case GATE_UP: return num_parts(m->layer[layer].gate.n, s->size_mlp);
    case DOWN: return num_parts(m->hidden, s->size_down);
    default: return s->rows; /* PREPARE, FINISH_ATTENTION, PREPARE_MLP */
  }
}
static int step_is_small(const Region *g, int phase) {
  const Step *s = g->arg; int kind = phase % PHASES, is_inside = phase / PHASES < s->m->layers;
  if (is_inside && kind == FINISH_ATTENTION) return s->rows == 1;
  return (kind == PREPARE || (kind == PREPARE_MLP && is_inside)) && (long)s->rows * s->m->hidden <= 8192;
}
static void add_product(const Step *s, const Matrix *w, const float *x, const Digits *digits, int part, int size, const float *norm, float *own) {
  int first = part * size, last = first + size < w->n ? first + size : w->n; long H = s->m->hidden; Input in = {x, w->k, digits, s->m->terms};
  multiply(w, first, last, &in, s->rows, norm ? (Target){s->delta, H, 0, 1} : (Target){s->b->x, H, 1, s->m->residual}, own);
}
static void attend_part(const Step *s, const Layer *l, int part, float *own) {
  const Model *m = s->m; int nk = m->kv_heads, T = s->b->tokens; long k = (long)m->heads * m->dim;
  if (T == 1) { attend_token(s, l, part / (nk * s->sections), part / s->sections % nk, part % s->sections, own); return; }
  int blocks = num_parts(T, QUERIES), at = part / nk, lane = at / blocks, first = (blocks - 1 - at % blocks) * QUERIES; /* the last tokens see most: they come first */
  Queries x = queries_of(s, l, lane, first, first + QUERIES < T ? first + QUERIES : T, part % nk);
  attend_all(&x, s->attended + (long)lane * T * k, k, own);
}
static void head_part(const Step *s, int part, float *own) {
  const Model *m = s->m; int first = part * s->size_head, last = first + s->size_head < m->head.n ? first + s->size_head : m->head.n, skipped = s->rows - s->b->logit_rows;
  Input in = {s->h + (long)skipped * m->hidden, m->hidden, s->h_digits + (long)skipped * (m->hidden / 32), m->terms};
  multiply(&m->head, first, last, &in, s->b->logit_rows, (Target){s->b->logits, m->head.n, 0, 1}, own);
  for (int r = 0; r < s->b->logit_rows; r++) cap_scores(s->b->logits + (long)r * m->head.n + first, last - first, m->logit_cap);
}
static void step_part(const Region *g, int phase, int part, int tid) {
  const Step *s = g->arg; const Model *m = s->m; int layer = phase / PHASES; float *own = s->own + tid * s->own_floats;
  const Layer *l = m->layer + layer, *before = layer ? l - 1 : NULL;
  if (layer == m->layers) {
    if (phase % PHASES == 0) prepare_row(s, part, before->norm_mlp_out, m->norm); else head_part(s, part, own);
    return;
  }
  switch (phase % PHASES) {
    case PREPARE: prepare_row(s, part, before ? before->norm_mlp_out : NULL, l->norm_in); return;
    case PROJECT: project_head(s, l, part, own); return;
    case ATTEND: attend_part(s, l, part, own); return;
    case FINISH_ATTENTION: finish_attention(s, l, part); return;
    case OUT: add_product(s, &l->o, s->attended, s->attended_digits, part, s->size_o, l->norm_attention, own); return;
    case PREPARE_MLP: prepare_row(s, part, l->norm_attention, l->norm_mlp); return;
    case GATE_UP: { int first = part * s->size_mlp, last = first + s->size_mlp < l->gate.n ? first + s->size_mlp : l->gate.n; gate_up(s, l, first, last, own); return; }
    default: add_product(s, &l->down, s->mlp, s->mlp_digits, part, s->size_down, l->norm_mlp_out, own); return;
  }
}

/* Floats of `work` that a step takes. */
EXPORT int64_t FN(step_floats)(const Model *m, const Batch *b) {
  Step s = {.m = m, .b = b, .rows = b->lanes * b->tokens, .sections = num_sections(m, b)};
  return lay_out(&s, NULL);
}

/* One step: x holds the embeddings [lanes * tokens][hidden], and is changed. Each lane has room for its new rows. `work` begins
   at a multiple of 64 bytes. `counters` are 2 * (8 * layers + 2) zeros. */
EXPORT void FN(step)(const Model *m, const Batch *b, float *work, int32_t *counters) {
  Step s = {.m = m, .b = b, .rows = b->lanes * b->tokens, .sections = num_sections(m, b)};
  lay_out(&s, work);
  s.size_o = part_rows(m->hidden, b->threads); s.size_down = s.size_o; s.size_mlp = part_rows(m->inter, b->threads); s.size_head = part_rows(m->head.n, b->threads * 4);
  int phases = m->layers * PHASES + 2;
  Region g = {phases, step_parts, step_part, step_is_small, &s, (atomic_int *)counters, (atomic_int *)counters + phases, 0};
  if (step_is_small(&g, 0)) end_phase(&g, -1, 0);
  run_region(&g, b->threads);
}
