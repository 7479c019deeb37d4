'use strict'
// Publishes to one node: each operation is made once, though its run may be sent again and again.

const crypto = require('node:crypto')
const wire = require('./wire.js')
const { Connection, Refused } = require('./connection.js')

const AGAIN = new Set([1, 2, 9, 19]) // NOT_MY_PARTITION, WRONG_STATE, TEMPORARY_FAILURE, NOT_DURABLE_YET
const [ROWS, RUNS, BUNDLE_BYTES] = [32, 128, 1 << 20] // rows a run and runs a bundle: 4,096 mutations; a bundle ends behind so many bytes
const bytesOf = (operations) => operations.reduce((sum, { row }) => sum + row.key.length + row.value.length + 48, 0)
const NOTHING = Buffer.alloc(0)
const pause = () => new Promise((resolve) => setTimeout(resolve, 50))
const failed = (status) => Object.assign(new Error(`status ${status}`), { status })

class Publisher {
  constructor ({ bucket, partitionCount, durability = 0, copies = 0, writer = crypto.randomBytes(16), ...address }) {
    Object.assign(this, { bucket, partitionCount, durability, copies, writer, address, connection: null, lastFlush: Promise.resolve() })
    this.partitions = new Map() // partition -> {queue, run, counter, chain}; a run is on its way until it is answered
  }

  set (key, value, fields) { return this.apply({ operation: wire.OPERATIONS.SET, key, value, ...fields }) }
  delete (key, fields) { return this.apply({ operation: wire.OPERATIONS.DELETE, key, ...fields }) }
  increment (key, delta, initial = null) { return this.apply({ operation: wire.OPERATIONS.INCREMENT, key, value: wire.counterDelta(delta, initial) }) }

  /** Queues one operation for `flush`; resolves with {seq, cas, counter}, or rejects with its status. Throws if a number does not fit. */
  apply (operation) {
    const row = { ...operation, key: Buffer.from(operation.key), value: Buffer.from(operation.value ?? '') }
    wire.buildChunk({ rows: [{ ...row, key: NOTHING, value: NOTHING }] }) // in a run it would take other operations with it
    const partition = wire.partitionOf(row.key, this.partitionCount)
    if (!this.partitions.has(partition)) this.partitions.set(partition, { partition, queue: [], run: null, counter: 0n, chain: 0 })
    const done = new Promise((resolve, reject) => this.partitions.get(partition).queue.push({ row, resolve, reject }))
    done.catch(() => {})
    return done
  }

  /**
   * Sends what is queued until all of it is answered, over as many connections as that takes. Throws once so many attempts
   * in succession were in vain, or the bucket cannot be opened: then nothing is lost, and the next call goes on.
   */
  flush (attemptsMax = 400) {
    const flushed = this.lastFlush.then(() => this._flush(attemptsMax)) // two at a time would send the same runs
    this.lastFlush = flushed.catch(() => {})
    return flushed
  }

  async _flush (attemptsMax) {
    for (let attempts = 0; this._next().length; attempts++) {
      try {
        if (!this.connection || this.connection.failure) this.connection = await this._connect()
        const status = await this._send(this._next())
        if (!status) attempts = 0
        else if (attempts >= attemptsMax) throw failed(status)
        else await pause()
      } catch (error) {
        if (attempts >= attemptsMax || error instanceof Refused) throw error
        await pause()
      }
    }
  }

  async close () { await this.connection?.close() }

  async _connect () {
    const connection = await Connection.connect(this.address)
    try { await connection.open(this.bucket, [0]) } catch (error) { await connection.close(); throw error }
    return connection
  }

  /** The partitions whose run to send next: one that has no answer goes first, so that none overtakes it. */
  _next () {
    let bundleBytes = 0
    return [...this.partitions.values()].sort((a, b) => a.partition - b.partition).filter((state) => {
      if (bundleBytes > BUNDLE_BYTES) return false
      if (!state.run && state.queue.length) {
        const operations = []
        do operations.push(state.queue.shift()); while (state.queue.length && operations.length < ROWS && bytesOf(operations) < BUNDLE_BYTES)
        state.chain = wire.chainOf(state.chain, operations.map(({ row }) => row))
        state.run = { operations, counter: ++state.counter, chain: state.chain }
      }
      bundleBytes += bytesOf(state.run?.operations ?? [])
      return state.run
    }).slice(0, RUNS)
  }

  /** One bundle; resolves with 0 if any of its runs is done, and otherwise with why one is to be sent again. */
  async _send (states) {
    const operations = states.flatMap(({ run }) => run.operations)
    const runs = states.map(({ partition, run }) => ({ partition, row_count: run.operations.length, counter: run.counter, chain: run.chain }))
    const request = { writer: this.writer, durability: this.durability, copies: this.copies, runs, chunk: { rows: operations.map(({ row }) => row) } }
    const reply = await this.connection.mutate(request).catch((error) => {
      if (!(error instanceof Refused)) throw error
      return { runs: states.map(() => ({ status: error.status })), failures: [], counters: [] } // no run had an effect
    })
    const failures = new Map(reply.failures.map(({ index, status }) => [index, status]))
    const counters = new Map(reply.counters.map(({ index, value }) => [index, value]))
    let index = 0
    for (const [place, result] of reply.runs.entries()) {
      const state = states[place]
      const first = index
      index += state.run.operations.length
      if (AGAIN.has(result.status)) continue
      let succeeded = 0n
      state.run.operations.forEach(({ resolve, reject }, row) => {
        const status = result.status || failures.get(first + row)
        if (status) return reject(failed(status))
        resolve({ seq: result.first_seq + succeeded, cas: result.first_cas + succeeded, counter: counters.get(first + row) })
        succeeded += 1n
      })
      state.run = null
    }
    return states.some(({ run }) => !run) ? 0 : reply.runs[0].status
  }
}

module.exports = { Publisher }
