'use strict'
// What a consumer does with a server whose numbers do not fit.

const assert = require('node:assert/strict')
const test = require('node:test')
const { Consumer, nothingYet } = require('../consumer.js')

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
