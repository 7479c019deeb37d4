'use strict'
// Streams partitions into a copy: resumes after a lost connection, and rolls back when it is told to.

const wire = require('./wire.js')
const { Connection } = require('./connection.js')

const [OK, ROLLBACK, END_REACHED] = [0, 3, 64]
const NO_PARTIAL = { partial_history: 0n, partial_start: 0n, partial_end: 0n }

/** The position of a client that has nothing: what Stream sends, and what an application saves. */
const nothingYet = () => ({ last_complete: 0n, highest_received: 0n, ...NO_PARTIAL, log: { entries: [] } })

/**
 * Follows partitions, and tells `copy` what comes. Each call comes with the position to save with the data, which changes
 * with the next call: a copy that saves later keeps a copy of it.
 * accepted(partition, position), apply(partition, rows, position), completed(partition, position), and
 * rollBack(partition, ceiling) -> the complete snapshot end, at or below the ceiling, that the copy went back to.
 */
class Consumer {
  constructor ({ copy, positions = new Map(), endSeqs = new Map(), ...address }) {
    Object.assign(this, { copy, positions, endSeqs, address, streams: new Map(), ended: new Set(), unfinished: new Set() })
  }

  /** Streams until every partition has reached its end. Throws when that ends early: call it again. */
  async run (bucket, partitions) {
    this.streams.clear()
    this.isStopped = false
    const finished = new Promise((resolve) => { this._finish = resolve })
    const connection = await Connection.connect({ ...this.address, onStream: (message) => this.take(message) })
    this.connection = connection
    try {
      if (this.isStopped) throw new Error('the consumer was stopped')
      const { logs } = await connection.open(bucket, partitions)
      this.unfinished = new Set(logs.map((log) => log.partition).filter((partition) => !this.ended.has(partition)))
      await Promise.all([...this.unfinished].map((partition) => this._start(connection, partition)))
      if (this.unfinished.size === 0) return
      connection.go()
      const failure = await Promise.race([finished, connection.closed])
      if (failure) throw failure
    } finally {
      await connection.close()
    }
  }

  /** Has `run` end, with an error. */
  stop () { this.isStopped = true; this.connection?.close() }

  async _start (connection, partition) {
    for (;;) {
      const position = this.positions.get(partition) ?? nothingYet()
      this.positions.set(partition, position)
      const reply = await connection.stream(partition, position, this.endSeqs.get(partition))
      if (reply.status === OK) return
      if (reply.status !== ROLLBACK) throw Object.assign(new Error(`partition ${partition}: status ${reply.status}: ${reply.reason}`), { status: reply.status })
      if (position.highest_received && reply.seq >= position.highest_received) throw new wire.ProtocolError('MALFORMED', `partition ${partition}: a rollback from ${position.highest_received} to ${reply.seq}`)
      this.rolledBack(partition, this.copy.rollBack(partition, reply.seq))
    }
  }

  /** The copy went back to `end`, a complete snapshot's end or 0. */
  rolledBack (partition, end) {
    const entries = this.positions.get(partition).log.entries.filter((entry) => entry.seq <= end)
    this.positions.set(partition, { ...nothingYet(), last_complete: end, highest_received: end, log: { entries } })
  }

  /** Takes in one message of a stream; `run` calls it. */
  take (message) {
    const { message: name, partition } = message
    const position = this.positions.get(partition)
    const stream = this.streams.get(partition)
    const check = (isRight, sentence) => { if (!isRight) throw new wire.ProtocolError('MALFORMED', `partition ${partition}: ${sentence}`) }
    if (name === 'StreamReply' && message.status === OK) {
      check(message.seq === position.highest_received, `the stream goes on at ${message.seq}, not at ${position.highest_received}`)
      if (position.highest_received === position.partial_end) Object.assign(position, { last_complete: position.highest_received, ...NO_PARTIAL })
      position.log = message.log
      this.streams.set(partition, { at: message.seq, end: position.partial_end, history: 0n })
      this.copy.accepted?.(partition, position)
    } else if (name === 'PartitionStart') {
      check(message.start === stream.at && message.end >= stream.end, `a snapshot (${message.start}, ${message.end}] comes at ${stream.at}, and is to end at ${stream.end} or above`)
      Object.assign(stream, { history: message.history_id, end: message.end })
    } else if (name === 'PartitionChunk' || name === 'PartitionSnapshot') {
      const { chunk } = message
      wire.checkStored(chunk)
      if (name === 'PartitionSnapshot') {
        check(stream.history && chunk.end >= stream.end, `a snapshot of history ${stream.history} ends at ${chunk.end}, and not at ${stream.end} or above`)
        stream.end = chunk.end
      }
      check(chunk.start === stream.at && chunk.end <= stream.end, `a chunk of (${chunk.start}, ${chunk.end}] comes at ${stream.at}`)
      stream.at = position.highest_received = chunk.end
      Object.assign(position, { partial_history: stream.history, partial_start: position.last_complete, partial_end: stream.end })
      this.copy.apply(partition, chunk.rows, position)
      if (name === 'PartitionSnapshot') this._complete(partition, position)
    } else if (name === 'PartitionEnd') {
      check(message.end === stream.end && stream.at === stream.end, `a snapshot ends at ${message.end}, and its chunks at ${stream.at}`)
      this._complete(partition, position)
    } else if (name === 'StreamEnd') {
      this.streams.delete(partition)
      if (message.status === END_REACHED) {
        this.ended.add(partition)
        this.unfinished.delete(partition)
      } else this._finish(Object.assign(new Error(`the stream of partition ${partition} ended with status ${message.status}`), { status: message.status }))
      if (this.unfinished.size === 0) this._finish() // a stream may end before another is answered
    }
  }

  _complete (partition, position) {
    Object.assign(position, { last_complete: position.highest_received, ...NO_PARTIAL })
    this.copy.completed?.(partition, position)
  }
}

module.exports = { Consumer, nothingYet }
