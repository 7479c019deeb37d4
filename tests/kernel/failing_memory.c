/* For LD_PRELOAD: memory that the kernel asks for can be made to fail. glibc alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

static long left = -1;

/* The next `count` requests of the kernel succeed, and the others fail; below 0, none fails. */
void
fail_after(long count)
{
    left = count;
}

static int
fails(const void *caller)
{
    Dl_info info;
    if (left < 0 || !dladdr(caller, &info) || strstr(info.dli_fname, "/upr_kernel/") == NULL)
        return 0;
    return left == 0 || left-- == 0;
}

void *
malloc(size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *
calloc(size_t count, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *
realloc(void *memory, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}
