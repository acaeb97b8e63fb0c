/* Stands between a process and its disk; loaded by LD_PRELOAD, told what to do through ctypes.

   Counts every call that changes something under one root, logs it, and at each of them may copy the
   root as a crash there would leave it, fail, wait, or end the process. Calls are made one at a time,
   so that a copy shows a moment that was. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OFF, COUNT, COPY, FAIL_ONCE, FULL, EXIT, HANG };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int mode = OFF;
static long at, count, copies, fired;
static int error_number;
static char root[4096], out[4096];
static int log_fd = -1;

void disk_arm(const char *a_root, const char *an_out, int a_mode, long an_at, int an_error) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", a_root);
  snprintf(out, sizeof out, "%s", an_out);
  mode = a_mode, at = an_at, error_number = an_error;
  count = copies = fired = 0;
  if (log_fd >= 0) close(log_fd);
  char name[5000];
  snprintf(name, sizeof name, "%s/log", out);
  log_fd = -1;
  int fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  log_fd = fd;
  pthread_mutex_unlock(&lock);
}

long disk_disarm(void) {
  pthread_mutex_lock(&lock);
  mode = OFF;
  pthread_cond_broadcast(&changed);
  long n = count;
  pthread_mutex_unlock(&lock);
  return n;
}

long disk_fired(void) { return fired; }

static void absolute(int dirfd, const char *path, char *result, size_t size) {
  result[0] = 0;
  if (path && path[0] == '/') {
    snprintf(result, size, "%s", path);
    return;
  }
  char directory[4096] = "";
  if (dirfd == AT_FDCWD) {
    if (!getcwd(directory, sizeof directory)) return;
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    ssize_t n = readlink(link, directory, sizeof directory - 1);
    directory[n > 0 ? n : 0] = 0;
  }
  if (path) snprintf(result, size, "%s/%s", directory, path);
  else snprintf(result, size, "%s", directory);
}

static int is_ours(const char *path) {
  size_t n = strlen(root);
  return mode != OFF && n && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static void copy_root(void) {
  char target[5000];
  snprintf(target, sizeof target, "%s/%ld", out, ++copies);
  char *argv[] = {"cp", "-a", root, target, NULL}, *environment[] = {NULL};
  pid_t child;
  if (posix_spawn(&child, "/bin/cp", NULL, NULL, argv, environment) == 0)
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
}

/* Called with the lock held, before an operation: 0 goes on, else the error to fail with. */
static int before(const char *name, const char *path, const char *other, int makes) {
  char line[9000];
  ++count;
  int n = snprintf(line, sizeof line, "%s\t%s\t%s\n", name, path, other);
  if (log_fd >= 0 && write(log_fd, line, n) < 0) {
  }
  if (mode == COPY) copy_root();
  while (mode == HANG) pthread_cond_wait(&changed, &lock);
  if (mode == OFF) return 0;
  int hit = mode == FULL ? makes && count >= at : count == at;
  if (!hit || mode == COUNT || mode == COPY) return 0;
  fired++;
  if (mode == EXIT) _exit(77);
  return error_number;
}

#define REAL(name) \
  static __typeof__(name) *real;  \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

#define GUARD(label, path, other, makes, call)                  \
  pthread_mutex_lock(&lock);                                    \
  int failure = before(label, path, other, makes);              \
  __typeof__(call) result = failure ? -1 : call;                \
  int saved = failure ? failure : errno;                        \
  pthread_mutex_unlock(&lock);                                  \
  errno = saved;                                                \
  return result;

#define OPEN(name, dirfd_value, parameters, forward, plain)      \
  int name parameters {                                          \
    REAL(name)                                                   \
    mode_t bits = 0;                                             \
    if (flags & (O_CREAT | O_TMPFILE)) {                         \
      va_list list;                                              \
      va_start(list, flags);                                     \
      bits = va_arg(list, mode_t);                               \
      va_end(list);                                              \
    }                                                            \
    if (mode == OFF || !(flags & (O_CREAT | O_TRUNC))) return forward; \
    char full[4096];                                             \
    absolute(dirfd_value, path, full, sizeof full);              \
    if (!is_ours(full)) return forward;                          \
    GUARD("open", full, "", 1, forward)                          \
  }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), real(path, flags, bits), 0)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), real(path, flags, bits), 0)
OPEN(openat, dirfd, (int dirfd, const char *path, int flags, ...), real(dirfd, path, flags, bits), 0)
OPEN(openat64, dirfd, (int dirfd, const char *path, int flags, ...), real(dirfd, path, flags, bits), 0)

#define ON_FD(name, label, makes, type, parameters, forward, halved) \
  type name parameters {                                          \
    REAL(name)                                                    \
    if (mode == OFF || fd == log_fd) return forward;              \
    char full[4096];                                              \
    absolute(fd, NULL, full, sizeof full);                        \
    if (!is_ours(full)) return forward;                           \
    halved                                                        \
    GUARD(label, full, "", makes, forward)                        \
  }

/* A write may be cut short, and a crash comes then; the caller goes on with the rest, as it must. */
static __thread int is_rest;
#define HALF                             \
  if (mode == COPY && size > 1) {        \
    if (!is_rest) size = size / 2;       \
    is_rest = !is_rest;                  \
  }

ON_FD(write, "write", 1, ssize_t, (int fd, const void *data, size_t size), real(fd, data, size), HALF)
ON_FD(pwrite, "write", 1, ssize_t, (int fd, const void *data, size_t size, off_t offset),
      real(fd, data, size, offset), HALF)
ON_FD(pwrite64, "write", 1, ssize_t, (int fd, const void *data, size_t size, off64_t offset),
      real(fd, data, size, offset), HALF)
ON_FD(writev, "write", 1, ssize_t, (int fd, const struct iovec *vector, int n), real(fd, vector, n), )
ON_FD(pwritev, "write", 1, ssize_t, (int fd, const struct iovec *vector, int n, off_t offset),
      real(fd, vector, n, offset), )
ON_FD(pwritev64, "write", 1, ssize_t, (int fd, const struct iovec *vector, int n, off64_t offset),
      real(fd, vector, n, offset), )
ON_FD(fsync, "fsync", 1, int, (int fd), real(fd), )
ON_FD(fdatasync, "fsync", 1, int, (int fd), real(fd), )
ON_FD(ftruncate, "truncate", 1, int, (int fd, off_t size), real(fd, size), )
ON_FD(ftruncate64, "truncate", 1, int, (int fd, off64_t size), real(fd, size), )

#define ON_PATH(name, label, makes, dirfd_value, parameters, forward) \
  int name parameters {                                           \
    REAL(name)                                                    \
    if (mode == OFF) return forward;                              \
    char full[4096];                                              \
    absolute(dirfd_value, path, full, sizeof full);               \
    if (!is_ours(full)) return forward;                           \
    GUARD(label, full, "", makes, forward)                        \
  }

ON_PATH(mkdir, "mkdir", 1, AT_FDCWD, (const char *path, mode_t bits), real(path, bits))
ON_PATH(mkdirat, "mkdir", 1, dirfd, (int dirfd, const char *path, mode_t bits), real(dirfd, path, bits))
ON_PATH(unlink, "unlink", 0, AT_FDCWD, (const char *path), real(path))
ON_PATH(unlinkat, "unlink", 0, dirfd, (int dirfd, const char *path, int flags), real(dirfd, path, flags))
ON_PATH(rmdir, "unlink", 0, AT_FDCWD, (const char *path), real(path))
ON_PATH(remove, "unlink", 0, AT_FDCWD, (const char *path), real(path))

#define ON_TWO(name, label, from_fd, to_fd, parameters, forward)  \
  int name parameters {                                           \
    REAL(name)                                                    \
    if (mode == OFF) return forward;                              \
    char full[4096], second[4096];                                \
    absolute(from_fd, from, full, sizeof full);                   \
    absolute(to_fd, to, second, sizeof second);                   \
    if (!is_ours(full) && !is_ours(second)) return forward;       \
    GUARD(label, full, second, 1, forward)                        \
  }

ON_TWO(rename, "rename", AT_FDCWD, AT_FDCWD, (const char *from, const char *to), real(from, to))
ON_TWO(renameat, "rename", a, b, (int a, const char *from, int b, const char *to), real(a, from, b, to))
ON_TWO(renameat2, "rename", a, b, (int a, const char *from, int b, const char *to, unsigned flags),
       real(a, from, b, to, flags))
ON_TWO(link, "link", AT_FDCWD, AT_FDCWD, (const char *from, const char *to), real(from, to))
ON_TWO(linkat, "link", a, b, (int a, const char *from, int b, const char *to, int flags),
       real(a, from, b, to, flags))
