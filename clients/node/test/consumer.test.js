'use strict'
// What a consumer does with a server whose numbers do not fit, and when it is stopped.

const assert = require('node:assert/strict')
const test = require('node:test')
const wire = require('../wire.js')
const { Consumer, nothingYet } = require('../consumer.js')
const { withAnswers } = require('./fake_server.js')

const position = () => ({ ...nothingYet(), last_complete: 5n, highest_received: 5n })

test('a stream that does not go on where the copy stands is refused', () => {
  for (const seq of [0n, 4n, 6n]) {
    const consumer = new Consumer({ copy: {}, positions: new Map([[0, position()]]) })
    const reply = { message: 'StreamReply', partition: 0, status: 0, seq, log: { entries: [] } }
    assert.throws(() => consumer.take(reply), { code: 'MALFORMED' })
    assert.deepEqual(consumer.positions.get(0), position())
  }
})

test('a rollback to what the copy has not reached is refused', async () => {
  for (const seq of [5n, 9n]) {
    const copy = { rollBack: () => assert.fail('there is nothing to undo') }
    const consumer = new Consumer({ copy, positions: new Map([[0, position()]]) })
    const connection = { stream: async () => ({ status: 3, seq, reason: '' }) }
    await assert.rejects(consumer._start(connection, 0), { code: 'MALFORMED' })
  }
})

const refusing = { Stream: ({ opaque, partition }) => [wire.encode('StreamReply', { opaque, partition, status: 0, seq: 7n, reason: '', map_revision: 0n, log: { entries: [] } })] }

test('a run ends with what its copy, or the consumer, throws at the answer for a stream', { timeout: 5000 }, () => withAnswers(refusing, async (port) => {
  const run = (fields) => new Consumer({ host: '127.0.0.1', port, closeMs: 50, ...fields }).run('b', [0])
  await assert.rejects(run({ copy: {} }), { code: 'MALFORMED' })
  const copy = { accepted () { throw new Error('the disk is full') } }
  await assert.rejects(run({ copy, positions: new Map([[0, { ...nothingYet(), last_complete: 7n, highest_received: 7n }]]) }), /the disk is full/)
}))

test('a run that is stopped while it connects ends', { timeout: 5000 }, () => withAnswers({}, async (port) => {
  const consumer = new Consumer({ copy: {}, host: '127.0.0.1', port, closeMs: 50 })
  const running = consumer.run('b', [0])
  consumer.stop()
  await assert.rejects(running, /the consumer was stopped/)
}))

const chunk = (start, end) => ({ chunk: { start, end, rows: [] } })
const messages = {
  'a snapshot that was cut, and ends before it was to end': [{ message: 'PartitionStart', start: 5n, end: 7n, history_id: 1n }],
  'a second start whose snapshot ends before the first': [
    { message: 'PartitionStart', start: 5n, end: 9n, history_id: 1n }, { message: 'PartitionStart', start: 5n, end: 8n, history_id: 1n }
  ],
  'a whole snapshot of no history': [{ message: 'PartitionSnapshot', ...chunk(5n, 9n) }],
  'a whole snapshot that ends before it was to end': [
    { message: 'PartitionStart', start: 5n, end: 8n, history_id: 1n }, { message: 'PartitionSnapshot', ...chunk(5n, 7n) }
  ]
}

for (const [name, sent] of Object.entries(messages)) {
  test(`${name} is refused`, () => {
    const partial = { last_complete: 4n, highest_received: 5n, partial_history: 1n, partial_start: 4n, partial_end: 8n }
    const consumer = new Consumer({ copy: { apply () {} }, positions: new Map([[0, { ...nothingYet(), ...partial }]]) })
    consumer.take({ message: 'StreamReply', partition: 0, status: 0, seq: 5n, log: { entries: [] } })
    for (const message of sent.slice(0, -1)) consumer.take({ partition: 0, ...message })
    assert.throws(() => consumer.take({ partition: 0, ...sent.at(-1) }), { code: 'MALFORMED' })
    assert.equal(consumer.positions.get(0).last_complete, 4n)
  })
}
