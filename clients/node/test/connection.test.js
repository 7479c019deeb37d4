'use strict'
// What a connection does with a server that does not answer, or does not end.

const assert = require('node:assert/strict')
const net = require('node:net')
const test = require('node:test')
const wire = require('../wire.js')
const { Connection } = require('../connection.js')

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

test('a server that answers nothing does not hold up who connects', () => withServer(() => {}, async (port) => {
  await assert.rejects(Connection.connect({ host: '127.0.0.1', port, connectMs: 50 }), /did not answer in time/)
}))

test('a server that does not end its side does not hold up who closes', () => withServer((socket) => {
  socket.once('data', () => socket.write(HELLO_REPLY))
  socket.resume()
}, async (port) => {
  const connection = await Connection.connect({ host: '127.0.0.1', port, closeMs: 50 })
  await connection.close()
  assert.match(String(connection.failure), /did not end the connection in time/)
}))

test('a server that reads nothing does not keep the socket open', () => withServer((socket) => {
  socket.pause()
  socket.write(HELLO_REPLY)
}, async (port) => {
  const connection = await Connection.connect({ host: '127.0.0.1', port, closeMs: 50 })
  const ended = new Promise((resolve) => connection.socket.once('close', resolve))
  connection.socket.write(Buffer.alloc(1 << 26)) // more than the sockets hold
  await connection.close()
  await ended
}))
