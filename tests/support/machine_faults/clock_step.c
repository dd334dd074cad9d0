/* Steps the wall clock of one process: LD_PRELOAD this, and write seconds into CLOCK_STEP_FILE.
 *
 * The file holds one 64-bit number, added to every wall-clock time that is read through the C
 * library. Monotonic clocks stay as they are, as they do when a real clock is set; waits until a
 * wall-clock moment are put back onto the kernel's clock.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>

static volatile int64_t *step;

__attribute__((constructor)) static void open_step(void) {
    const char *path = getenv("CLOCK_STEP_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) step = mapped;
        close(file);
    }
}

/* Not through our own `syscall` below. */
static long raw(long number, long a, long b, long c, long d, long e, long f) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a, b, c, d, e, f);
}

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = (int)raw(SYS_clock_gettime, clock, (long)time, 0, 0, 0, 0);
    if (!failed && step && is_wall(clock)) time->tv_sec += *step;
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

long syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec until;
    if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
    if (number == SYS_futex && step && a[3] && (a[1] & FUTEX_CLOCK_REALTIME)) {
        until = *(struct timespec *)a[3];
        until.tv_sec -= *step;
        a[3] = (long)&until;
    }
    return raw(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
