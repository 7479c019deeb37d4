'use strict'
// What a connection does with a server that does not answer, does not end, or says too much.

const assert = require('node:assert/strict')
const test = require('node:test')
const { Connection } = require('../connection.js')
const { HELLO_REPLY, log, withAnswers, withServer } = require('./fake_server.js')

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

test('a server that tells more partitions than a bucket can have is refused', () => withAnswers({
  Open: ({ opaque }) => Array.from({ length: 1025 }, (_, partition) => log(opaque, partition))
}, async (port) => {
  const connection = await Connection.connect({ host: '127.0.0.1', port, closeMs: 50 })
  await assert.rejects(connection.open('b'), { code: 'MALFORMED' })
}))
