/* A llama-like model, its lanes and one step of it, as the caller describes them. */

enum { SILU = 0, GELU_TANH = 1 };

/* A pointer of NULL is a part that the layer does not have. norm_attention and norm_mlp_out are applied to what is added to x. */
typedef struct {
  const float *norm_in, *norm_attention, *norm_mlp, *norm_mlp_out, *q_norm, *k_norm;
  Matrix q, k, v, o, gate, up, down;
  int32_t group, layer_in_group, rotary, window; /* rotary -1: no rotation; window 0: none */
} Layer;
/* terms: of activations, 2 or 1, see integer_products.h; row_type: of keys and values, see rows.h */
typedef struct {
  int32_t layers, hidden, heads, kv_heads, dim, inter, groups, rotary_dim, activation, terms, row_type, unused;
  float eps, scale, score_cap, logit_cap, residual, unused2;
  const float *norm; const Layer *layer; Matrix head;
} Model;
/* The rows of one group on one lane. `rows` are those in memory before this step, of which the first is row `first` of the sequence;
   `layer` and `head` are strides in bytes. */
typedef struct { uint8_t *k, *v; int64_t layer, head, rows, first; } Rows;
/* `tokens` tokens on each of `lanes` lanes, at these positions. cosines and sines: [kinds of rotation][table_rows][rotary_dim]. Logits
   of the last `logit_rows` rows are computed. `clipped` counts the numbers that were too large for a row's type. */
typedef struct {
  const Rows *rows; const int32_t *positions; const float *cosines, *sines; float *x, *logits; atomic_llong *clipped;
  int32_t lanes, tokens, logit_rows, threads; int64_t table_rows;
} Batch;

static inline int width(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->dim; }
