'use strict'
// A server for tests: it answers each message of a client as a test says.

const net = require('node:net')
const wire = require('../wire.js')

const HELLO_REPLY = wire.encode('HelloReply', {
  version: 1, features: 0, idle_interval_s: 20, frame_body_bytes_max: 1 << 25, open_barriers_max: 64, requests_open_max: 64, identity: '', mechanisms: []
})

/** Calls `use` with the port of a server that gives each connection to `accept`, and never ends its side. */
async function withServer (accept, use) {
  const sockets = []
  const server = net.createServer({ allowHalfOpen: true }, (socket) => { sockets.push(socket); socket.on('error', () => {}); accept(socket) })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  try { await use(server.address().port) } finally {
    for (const socket of sockets) socket.destroy()
    server.close()
  }
}

const log = (opaque, partition) => wire.encode('PartitionLog', { opaque, partition, state: 1, high_seq: 0n, persisted_seq: 0n, purge_seq: 0n, log: { entries: [] } })

const ANSWERS = {
  Hello: () => [HELLO_REPLY],
  Open: ({ opaque }) => [log(opaque, 0), wire.encode('Opened', { opaque, partition_count: 2, map_revision: 0n }), wire.encode('Credit', { bytes: 1n << 16n })]
}

/** Calls `use` with the port of a server, and with the messages that it has got. `answers` has by the name of a message the frames to answer it with. */
function withAnswers (answers, use) {
  const messages = []
  const all = { ...ANSWERS, ...answers }
  return withServer((socket) => {
    let bytes = Buffer.alloc(0)
    socket.on('data', (more) => {
      bytes = Buffer.concat([bytes, more])
      for (;;) {
        const length = bytes.length < wire.HEADER_BYTES ? Infinity : wire.HEADER_BYTES + bytes.readUInt32LE(12)
        if (bytes.length < length) return
        const message = wire.decode(bytes.subarray(0, length))
        bytes = bytes.subarray(length)
        messages.push(message)
        if (message.message === 'Close') socket.end()
        for (const frame of all[message.message]?.(message) ?? []) socket.write(frame)
      }
    })
  }, (port) => use(port, messages))
}

module.exports = { HELLO_REPLY, log, withAnswers, withServer }
