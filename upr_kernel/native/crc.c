/* The two CRCs: that of zlib, which says where a key belongs, and CRC32C, which guards frames. */

#include "kernel.h"

enum { ZLIB = 0xEDB88320u, CASTAGNOLI = 0x82F63B78u };

/* What a byte adds to the CRC when so many bytes follow it: four bytes are taken in at a time. */
typedef uint32_t Tables[4][256];

static Tables zlib_tables, castagnoli_tables;

static void
fill(Tables tables, uint32_t polynomial)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ polynomial : crc >> 1;
        tables[0][byte] = crc;
    }
    for (int distance = 1; distance < 4; distance++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[distance - 1][byte];
            tables[distance][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
}

void
fill_crc_tables(void)
{
    fill(zlib_tables, ZLIB);
    fill(castagnoli_tables, CASTAGNOLI);
}

static uint32_t
crc_by(Tables tables, const uint8_t *bytes, size_t length)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (; length >= 4; bytes += 4, length -= 4) {
        crc ^= load_u32(bytes);
        crc = tables[3][crc & 0xFF] ^ tables[2][crc >> 8 & 0xFF] ^ tables[1][crc >> 16 & 0xFF] ^
              tables[0][crc >> 24];
    }
    for (; length; bytes++, length--)
        crc = crc >> 8 ^ tables[0][(crc ^ *bytes) & 0xFF];
    return ~crc;
}

uint32_t
crc32_of(const uint8_t *bytes, size_t length)
{
    return crc_by(zlib_tables, bytes, length);
}

#ifdef __x86_64__
/* Ten times as fast, where the processor has the instruction. */
__attribute__((target("sse4.2"))) static uint32_t
crc32c_by_instruction(const uint8_t *bytes, size_t length)
{
    uint64_t crc = 0xFFFFFFFFu;
    for (; length >= 8; bytes += 8, length -= 8)
        crc = __builtin_ia32_crc32di(crc, load_u64(bytes));
    for (; length; bytes++, length--)
        crc = __builtin_ia32_crc32qi((uint32_t)crc, *bytes);
    return ~(uint32_t)crc;
}
#endif

uint32_t
crc32c_of(const uint8_t *bytes, size_t length)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_by_instruction(bytes, length);
#endif
    return crc_by(castagnoli_tables, bytes, length);
}
