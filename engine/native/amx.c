#include "amx.h"

#if defined(__x86_64__) && defined(__linux__) && KNOWS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES 24                  /* of cpuid */
#define PERMISSION_REQUEST 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* the part of a thread's state that tiles are */

int amx_is_there(int product) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> product & 1) || !(d >> TILES & 1)) return 0;
    return syscall(SYS_arch_prctl, PERMISSION_REQUEST, TILE_DATA) == 0;
}
#else
int amx_is_there(int product) {
    (void)product;
    return 0;
}
#endif
