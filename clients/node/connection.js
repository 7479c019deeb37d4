'use strict'
// One session over one TCP connection: the handshake, opaques, credit, the window, keep-alive.

const net = require('node:net')
const { MECHANISM, scram } = require('./scram.js')
const wire = require('./wire.js')

const STREAM_FRAMES = new Set(['PartitionStart', 'PartitionChunk', 'PartitionSnapshot', 'PartitionAnswers', 'PartitionEnd', 'StreamEnd'])
const WITHOUT_OPAQUE = new Set(['HelloReply', 'LogInChallenge', 'LoggedIn'])
const FROM_THE_WINDOW = new Set(['PartitionChunk', 'PartitionSnapshot'])
const PARTITIONS_MAX = 1024
const [CONNECT_MS, CLOSE_MS] = [10_000, 2000] // how long a peer may delay the log-in, and the end

/** The server refused one request; the connection goes on. */
class Refused extends Error {
  constructor ({ status, sentence }) { super(`status ${status}: ${sentence}`); this.status = status }
}

class Connection {
  /** Connects, says Hello, and logs in if the server wants it. `onStream` is called with each StreamReply and frame of a stream, in order. */
  static async connect ({ host, port, windowBytes = 16 << 20, idleIntervalS = 20, identity = 'node:client', user = '', password = '', onStream = () => {}, connectMs = CONNECT_MS, closeMs = CLOSE_MS }) {
    const connection = new Connection(net.connect({ host, port, noDelay: true }), windowBytes, onStream, closeMs)
    const tooLate = setTimeout(() => connection._fail(new Error('the server did not answer in time')), connectMs)
    try {
      const answer = connection._waitFor('HelloReply')
      connection._send('Hello', { versions: [1], features: 0, window_bytes: windowBytes, idle_interval_s: idleIntervalS, identity })
      const { idle_interval_s: agreedS, mechanisms } = await answer
      if (mechanisms.length || user) await connection._logIn(mechanisms, user, password)
      connection._keepAlive(agreedS * 1000)
      return connection
    } finally { clearTimeout(tooLate) }
  }

  constructor (socket, windowBytes, onStream, closeMs) {
    Object.assign(this, { socket, windowBytes, onStream, closeMs, failure: null, credit: 0, unacknowledged: 0, lastOpaque: 0 })
    this.arrived = [] // pieces of the next frame
    this.arrivedBytes = 0
    this.header = null
    this.waiting = new Map() // opaque, or the name of an answer without one -> {resolve, reject, logs}
    this.streams = new Set() // opaques that streams hold
    this.creditWaiters = []
    this.lastSent = this.lastReceived = Date.now()
    this.closed = new Promise((resolve) => { this._resolveClosed = resolve })
    socket.on('data', (bytes) => this._receive(bytes))
    socket.on('error', (error) => this._fail(error))
    socket.on('close', () => this._fail(new Error('the connection was closed')))
  }

  /** Any request; rejects with Refused where the server refuses it. `Open` resolves with {..., logs}. */
  async request (name, fields) {
    let opaque = this.lastOpaque
    do opaque = opaque % 0xffffffff + 1; while (this.waiting.has(opaque) || this.streams.has(opaque))
    this.lastOpaque = opaque
    const answer = this._waitFor(opaque)
    const sent = this._send(name, { ...fields, opaque })
    if (name === 'Mutate') this.credit -= sent
    return answer
  }

  open (bucket, partitions = []) { return this.request('Open', { bucket, partitions }) }
  go () { this._send('Go') }
  stream (partition, position, endSeq = wire.NEVER) {
    return this.request('Stream', { partition, state: 1, end_seq: endSeq, lease_id: 0n, with_answers: false, position, key_prefix: Buffer.alloc(0) })
  }

  barrier (cookie) {
    const answer = this._waitFor(`barrier ${cookie.toString('hex')}`)
    this._send('Barrier', { cookie })
    return answer
  }

  /** Sends a bundle once there is credit: the last one may take it below 0. */
  async mutate (fields) {
    while (this.credit <= 0 && !this.failure) await new Promise((resolve) => this.creditWaiters.push(resolve))
    return this.request('Mutate', { attempt: 0n, durability: 0, copies: 0, writer: Buffer.alloc(16), ...fields })
  }

  async close () {
    if (!this.failure) {
      this._send('Close')
      this.socket.end()
      setTimeout(() => this._fail(new Error('the server did not end the connection in time')), this.closeMs).unref()
    }
    await this.closed
  }

  // --- within ---------------------------------------------------------------------------------------

  async _logIn (mechanisms, user, password) {
    try {
      // A server that asks for no log-in proves nothing.
      if (!mechanisms.includes(MECHANISM) || !user) throw new Error(`the server wants a log-in by one of [${mechanisms.join(', ')}], and this client has ${user ? MECHANISM : 'no user'}`)
      const steps = scram(user, password)
      const challenge = this._waitFor('LogInChallenge')
      this._send('StartLogIn', { mechanism: MECHANISM, data: steps.first })
      const response = steps.respond((await challenge).data)
      const outcome = this._waitFor('LoggedIn')
      this._send('ContinueLogIn', { data: response })
      steps.check((await outcome).data)
    } catch (error) {
      this._fail(error)
      throw error
    }
  }

  _waitFor (key) {
    const answer = new Promise((resolve, reject) => this.failure ? reject(this.failure) : this.waiting.set(key, { resolve, reject, logs: [] }))
    answer.catch(() => {}) // who asked hears of it; nobody else has to
    return answer
  }

  _send (name, fields) {
    if (this.failure) throw this.failure
    const frame = wire.encode(name, fields)
    this.lastSent = Date.now()
    this.socket.write(frame)
    return frame.length
  }

  _receive (bytes) {
    if (this.failure) return // what still comes would only gather
    this.lastReceived = Date.now()
    this.arrived.push(bytes)
    this.arrivedBytes += bytes.length
    try {
      for (let needed = this._needed(); !this.failure && this.arrivedBytes >= needed; needed = this._needed()) {
        const all = this.arrived.length > 1 ? Buffer.concat(this.arrived) : this.arrived[0]
        const rest = all.subarray(needed)
        Object.assign(this, { arrived: [rest], arrivedBytes: rest.length })
        if (!this.header) { this.header = wire.decodeHeader(all); continue }
        const message = wire.decodeBody(this.header, all.subarray(0, needed))
        this.header = null
        this._take(message)
      }
    } catch (error) {
      if (!this.failure && wire.ERRORS[error.code]) this._send('Error', { status: wire.ERRORS[error.code], sentence: error.message, advice: '' })
      this._fail(error)
    }
  }

  _needed () { return this.header ? this.header.length : wire.HEADER_BYTES }

  _take (message) {
    const { message: name, opaque } = message
    if (STREAM_FRAMES.has(name)) {
      if (!this.streams.has(opaque)) throw new wire.ProtocolError('OUT_OF_TURN', `${name} without a stream`)
      if (name === 'StreamEnd') this.streams.delete(opaque)
      this.onStream(message)
      if (FROM_THE_WINDOW.has(name)) this._acknowledge(message.frameBytes)
    } else if (name === 'PartitionLog') {
      const asked = this.waiting.get(opaque)
      if (!asked || asked.logs.length === PARTITIONS_MAX) throw new wire.ProtocolError('MALFORMED', 'PartitionLog answers no open request, or comes too often')
      asked.logs.push(message)
    } else if (name === 'Credit') this._earn(Number(message.bytes))
    else if (name === 'Error') this._fail(Object.assign(new Error(`status ${message.status}: ${message.sentence}; ${message.advice}`), { status: message.status }))
    else if (WITHOUT_OPAQUE.has(name)) this._answer(name, message)
    else if (name === 'BarrierReply') this._answer(`barrier ${message.cookie.toString('hex')}`, message)
    else if (name !== 'Noop' && name !== 'CycleEnd') this._answer(opaque, message)
  }

  _answer (key, message) {
    const asked = this.waiting.get(key)
    if (!asked) throw new wire.ProtocolError('MALFORMED', `${message.message} answers no open request`)
    if (message.message === 'StreamReply') {
      if (message.status === 0) this.streams.add(message.opaque)
      this.onStream(message) // if it throws, the request still waits, and hears of it
    }
    this.waiting.delete(key)
    if (message.message === 'Refusal') return asked.reject(new Refused(message))
    asked.resolve({ ...message, logs: asked.logs })
  }

  _earn (bytes) {
    this.credit += bytes
    if (this.credit > 0) for (const resolve of this.creditWaiters.splice(0)) resolve()
  }

  _acknowledge (bytes) {
    this.unacknowledged += bytes
    if (this.failure || this.unacknowledged < this.windowBytes / 4) return
    this._send('Ack', { bytes: BigInt(this.unacknowledged) })
    this.unacknowledged = 0
  }

  _keepAlive (interval) {
    const timer = setInterval(() => {
      const now = Date.now()
      if (now - this.lastReceived > 2 * interval) this._fail(new Error('the server said nothing for two idle intervals'))
      else if (now - this.lastSent >= interval / 2) this._send('Noop')
    }, interval / 4)
    this.closed.then(() => clearInterval(timer))
  }

  _fail (error) {
    if (this.failure) return
    this.failure = error
    for (const { reject } of this.waiting.values()) reject(error)
    this.waiting.clear()
    for (const resolve of this.creditWaiters.splice(0)) resolve()
    this.socket.destroySoon()
    setTimeout(() => this.socket.destroy(), this.closeMs).unref() // a peer that does not read
    this._resolveClosed(error)
  }
}

module.exports = { Connection, FROM_THE_WINDOW, Refused }
