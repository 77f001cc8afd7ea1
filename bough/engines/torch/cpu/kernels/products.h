/* Products for single callers and for the step: the kernel follows from the type of the weights. */

/* Rows of activations: floats [rows][stride], and their digits [rows][k / 32] where weights are integers. */
typedef struct { const float *x; long stride; const Digits *digits; int terms; } Input;

static inline long larger(long a, long b) { return a > b ? a : b; }
static inline long rounded(long n) { return (n + 15) & ~15L; }
static inline long digit_floats(long rows, int k) { return k % 32 ? 0 : rounded(rows * (k / 32) * (long)(sizeof(Digits) / sizeof(float))); }
/* floats of memory that a thread needs for a product with k columns */
static inline long own_product_floats(int k) { return rounded(larger(unpacked_floats(k), (long)STRIPS * (k / 32 + 1) * (long)(sizeof(Unpacked) / sizeof(float)))); }

/* weight rows [first, last) by all rows of activations */
static void multiply(const Matrix *m, int first, int last, const Input *in, int rows, Target to, float *own) {
  if (!is_integer(m->type)) multiply_as_floats(m, first, last, in->x, in->stride, rows, to, own);
  else if (rows <= FEW_ROWS) multiply_few(m, first, last, in->digits, 0, rows, in->terms, &to);
  else multiply_many(m, first, last, in->digits, rows, in->terms, &to, (Unpacked *)own);
}

/* row i of a matrix in float32; `own` has room for the row as it is in the file */
static void unpack_any_row(const Matrix *m, int64_t i, float *out, uint8_t *own) {
  if (!m->panels) { unpack_row(m, row_of(m, i), out); return; }
  unpack_panel_row(m->type, panel_of(m, (int)i), (int)(i % PANEL_ROWS), m->k, own, row_bytes(m->type, m->k));
  unpack_row(m, own, out);
}

/* rows of a matrix in one part: small enough to share evenly, large enough that taking a part costs little */
static inline int part_rows(int n, int threads) { int size = (n / (threads * 4) + 31) & ~31; return size < 32 ? 32 : size; }
static inline int num_parts(int n, int size) { return (n + size - 1) / size; }

typedef struct { const Matrix *m; const float *x; float *y; Digits *digits; float *own; long own_floats; const uint8_t *rows; int num_rows, size, terms; } Product;
enum { ROUND, MULTIPLY };
static int one_is_small(const Region *g, int phase) { (void)g; (void)phase; return 0; }
static int product_parts(const Region *g, int phase) { const Product *p = g->arg; return phase == ROUND && g->phases > 1 ? p->num_rows : num_parts(p->m->n, p->size); }
static void product_part(const Region *g, int phase, int part, int tid) {
  const Product *p = g->arg; int k = p->m->k, first = part * p->size, last = first + p->size < p->m->n ? first + p->size : p->m->n;
  if (phase == ROUND && g->phases > 1) { round_row(p->x + (long)part * k, k, p->terms, p->digits + (long)part * (k / 32)); return; }
  Input in = {p->x, k, p->digits, p->terms};
  multiply(p->m, first, last, &in, p->num_rows, (Target){p->y, p->m->n, 0, 1}, p->own + tid * p->own_floats);
}
static void unpack_part(const Region *g, int phase, int part, int tid) {
  const Product *p = g->arg; uint8_t *own = (uint8_t *)malloc(row_bytes(p->m->type, p->m->k)); (void)phase; (void)tid;
  for (int i = part * p->size; i < (part + 1) * p->size && i < p->m->n; i++) unpack_any_row(p->m, i, p->y + (long)i * p->m->k, own);
  free(own);
}
static void pack_part(const Region *g, int phase, int part, int tid) {
  const Product *p = g->arg; const Matrix *m = p->m; (void)phase; (void)tid;
  for (int i = part * p->size; i < (part + 1) * p->size && i < m->n; i += PANEL_ROWS) pack_panel(m->type, p->rows, m->stride, i, m->n, m->k, (uint8_t *)panel_of(m, i));
}
static void run_product(const Product *p, void (*run)(const Region *, int, int, int), int phases, int threads) {
  atomic_int next[2] = {0, 0}, done[2] = {0, 0};
  if (!p->m->n) return; /* a phase without parts would never end */
  Region g = {phases, product_parts, run, one_is_small, p, next, done, 0};
  run_region(&g, threads);
}

/* Floats of `work` that `linear` takes. */
EXPORT int64_t FN(linear_floats)(const Matrix *m, int rows, int threads) { return digit_floats(rows, m->k) + threads * own_product_floats(m->k); }
/* y[rows][n] = x[rows][k] W' + bias. The caller checked shapes and types; `work` begins at a multiple of 64 bytes. */
EXPORT void FN(linear)(const Matrix *m, const float *x, float *y, int rows, int terms, float *work, int threads) {
  if (!rows) return;
  float *own = work + digit_floats(rows, m->k);
  Product p = {m, x, y, (Digits *)work, own, own_product_floats(m->k), NULL, rows, part_rows(m->n, threads), terms};
  run_product(&p, product_part, is_integer(m->type) ? 2 : 1, threads);
}
EXPORT void FN(unpack)(const Matrix *m, float *out, int threads) {
  Product p = {m, NULL, out, NULL, NULL, 0, NULL, 0, part_rows(m->n, threads), 0};
  run_product(&p, unpack_part, 1, threads);
}
/* rows `ids` of the matrix, unpacked */
EXPORT void FN(gather)(const Matrix *m, const int64_t *ids, int num, float *out) {
  uint8_t *own = (uint8_t *)malloc(row_bytes(m->type, m->k));
  for (int i = 0; i < num; i++) unpack_any_row(m, ids[i], out + (long)i * m->k, own);
  free(own);
}
/* Bytes of the panels of n rows. */
EXPORT int64_t FN(panels_bytes)(int type, int n, int k) { return (n + PANEL_ROWS - 1) / PANEL_ROWS * panel_bytes(type, k); }
/* Turn the rows at `rows`, m->stride bytes apart, into the panels at m->data, which are all zeros. */
EXPORT void FN(pack)(const Matrix *m, const uint8_t *rows, int threads) {
  Product p = {m, NULL, NULL, NULL, NULL, 0, rows, 0, part_rows(m->n, threads), 0};
  run_product(&p, pack_part, 1, threads);
}
EXPORT int FN(abi)(void) { return ABI; }
/* Use the threads behind this GOMP_parallel from now on; NULL: threads of our own. A forked child always has its own. */
EXPORT void FN(share_threads)(Parallel *parallel) { watch_forks(); if (!pool.was_forked) atomic_store(&shared_threads, parallel); }
