'use strict'
// The vectors of docs/vectors, which the project's own code has made.

const assert = require('node:assert/strict')
const fs = require('node:fs')
const path = require('node:path')
const test = require('node:test')
const wire = require('../wire.js')
const { Consumer, nothingYet } = require('../consumer.js')
const { MemoryCopy } = require('../copy.js')

const vectors = (name) => JSON.parse(fs.readFileSync(path.join(__dirname, '../../../docs/vectors', `${name}.json`), 'utf8'))
const bytes = (hex) => Buffer.from(hex, 'hex')

/** Fields as the vectors have them: bytes as hexadecimal text, 64 bits as decimal text. */
function plain (value) {
  if (typeof value === 'bigint') return String(value)
  if (Buffer.isBuffer(value)) return value.toString('hex')
  if (Array.isArray(value)) return value.map(plain)
  if (value === null || typeof value !== 'object') return value
  const named = Object.entries(value).filter(([name]) => name !== 'padding')
  return named.length === 1 && named[0][0] === 'entries' ? plain(value.entries) : Object.fromEntries(named.map(([name, item]) => [name, plain(item)]))
}

test('keys are in their partitions', () => {
  for (const { key, partitions } of vectors('hashing')) {
    for (const [count, partition] of Object.entries(partitions)) assert.equal(wire.partitionOf(bytes(key), Number(count)), partition)
  }
})

test('checksums and chains', () => {
  const { crc32c, chain } = vectors('checksums')
  for (const vector of crc32c) assert.equal(wire.crc32c(bytes(vector.bytes)), vector.crc32c)
  let before = 0
  for (const run of chain) {
    if (run.begins_anew_with) { before = run.begins_anew_with; continue }
    assert.equal(wire.crc32c(bytes(run.chunk)), run.crc32c)
    before = wire.chainOf(before, wire.parseChunk(bytes(run.chunk)).rows)
    assert.equal(before, run.chain)
  }
  assert(chain.some((run) => run.chain === 1))
})

test('every message is read and written', () => {
  for (const { message, frame, fields, partition, opaque, status } of vectors('messages')) {
    const decoded = wire.decode(bytes(frame))
    const { message: name, frameBytes, ...rest } = decoded
    assert.equal(name, message)
    assert.equal(frameBytes, frame.length / 2)
    assert.deepEqual(plain(rest), { partition, opaque, status, ...fields }, message)
    assert.equal(wire.encode(name, decoded).toString('hex'), frame, message)
  }
})

test('good chunks are read and written, and bad ones refused', () => {
  const { good, bad } = vectors('chunks')
  const check = { stored: wire.checkStored, published: ({ start, end, rows }) => { if (start || end || rows.some(({ seq, operation }) => seq || operation === wire.OPERATIONS.EXPIRE)) throw new wire.ProtocolError('MALFORMED', 'not a published chunk') } }
  for (const { kind, chunk, ...rows } of good) {
    const parsed = wire.parseChunk(bytes(chunk))
    check[kind](parsed)
    assert.deepEqual(plain(parsed), rows)
    assert.equal(wire.buildChunk(parsed).toString('hex'), chunk)
  }
  for (const { kind, chunk, wrong } of bad) {
    assert.throws(() => check[kind](wire.parseChunk(bytes(chunk))), wire.ProtocolError, wrong)
  }
})

test('the runs of a bundle are chunks of their own', () => {
  for (const { frame, runs } of vectors('bundles')) {
    const bundle = wire.decode(bytes(frame))
    let first = 0
    for (const [index, run] of bundle.runs.entries()) {
      const rows = bundle.chunk.rows.slice(first, first += run.row_count)
      const { chunk, ...fields } = runs[index]
      assert.deepEqual(plain(run), fields)
      assert.equal(wire.buildChunk({ rows }).toString('hex'), chunk)
    }
  }
})

test('frames that are wrong in themselves get their code', () => {
  const here = new Set(['BAD_MAGIC', 'BAD_CHECKSUM', 'BAD_VERSION', 'UNKNOWN_MESSAGE', 'MALFORMED', 'FRAME_TOO_LONG'])
  const codes = Object.fromEntries(Object.entries(vectors('numbers').statuses).map(([name, code]) => [code, name]))
  for (const { topic, wrong, frames, status } of vectors('wrong_input')) {
    if (!topic.startsWith('a frame') || !frames || !here.has(codes[status])) continue
    const decode = () => wire.decodeBody(wire.decodeHeader(bytes(frames), 4096), bytes(frames).subarray(wire.HEADER_BYTES))
    assert.throws(decode, { code: codes[status] }, wrong)
  }
})

test('the numbers of the client are those of the protocol', () => {
  const { opcodes, statuses, limits } = vectors('numbers')
  assert.deepEqual(Object.fromEntries(Object.entries(require('../messages.json')).map(([name, [opcode]]) => [name, opcode])), opcodes)
  for (const [name, code] of Object.entries(wire.ERRORS)) assert.equal(code, statuses[name])
  assert.equal(limits.KEY_BYTES_MAX, 250)
})

test('each message makes its position', () => {
  const consumer = new Consumer({ copy: new MemoryCopy() })
  consumer.positions.set(5, nothingYet())
  for (const { frame, position, lost, rolled_back_to: rolledBackTo } of vectors('positions')) {
    if (lost) { consumer.streams.clear(); continue }
    const message = wire.decode(bytes(frame))
    if (rolledBackTo) consumer.rolledBack(5, BigInt(rolledBackTo))
    else consumer.take(message)
    assert.deepEqual(plain(consumer.positions.get(5)), position, message.message)
  }
})

test('what takes from the window', () => {
  const { FROM_THE_WINDOW } = require('../connection.js')
  let left = 0
  for (const step of vectors('window')) {
    if (step.message === 'Hello') left = step.window_bytes
    else if (step.message === 'Ack') left += step.bytes
    else if (FROM_THE_WINDOW.has(step.message)) left -= step.frame_bytes
    assert.equal(left, step.left)
  }
})

test('a map of two nodes', () => {
  const { document, keys } = vectors('partition_map')
  const map = JSON.parse(document)
  for (const { key, partition, active, replicas } of keys) {
    assert.equal(wire.partitionOf(bytes(key), map.partitions.length), partition)
    const assignment = map.partitions[partition]
    assert.equal(map.nodes[assignment.active], active)
    assert.deepEqual(Object.keys(assignment.replicas).map((name) => map.nodes[name]), replicas)
  }
  assert.equal(BigInt(map.partitions[1].floor.history_id), 0x1122334455667788n)
})

test('recorded conversations are read and written', () => {
  for (const { title, frames } of vectors('conversations')) {
    for (const { message, frame } of frames) {
      const decoded = wire.decode(bytes(frame))
      assert.equal(decoded.message, message, title)
      assert.equal(wire.encode(message, decoded).toString('hex'), frame, title)
    }
  }
})
