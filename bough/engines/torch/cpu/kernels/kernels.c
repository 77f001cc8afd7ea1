/* CPU kernels: products with packed weights, and the whole step of a llama-like model in one call.

   Weights stay in the bits of their GGUF file, turned into panels, or in bfloat16, float16 or float32. This file is compiled once for each
   instruction set, with -DISA=name; every exported function carries that name. One concern a file, in the order of their use:

     vectors.h             vectors of floats and integers for every instruction set
     types.h               the types of weights, unpacked number by number
     threads.h             regions of phases, whose parts any thread may take
     panels.h              weights of 4 to 8 bits as they are kept in memory
     float_products.h      products with float weights
     integer_products.h    products with panels: activations rounded to 16 (or 8) bits, exact sums
     products.h            one product for a caller; packing and unpacking
     model.h, rows.h, attention.h, step.h   the whole step

   Always true:
   - a weight is unpacked to the same float32 number as gguf-py's `dequantize` gives, and a panel to the bytes that were in the file;
   - the result of a row of activations depends on that row, its lane and the weights alone: not on other rows, chunks or threads. Hence
     every float sum has one order, written out here, and the compiler may not reorder it (no -ffast-math, contraction off). */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef ISA
#define ISA plain
#endif
#define JOIN_(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define FN(name) JOIN(bough_, ISA, name)
#define EXPORT __attribute__((visibility("default")))
#define ABI 5

#include "vectors.h"
#include "types.h"
#include "threads.h"
#include "panels.h"
#include "float_products.h"
#include "integer_products.h"
#include "products.h"
#include "model.h"
#include "rows.h"
#include "attention.h"
#include "step.h"

#ifdef ISA_PLAIN_OBJECT
/* Whether this machine can run what was compiled for an instruction set. */
EXPORT int bough_can_run(const char *isa) {
  if (!strcmp(isa, "plain")) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  int avx512 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!strcmp(isa, "v3")) return v3;
  if (!strcmp(isa, "avx512")) return avx512;
  if (!strcmp(isa, "vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
  if (!strcmp(isa, "avxvnni")) { /* gcc 12 has no name for it: bit 4 of EAX of leaf 7, subleaf 1 */
    unsigned a = 7, b, c = 0, d; __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!v3 || a < 1) return 0; /* the highest subleaf */
    a = 7; c = 1; __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return a >> 4 & 1;
  }
#elif defined(__aarch64__)
  if (!strcmp(isa, "neon")) return 1;
#endif
  return 0;
}
#endif
