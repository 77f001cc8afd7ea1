/* Threads: a region is a list of phases, whose parts any thread may take. A thread that is late delays no phase: the next one waits for
   parts, not for threads. */

/* A region is a list of phases. Each phase has parts that any thread may take; a phase begins when all parts of the one before are done. */
typedef struct Region Region;
struct Region {
  int phases;
  int (*count)(const Region *, int phase);                    /* number of parts */
  void (*run)(const Region *, int phase, int part, int tid);
  int (*is_small)(const Region *, int phase);                 /* whether the thread that ended the phase before does it alone */
  const void *arg;
  atomic_int *next, *done;                                    /* parts taken and parts done of each phase, zero at first */
  atomic_int phase;
};

#define SPINS 100 /* some microseconds: another process may have the core of the thread that is waited for */
static inline void pause_(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void end_phase(Region *g, int phase, int tid) {
  while (++phase < g->phases && g->is_small(g, phase))
    for (int part = 0, num = g->count(g, phase); part < num; part++) g->run(g, phase, part, tid);
  atomic_store_explicit(&g->phase, phase, memory_order_release);
}

static void work_on(Region *g, int tid) {
  for (int phase; (phase = atomic_load_explicit(&g->phase, memory_order_acquire)) < g->phases;) {
    int num = g->count(g, phase), part;
    while ((part = atomic_fetch_add_explicit(&g->next[phase], 1, memory_order_relaxed)) < num) {
      g->run(g, phase, part, tid);
      if (atomic_fetch_add_explicit(&g->done[phase], 1, memory_order_acq_rel) == num - 1) end_phase(g, phase, tid);
    }
    for (int spins = 0; atomic_load_explicit(&g->phase, memory_order_acquire) == phase; spins++) {
      if (spins < SPINS) pause_(); else sched_yield();
    }
  }
}

/* The threads of an OpenMP runtime that the process has already (GOMP_parallel), if the caller named it: torch's threads wait for work by
   spinning, and would take the cores from other threads. It joins all its threads at the end of a region. */
typedef void Parallel(void (*work)(void *), void *arg, unsigned threads, unsigned flags);
typedef struct { Region *region; int threads; atomic_int next; } Team;
static Parallel *_Atomic shared_threads;
static void join_team(void *arg) {
  Team *team = arg; int tid = atomic_fetch_add(&team->next, 1);
  if (tid < team->threads) work_on(team->region, tid);
}

/* Otherwise: threads of our own that help; one region at a time. A thread that comes late finds the gate closed, and nobody waits for it. */
#define MOST_THREADS 256
#define CLOSED (1 << 30)
static struct {
  pthread_mutex_t use, lock; pthread_cond_t wake;
  atomic_int gate, ticket; Region *region; int wanted, started, is_fork_safe, was_forked;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, CLOSED, 0, NULL, 0, 0, 0, 0};

static void *help(void *number) {
  int tid = (int)(intptr_t)number, seen = 0;
  for (;;) {
    for (int spins = 0; atomic_load_explicit(&pool.ticket, memory_order_acquire) == seen && spins < 2000; spins++) pause_();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.ticket) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    seen = atomic_load(&pool.ticket);
    pthread_mutex_unlock(&pool.lock);
    int gate = atomic_load(&pool.gate);
    while (!(gate & CLOSED) && !atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) {}
    if (gate & CLOSED) continue;
    if (tid < pool.wanted) work_on(pool.region, tid);
    atomic_fetch_sub(&pool.gate, 1);
  }
  return NULL;
}

/* A forked child has none of its parent's threads, but the locks that they held and the condition that they waited for. */
static void forget_threads(void) {
  pool.use = pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.started = 0; pool.was_forked = 1; atomic_store(&pool.gate, CLOSED);
  atomic_store(&shared_threads, (Parallel *)NULL);
}
static void watch_forks(void) { if (!pool.is_fork_safe) pool.is_fork_safe = !pthread_atfork(NULL, NULL, forget_threads); }

static void start_threads(int threads) {
  watch_forks();
  pthread_attr_t attributes; pthread_attr_init(&attributes); pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (pthread_t thread; pool.started < threads - 1; pool.started++)
    if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)(pool.started + 1))) break; /* fewer threads do the same work */
  pthread_attr_destroy(&attributes);
}

static void run_region(Region *g, int threads) {
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  Parallel *parallel = atomic_load(&shared_threads);
  if (parallel && threads > 1) { Team team = {g, threads, 0}; parallel(join_team, &team, (unsigned)threads, 0); return; }
  if (threads < 2 || pthread_mutex_trylock(&pool.use)) { work_on(g, 0); return; } /* another engine has the threads: go on alone */
  start_threads(threads);
  pthread_mutex_lock(&pool.lock);
  pool.region = g; pool.wanted = threads; atomic_store(&pool.gate, 0);
  atomic_fetch_add(&pool.ticket, 1);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  work_on(g, 0);
  atomic_fetch_or(&pool.gate, CLOSED);
  for (int spins = 0; atomic_load_explicit(&pool.gate, memory_order_acquire) != CLOSED; spins++) { if (spins < SPINS) pause_(); else sched_yield(); }
  pthread_mutex_unlock(&pool.use);
}
