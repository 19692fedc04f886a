/* A wall clock that jumps an hour to and fro, every second. In LD_PRELOAD it is the process's own; the clocks by which
   times are measured stay as they are. */

#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t jump(void)
{
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return (now.tv_sec % 3 - 1) * 3600;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now) != 0;
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += jump();
    return failed ? -1 : 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int failed = syscall(SYS_gettimeofday, now, zone) != 0;
    if (!failed)
        now->tv_sec += jump();
    return failed ? -1 : 0;
}

time_t time(time_t *now)
{
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    if (now)
        *now = real.tv_sec;
    return real.tv_sec;
}
