'use strict'
// The wire of UPR, as docs/protocol.md describes it: checksums, frames, messages, chunks. No I/O.

const [MAGIC, VERSION, HEADER_BYTES, NO_PARTITION] = [0x5055, 1, 24, 0xffff]
const NEVER = 0xffffffffffffffffn // all ones: a stream or a lease without an end
const [KEY_BYTES_MAX, VALUE_BYTES_MAX, CHUNK_MUTATIONS_MAX, BODY_BYTES_MAX] = [250, 20 << 20, 1 << 20, 32 << 20]
const ERRORS = { BAD_MAGIC: 128, BAD_VERSION: 129, BAD_CHECKSUM: 130, FRAME_TOO_LONG: 131, UNKNOWN_MESSAGE: 132, OUT_OF_TURN: 133, MALFORMED: 134 }

class ProtocolError extends Error {
  constructor (code, sentence) { super(`${code}: ${sentence}`); this.code = code }
}

// --- checksums and the partition of a key -----------------------------------------------------------

function crcTable (polynomial) {
  return Uint32Array.from({ length: 256 }, (_, byte) => {
    let crc = byte
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ polynomial : crc >>> 1
    return crc >>> 0
  })
}
const ZLIB = crcTable(0xedb88320)
const CASTAGNOLI = crcTable(0x82f63b78)

function crc (table, bytes, before = 0) {
  let value = ~before
  for (let index = 0; index < bytes.length; index++) value = (value >>> 8) ^ table[(value ^ bytes[index]) & 0xff]
  return ~value >>> 0
}
const crc32c = (bytes, before) => crc(CASTAGNOLI, bytes, before)

function partitionOf (key, partitionCount) {
  return ((crc(ZLIB, key) >>> 16) & 0x7fff) % partitionCount
}

// --- layouts ----------------------------------------------------------------------------------------
// A layout is written as in the document: 'cookie bytes(u16), ends list(u16) of (partition u16, end u64)'.
// Here `flag` is "u8, 0 or 1", `fixed(n)` is n bytes, and `chunk` reaches to the end of the body.

const malformed = (sentence) => { throw new ProtocolError('MALFORMED', sentence) }

class Reader {
  constructor (bytes) { this.bytes = bytes; this.offset = 0 }
  take (count) {
    const begin = this.offset
    this.offset += count
    return this.offset <= this.bytes.length ? this.bytes.subarray(begin, this.offset) : malformed('the body ends inside a field')
  }
}

const written = (size, write) => { const bytes = Buffer.alloc(size); write(bytes); return bytes }
const uint = (size) => ({
  read: (reader) => reader.take(size).readUIntLE(0, size),
  write: (out, value) => out.push(written(size, (bytes) => bytes.writeUIntLE(value, 0, size)))
})
const u64 = {
  read: (reader) => reader.take(8).readBigUInt64LE(),
  write: (out, value) => out.push(written(8, (bytes) => bytes.writeBigUInt64LE(BigInt(value))))
}
const flag = {
  read: (reader) => reader.take(1)[0] !== 0,
  write: (out, value) => out.push(Buffer.from([value ? 1 : 0]))
}
const fixed = (size) => ({
  read: (reader) => reader.take(size),
  write: (out, value) => out.push(value ?? Buffer.alloc(size))
})
const bytesOf = (length) => ({
  read: (reader) => reader.take(Number(length.read(reader))),
  write: (out, value) => { length.write(out, value.length); out.push(value) }
})
const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })
const textOf = (length) => ({
  read: (reader) => {
    const bytes = bytesOf(length).read(reader)
    try { return utf8.decode(bytes) } catch { return malformed('a text is not UTF-8') }
  },
  write: (out, value) => bytesOf(length).write(out, Buffer.from(value))
})
const listOf = (length, item) => ({
  read: (reader) => {
    const items = []
    for (let left = Number(length.read(reader)); left > 0; left--) items.push(item.read(reader))
    return items
  },
  write: (out, value) => { length.write(out, value.length); for (const one of value) item.write(out, one) }
})
const struct = (fields) => ({
  read: (reader) => Object.fromEntries(fields.map(([name, type]) => [name, type.read(reader)])),
  write: (out, value) => { for (const [name, type] of fields) type.write(out, value[name]) }
})
const TYPES = { u8: uint(1), u16: uint(2), u32: uint(4), u64, flag }
TYPES.chunk = {
  read: (reader) => parseChunk(reader.take(reader.bytes.length - reader.offset)),
  write: (out, value) => out.push(Buffer.isBuffer(value) ? value : buildChunk(value))
}

function layout (text) {
  let rest = text
  const next = (pattern) => { const match = pattern.exec(rest); if (match) rest = rest.slice(match[0].length); return match }
  const type = () => {
    const [, word, argument] = next(/^ *(\w+)(?:\((\w+)\))?/)
    if (word === 'list') { next(/^ of /); return listOf(TYPES[argument], next(/^\(/) ? group() : type()) }
    if (word === 'fixed') return fixed(Number(argument))
    return argument ? { bytes: bytesOf, text: textOf }[word](TYPES[argument]) : TYPES[word]
  }
  const group = () => {
    const fields = []
    do fields.push([next(/^ *(\w+)/)[1], type()]); while (next(/^,/))
    next(/^\)/)
    return struct(fields)
  }
  return text ? group() : struct([])
}
TYPES.log = layout('entries list(u16) of (history_id u64, seq u64)')
TYPES.position = layout('last_complete u64, highest_received u64, partial_history u64, partial_start u64, partial_end u64, log log')

// --- messages ---------------------------------------------------------------------------------------

const MESSAGES = require('./messages.json') // name -> [opcode, layout], as in the document's sections
const KINDS = Object.fromEntries(Object.entries(MESSAGES).map(([name, [opcode, text]]) => [name, { name, opcode, body: layout(text) }]))
const BY_OPCODE = new Map(Object.values(KINDS).map((kind) => [kind.opcode, kind]))

function encode (name, fields = {}) {
  const kind = KINDS[name]
  const parts = []
  kind.body.write(parts, fields)
  const length = parts.reduce((sum, part) => sum + part.length, 0)
  const body = Buffer.concat([...parts, Buffer.alloc(-length & 7)])
  const header = Buffer.alloc(HEADER_BYTES)
  header.writeUInt16LE(MAGIC, 0)
  header.set([VERSION, kind.opcode], 2)
  header.writeUInt16LE(fields.status ?? 0, 4)
  header.writeUInt16LE(fields.partition ?? NO_PARTITION, 6)
  header.writeUInt32LE(fields.opaque ?? 0, 8)
  header.writeUInt32LE(body.length, 12)
  header.writeUInt32LE(crc32c(body), 16)
  header.writeUInt32LE(crc32c(header.subarray(0, 20)), 20)
  return Buffer.concat([header, body])
}

/** What a header says; the checks come in the document's order. */
function decodeHeader (header, bodyBytesMax = BODY_BYTES_MAX) {
  const wrong = (code, sentence) => { throw new ProtocolError(code, sentence) }
  if (header.readUInt16LE(0) !== MAGIC) wrong('BAD_MAGIC', 'this is not a frame of UPR')
  if (header.readUInt32LE(20) !== crc32c(header.subarray(0, 20))) wrong('BAD_CHECKSUM', 'the header is damaged')
  if (header[2] !== VERSION) wrong('BAD_VERSION', `the frame has version ${header[2]}`)
  const length = header.readUInt32LE(12)
  if (length % 8 !== 0) wrong('MALFORMED', 'the body is not padded to a multiple of 8')
  const kind = BY_OPCODE.get(header[3])
  if (!kind) wrong('UNKNOWN_MESSAGE', `there is no opcode ${header[3]}`)
  if (length > bodyBytesMax) wrong('FRAME_TOO_LONG', `a body of ${length} bytes`)
  return { kind, length, status: header.readUInt16LE(4), partition: header.readUInt16LE(6), opaque: header.readUInt32LE(8), bodyCrc: header.readUInt32LE(16) }
}

function decodeBody ({ kind, status, partition, opaque, bodyCrc }, body) {
  if (crc32c(body) !== bodyCrc) throw new ProtocolError('BAD_CHECKSUM', 'the body is damaged')
  const reader = new Reader(body)
  const fields = kind.body.read(reader)
  const padding = body.subarray(reader.offset)
  if (padding.length > 7 || padding.some(Boolean)) malformed('bytes are left behind the message')
  return { message: kind.name, status, partition, opaque, frameBytes: HEADER_BYTES + body.length, ...fields }
}

const decode = (frame) => decodeBody(decodeHeader(frame), frame.subarray(HEADER_BYTES))

// --- chunks -----------------------------------------------------------------------------------------

const OPERATIONS = { SET: 1, DELETE: 2, EXPIRE: 3, ADD: 4, REPLACE: 5, INCREMENT: 6, DECREMENT: 7, APPEND: 8, PREPEND: 9, TOUCH: 10 }

const padded = (length) => length + (-length & 7)
const total = (items) => items.reduce((sum, item) => sum + item.length, 0)

/** Where each column of a chunk begins, and where the last ends. */
function columnsOf (count, keyBytes, valueBytes) {
  const sizes = [8 * count, 8 * count, 4 * count, 4 * count, 4 * count + 4, 4 * count + 4, count, keyBytes, valueBytes]
  const begins = [32]
  for (const size of sizes) begins.push(begins.at(-1) + padded(size))
  return begins
}

/** A chunk of {start, end, rows}; a row is {operation, key, value, seq, cas, expiry, flags}. */
function buildChunk ({ start = 0n, end = 0n, rows }) {
  const keys = rows.map((row) => row.key)
  const values = rows.map((row) => row.value ?? Buffer.alloc(0))
  const [seqs, cas, expiries, flags, keyOffsets, valueOffsets, operations, keysAt, valuesAt, length] = columnsOf(rows.length, total(keys), total(values))
  const bytes = Buffer.alloc(length)
  ;[rows.length, total(keys), total(values)].forEach((number, index) => bytes.writeUInt32LE(number, 4 * index))
  bytes.writeBigUInt64LE(BigInt(start), 16)
  bytes.writeBigUInt64LE(BigInt(end), 24)
  let [keyEnd, valueEnd] = [0, 0]
  for (const [index, row] of rows.entries()) {
    for (const [column, number] of [[seqs, row.seq], [cas, row.cas]]) bytes.writeBigUInt64LE(BigInt(number ?? 0), column + 8 * index)
    for (const [column, number] of [[expiries, row.expiry], [flags, row.flags]]) bytes.writeUInt32LE(number ?? 0, column + 4 * index)
    bytes[operations + index] = row.operation
    bytes.set(keys[index], keysAt + keyEnd)
    bytes.set(values[index], valuesAt + valueEnd)
    bytes.writeInt32LE(keyEnd += keys[index].length, keyOffsets + 4 * index + 4)
    bytes.writeInt32LE(valueEnd += values[index].length, valueOffsets + 4 * index + 4)
  }
  return bytes
}

/** A chunk's range and rows, checked as far as all three kinds of chunk are alike. */
function parseChunk (bytes) {
  if (bytes.length < 32) malformed('the chunk ends inside its head')
  const [count, keyBytes, valueBytes, reserved] = [0, 4, 8, 12].map((offset) => bytes.readUInt32LE(offset))
  if (reserved !== 0) malformed('the reserved field of the chunk is not 0')
  if (count > CHUNK_MUTATIONS_MAX) malformed(`the chunk has ${count} mutations`)
  const [seqs, cas, expiries, flags, keyOffsets, valueOffsets, operations, keys, values, length] = columnsOf(count, keyBytes, valueBytes)
  if (length !== bytes.length) malformed(`the lengths of the chunk add up to ${length} bytes, and it has ${bytes.length}`)
  for (const [offsets, end] of [[keyOffsets, keyBytes], [valueOffsets, valueBytes]]) {
    if (bytes.readInt32LE(offsets) !== 0 || bytes.readInt32LE(offsets + 4 * count) !== end) malformed('the offsets do not cover the bytes of the chunk')
  }
  const item = (offsets, begin, index) => {
    const [from, to] = [bytes.readInt32LE(offsets + 4 * index), bytes.readInt32LE(offsets + 4 * index + 4)]
    return from <= to ? bytes.subarray(begin + from, begin + to) : malformed('the offsets of the chunk fall')
  }
  const rows = Array.from({ length: count }, (_, index) => ({
    operation: bytes[operations + index],
    key: item(keyOffsets, keys, index),
    value: item(valueOffsets, values, index),
    seq: bytes.readBigUInt64LE(seqs + 8 * index),
    cas: bytes.readBigUInt64LE(cas + 8 * index),
    expiry: bytes.readUInt32LE(expiries + 4 * index),
    flags: bytes.readUInt32LE(flags + 4 * index)
  }))
  const [start, end] = [bytes.readBigUInt64LE(16), bytes.readBigUInt64LE(24)]
  return end < start ? malformed('the chunk ends before it starts') : { start, end, rows }
}

/** Throws unless the chunk is one that a server streams. */
function checkStored ({ start, end, rows }) {
  let before = start
  for (const { operation, key, value, seq } of rows) {
    if (key.length < 1 || key.length > KEY_BYTES_MAX) malformed(`a key of ${key.length} bytes`)
    if (value.length > VALUE_BYTES_MAX) malformed(`a value of ${value.length} bytes`)
    if (operation < OPERATIONS.SET || operation > OPERATIONS.EXPIRE) malformed(`operation ${operation} is never stored`)
    if (seq <= before || seq > end) malformed('the numbers of a stored chunk do not rise within its range')
    before = seq
  }
}

/** The value of INCREMENT and DECREMENT. */
function counterDelta (delta, initial = null) {
  const bytes = Buffer.alloc(24)
  bytes.writeBigUInt64LE(BigInt(delta), 0)
  bytes.writeBigUInt64LE(BigInt(initial ?? 0), 8)
  bytes[16] = initial === null ? 0 : 1
  return bytes
}

/** The chain of a writer's runs to one partition, continued by a run with these rows. */
function chainOf (before, rows) {
  return crc32c(written(4, (bytes) => bytes.writeUInt32LE(crc32c(buildChunk({ rows })))), before) || 1
}

module.exports = {
  ERRORS, HEADER_BYTES, NEVER, NO_PARTITION, OPERATIONS, ProtocolError, buildChunk, chainOf, checkStored,
  counterDelta, crc32c, decode, decodeBody, decodeHeader, encode, parseChunk, partitionOf
}
