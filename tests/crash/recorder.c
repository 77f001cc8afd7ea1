/* Records what a process changes below one folder: loaded with LD_PRELOAD before the C library.

   Environment, read at a process's first call: RECORD_FOLDER, RECORD_LOG, and RECORD_KILL_AFTER, the number of records after
   which the process kills itself. Writes to descriptor 1 are recorded as marks. A record is made right after its call, under
   one lock, so that the order of records is the order of calls. recorder.py reads the log. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FILES 4096
#define REAL(name) ((__typeof__(&name))real(#name))

struct record {
    uint32_t kind;
    int32_t descriptor;
    uint32_t flags;
    uint32_t first_bytes;
    uint32_t second_bytes;
    int64_t offset;
} __attribute__((packed));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner; /* the settings below are this process's */
static const char *folder;
static int log_descriptor = -1;
static long num_records, kill_after;
static char *paths[MAX_FILES]; /* of open files below the folder */

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

static void write_log(const void *data, size_t size) {
    while (size > 0) {
        ssize_t done = REAL(write)(log_descriptor, data, size);
        if (done <= 0) abort();
        data = (const char *)data + done, size -= done;
    }
}

static void put(char kind, int descriptor, uint32_t flags, int64_t offset, const void *first, size_t first_bytes,
                const void *second, size_t second_bytes) {
    struct record record = {kind, descriptor, flags, first_bytes, second_bytes, offset};
    write_log(&record, sizeof record);
    write_log(first, first_bytes);
    write_log(second, second_bytes);
    if (kill_after && ++num_records >= kill_after) kill(getpid(), SIGKILL);
}

/* Whether this process is recorded; the first call begins its log. */
static int is_recording(void) {
    if (owner != getpid()) {
        owner = getpid();
        folder = getenv("RECORD_FOLDER");
        num_records = 0;
        if (!folder) return 0;
        const char *limit = getenv("RECORD_KILL_AFTER");
        kill_after = limit ? atol(limit) : 0;
        log_descriptor = REAL(open)(getenv("RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_descriptor < 0) abort();
    }
    return folder != NULL;
}

/* The whole path, if it lies below the folder and is not SQLite's shared memory, which does not outlive a crash. */
static const char *find(int descriptor, const char *path, char *buffer) {
    if (!path || !is_recording()) return NULL;
    if (path[0] != '/') {
        if (descriptor < 0 || descriptor >= MAX_FILES || !paths[descriptor]) return NULL;
        snprintf(buffer, PATH_MAX, "%s/%s", paths[descriptor], path);
        path = buffer;
    }
    size_t size = strlen(folder), length = strlen(path);
    if (strncmp(path, folder, size) || (path[size] && path[size] != '/')) return NULL;
    return length > 4 && !strcmp(path + length - 4, "-shm") ? NULL : path;
}

static int is_known(int descriptor) {
    return is_recording() && descriptor >= 0 && descriptor < MAX_FILES && paths[descriptor];
}

#define LOCKED(type, call, when, record) \
    pthread_mutex_lock(&lock);           \
    type result = call;                  \
    if (when) record;                    \
    pthread_mutex_unlock(&lock);         \
    return result;

static void opened(int descriptor, const char *path, int flags) {
    if (descriptor >= MAX_FILES) abort();
    free(paths[descriptor]);
    paths[descriptor] = strdup(path);
    put('O', descriptor, flags, 0, path, strlen(path), NULL, 0);
}

static int open_at(const char *name, int at, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *known;
    LOCKED(int, ((int (*)(int, const char *, int, ...))real(name))(at, path, flags, mode),
           result >= 0 && (known = find(at, path, buffer)), opened(result, known, flags))
}

#define MODE                 \
    mode_t mode = 0;         \
    if (flags & O_CREAT) {   \
        va_list list;        \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list);        \
    }

int open(const char *path, int flags, ...) { MODE return open_at("openat", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_at("openat64", AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE return open_at("openat", at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE return open_at("openat64", at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_at("openat", AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int descriptor) {
    pthread_mutex_lock(&lock);
    if (is_known(descriptor)) {
        free(paths[descriptor]);
        paths[descriptor] = NULL;
    }
    int result = REAL(close)(descriptor);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Record the parts of a vector as one write at an offset; as a mark if the file is descriptor 1. */
static void wrote(int descriptor, const struct iovec *parts, int num_parts, ssize_t size, int64_t offset) {
    char *data = malloc(size);
    size_t done = 0;
    for (int i = 0; i < num_parts && done < (size_t)size; i++) {
        size_t part = parts[i].iov_len < size - done ? parts[i].iov_len : size - done;
        memcpy(data + done, parts[i].iov_base, part);
        done += part;
    }
    put(descriptor == 1 ? 'M' : 'W', descriptor, 0, offset, data, size, NULL, 0);
    free(data);
}

static int64_t position(int descriptor) { return descriptor == 1 ? 0 : lseek(descriptor, 0, SEEK_CUR); }

#define IS_WRITTEN (result > 0 && is_recording() && (descriptor == 1 || is_known(descriptor)))

ssize_t write(int descriptor, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    LOCKED(ssize_t, REAL(write)(descriptor, data, size), IS_WRITTEN,
           wrote(descriptor, &part, 1, result, position(descriptor) - result))
}

ssize_t writev(int descriptor, const struct iovec *parts, int num_parts) {
    LOCKED(ssize_t, REAL(writev)(descriptor, parts, num_parts), IS_WRITTEN,
           wrote(descriptor, parts, num_parts, result, position(descriptor) - result))
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    LOCKED(ssize_t, REAL(pwrite)(descriptor, data, size, offset), IS_WRITTEN, wrote(descriptor, &part, 1, result, offset))
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    struct iovec part = {(void *)data, size};
    LOCKED(ssize_t, REAL(pwrite64)(descriptor, data, size, offset), IS_WRITTEN, wrote(descriptor, &part, 1, result, offset))
}

ssize_t pwritev(int descriptor, const struct iovec *parts, int num_parts, off_t offset) {
    LOCKED(ssize_t, REAL(pwritev)(descriptor, parts, num_parts, offset), IS_WRITTEN,
           wrote(descriptor, parts, num_parts, result, offset))
}

ssize_t pwritev64(int descriptor, const struct iovec *parts, int num_parts, off64_t offset) {
    LOCKED(ssize_t, REAL(pwritev64)(descriptor, parts, num_parts, offset), IS_WRITTEN,
           wrote(descriptor, parts, num_parts, result, offset))
}

#define ON_FILE(name, kind, number, parameters, arguments)                                      \
    int name parameters {                                                                       \
        LOCKED(int, REAL(name) arguments, result == 0 && is_known(descriptor),                  \
               put(kind, descriptor, 0, number, NULL, 0, NULL, 0))                              \
    }

ON_FILE(ftruncate, 'T', size, (int descriptor, off_t size), (descriptor, size))
ON_FILE(ftruncate64, 'T', size, (int descriptor, off64_t size), (descriptor, size))
ON_FILE(fsync, 'S', 0, (int descriptor), (descriptor))
ON_FILE(fdatasync, 'S', 0, (int descriptor), (descriptor))

static int rename_at(int from, const char *old, int to, const char *new) {
    char old_buffer[PATH_MAX], new_buffer[PATH_MAX];
    const char *known_old, *known_new;
    LOCKED(int, REAL(renameat)(from, old, to, new),
           result == 0 && (known_old = find(from, old, old_buffer)) && (known_new = find(to, new, new_buffer)),
           put('R', -1, 0, 0, known_old, strlen(known_old), known_new, strlen(known_new)))
}

int rename(const char *old, const char *new) { return rename_at(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return rename_at(from, old, to, new); }

#define ON_PATH(name, kind, at, parameters, arguments)                               \
    int name parameters {                                                            \
        char buffer[PATH_MAX];                                                       \
        const char *known;                                                           \
        LOCKED(int, REAL(name) arguments, result == 0 && (known = find(at, path, buffer)), \
               put(kind, -1, 0, 0, known, strlen(known), NULL, 0))                   \
    }

ON_PATH(unlink, 'U', AT_FDCWD, (const char *path), (path))
ON_PATH(rmdir, 'U', AT_FDCWD, (const char *path), (path))
ON_PATH(unlinkat, 'U', at, (int at, const char *path, int flags), (at, path, flags))
ON_PATH(mkdir, 'D', AT_FDCWD, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, 'D', at, (int at, const char *path, mode_t mode), (at, path, mode))
