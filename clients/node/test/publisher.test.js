'use strict'
// What a publisher does with refusals, with numbers that do not fit, and when it is flushed twice at a time.

const assert = require('node:assert/strict')
const test = require('node:test')
const wire = require('../wire.js')
const { Publisher } = require('../publisher.js')
const { withAnswers } = require('./fake_server.js')

const BAD_ARGUMENT = 7
const TEMPORARY_FAILURE = 9

/** The answer to a bundle, with this status for each of its runs. The numbers of a run are its counter. */
const answered = ({ opaque, runs }, status = 0) => [wire.encode('MutateReply', {
  opaque,
  map_revision: 0n,
  runs: runs.map(({ partition, counter }) => ({ partition, status, history_id: 1n, first_seq: counter, last_seq: counter, first_cas: counter })),
  failures: [],
  counters: []
})]
const refused = (status) => ({ opaque }) => [wire.encode('Refusal', { opaque, status, map_revision: 0n, sentence: 'no' })]
const publisherAt = (port) => new Publisher({ host: '127.0.0.1', port, bucket: 'b', partitionCount: 2, closeMs: 50 })
const within = { timeout: 5000 }
const [FIRST, SECOND] = [0, 1].map((partition) => 'abcdefgh'.split('').find((key) => wire.partitionOf(Buffer.from(key), 2) === partition))

test('flushes that overlap send each run once', within, () => withAnswers({ Mutate: (message) => answered(message) }, async (port, messages) => {
  const publisher = publisherAt(port)
  const results = [1, 2, 3].map((value) => {
    const result = publisher.set(FIRST, String(value))
    publisher.flush()
    return result
  })
  await publisher.flush()
  const later = publisher.set(FIRST, '4')
  await Promise.all([publisher.flush(), publisher.flush()])
  const seqs = (await Promise.all([...results, later])).map(({ seq }) => seq)
  const counters = messages.filter(({ message }) => message === 'Mutate').flatMap(({ runs }) => runs.map(({ counter }) => counter))
  assert.deepEqual(counters, counters.map((_, index) => BigInt(index + 1)))
  assert.equal(seqs.at(-1), counters.at(-1))
  assert.equal(messages.filter(({ message }) => message === 'Open').length, 1)
  await publisher.close()
}))

test('a bundle that is refused as a whole fails its operations, and no later ones', within, () => {
  const replies = [refused(BAD_ARGUMENT)]
  return withAnswers({ Mutate: (message) => (replies.shift() ?? answered)(message) }, async (port) => {
    const publisher = publisherAt(port)
    const results = [publisher.set(FIRST, '1'), publisher.set(SECOND, '2')]
    await publisher.flush()
    for (const result of results) await assert.rejects(result, { status: BAD_ARGUMENT })
    const later = publisher.set(FIRST, '3')
    await publisher.flush()
    assert.equal((await later).seq, 2n)
    await publisher.close()
  })
})

test('a bucket that is missing at first is opened by the next flush', within, () => {
  const replies = [refused(5)]
  const opened = ({ opaque }) => [wire.encode('Opened', { opaque, partition_count: 2, map_revision: 0n }), wire.encode('Credit', { bytes: 1n << 16n })]
  return withAnswers({ Open: (message) => (replies.shift() ?? opened)(message), Mutate: (message) => answered(message) }, async (port) => {
    const publisher = publisherAt(port)
    const result = publisher.set(FIRST, '1')
    await assert.rejects(publisher.flush(), { status: 5 })
    await publisher.flush()
    assert.equal((await result).seq, 1n)
    await publisher.close()
  })
})

test('a run that is refused again and again ends the flush, and goes on with the next', within, () => {
  let refusals = 4
  return withAnswers({ Mutate: (message) => answered(message, refusals-- > 0 ? TEMPORARY_FAILURE : 0) }, async (port) => {
    const publisher = publisherAt(port)
    const result = publisher.set(FIRST, '1')
    await assert.rejects(publisher.flush(1), { status: TEMPORARY_FAILURE })
    await publisher.flush()
    assert.equal((await result).seq, 1n)
    await publisher.close()
  })
})

test('a number that does not fit is refused at once, and takes no other operation with it', within, () => withAnswers({ Mutate: (message) => answered(message) }, async (port) => {
  const publisher = publisherAt(port)
  const result = publisher.set(FIRST, '1')
  for (const wrong of [{ flags: -1 }, { expiry: 2 ** 32 }, { cas: -1n }, { cas: 1n << 64n }]) assert.throws(() => publisher.set(FIRST, '2', wrong), RangeError)
  await publisher.flush()
  assert.equal((await result).seq, 1n)
  await publisher.close()
}))
