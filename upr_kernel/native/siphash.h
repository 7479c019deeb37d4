/* SipHash-1-3 (Aumasson and Bernstein): a keyed hash. Whoever chooses the keys but does not know the
   secret cannot make them meet. CPython hashes bytes with the same function. */

#ifndef UPR_SIPHASH_H
#define UPR_SIPHASH_H

#include "kernel.h"

#define ROTATE(word, bits) (((word) << (bits)) | ((word) >> (64 - (bits))))

#define SIP_ROUND(a, b, c, d)                                                                      \
    do {                                                                                           \
        a += b; b = ROTATE(b, 13); b ^= a; a = ROTATE(a, 32);                                      \
        c += d; d = ROTATE(d, 16); d ^= c;                                                         \
        a += d; d = ROTATE(d, 21); d ^= a;                                                         \
        c += b; b = ROTATE(b, 17); b ^= c; c = ROTATE(c, 32);                                      \
    } while (0)

static inline uint64_t
siphash13(const uint8_t *bytes, size_t length, const uint64_t secret[2])
{
    uint64_t a = secret[0] ^ 0x736f6d6570736575u, b = secret[1] ^ 0x646f72616e646f6du;
    uint64_t c = secret[0] ^ 0x6c7967656e657261u, d = secret[1] ^ 0x7465646279746573u;
    uint64_t last = (uint64_t)length << 56;
    const uint8_t *end = bytes + (length & ~(size_t)7);
    for (; bytes != end; bytes += 8) {
        uint64_t word = load_u64(bytes);
        d ^= word;
        SIP_ROUND(a, b, c, d);
        a ^= word;
    }
    for (size_t index = 0; index < (length & 7); index++)
        last |= (uint64_t)bytes[index] << (8 * index);
    d ^= last;
    SIP_ROUND(a, b, c, d);
    a ^= last;
    c ^= 0xff;
    SIP_ROUND(a, b, c, d);
    SIP_ROUND(a, b, c, d);
    SIP_ROUND(a, b, c, d);
    return a ^ b ^ c ^ d;
}

#endif
