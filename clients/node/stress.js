'use strict'
// Publishes and consumes while somebody kills the server and cuts connections:
//   node stress.js HOST PORT BUCKET PARTITIONS ROUNDS
// prints "round N" after each round and waits for a line on standard input, in which time somebody does
// harm; it publishes on meanwhile. At the end it prints what came of it, as JSON.

const assert = require('node:assert/strict')
const readline = require('node:readline')
const { Connection } = require('./connection.js')
const { Consumer } = require('./consumer.js')
const { MemoryCopy } = require('./copy.js')
const { Publisher } = require('./publisher.js')

const [host, port, bucket, partitionCount, rounds] = process.argv.slice(2)
const partitions = Array.from({ length: Number(partitionCount) }, (_, partition) => partition)
const address = { host, port: Number(port), windowBytes: 64 << 10 }
const pause = () => new Promise((resolve) => setTimeout(resolve, 50))
const PERSISTED = 1

async function untilItWorks (attempt) {
  for (let failures = 0; ; failures++) {
    try { return await attempt() } catch (error) { if (failures > 1000) throw error }
    await pause()
  }
}

/** Has a consumer go on to where the server stands now. */
async function catchUp (consumer) {
  const logs = await untilItWorks(async () => {
    const connection = await Connection.connect(address)
    try { return (await connection.open(bucket)).logs } finally { await connection.close() }
  })
  consumer.endSeqs = new Map(logs.map((log) => [log.partition, log.high_seq]))
  await untilItWorks(() => consumer.run(bucket, partitions))
}

/** Publishes what a crash may take back, so that there is something to roll back. */
async function makeNoise (isOver) {
  const publisher = new Publisher({ ...address, bucket, partitionCount: partitions.length })
  for (let number = 0; !isOver(); number++) {
    for (const partition of partitions) publisher.set(`noise-${partition}-${number % 50}`, String(number).padEnd(1000, '.'))
    await untilItWorks(() => publisher.flush())
    await new Promise((resolve) => setTimeout(resolve, 2))
  }
  await publisher.close()
}

async function main () {
  const copy = new MemoryCopy()
  const result = { rollbacks: 0, connections: 0, keys: 0 }
  const rollBack = copy.rollBack.bind(copy)
  copy.rollBack = (...args) => { result.rollbacks++; return rollBack(...args) }
  const consumer = new Consumer({ ...address, copy })
  let isOver = false
  const following = (async () => {
    while (!isOver) {
      result.connections++
      await consumer.run(bucket, partitions).catch(pause)
    }
  })()
  const publisher = new Publisher({ ...address, bucket, partitionCount: partitions.length, durability: PERSISTED })
  const expected = new Map()
  const noise = makeNoise(() => isOver)
  const input = readline.createInterface({ input: process.stdin })
  const lines = input[Symbol.asyncIterator]()
  for (let round = 1; round <= Number(rounds); round++) {
    for (let number = 0; number < 100; number++) {
      const key = `key-${round % 2}-${number}`
      expected.set(key, `value-${round}-${number}`)
      publisher.set(key, expected.get(key))
    }
    for (let number = 0; number < 20; number++) publisher.increment(`count-${number}`, 1, 1)
    await publisher.flush(1000)
    console.log(`round ${round}`)
    await lines.next()
  }
  for (let number = 0; number < 20; number++) expected.set(`count-${number}`, rounds)
  await publisher.close()
  isOver = true
  input.close()
  consumer.stop()
  await Promise.all([following, noise])
  await catchUp(consumer)
  const fresh = new MemoryCopy()
  await catchUp(new Consumer({ ...address, copy: fresh }))
  const texts = (items) => Object.fromEntries([...items].map(([key, value]) => [key, String(value)]).sort())
  const kept = [...fresh.items].filter(([key]) => !key.startsWith('noise'))
  assert.deepEqual(texts(kept), texts(expected), 'the server has something else than was acknowledged')
  assert.deepEqual(texts(copy.items), texts(fresh.items), 'the copy that was followed has something else')
  console.log(JSON.stringify({ ...result, keys: expected.size }))
}

main().catch((error) => { console.error(error); process.exitCode = 1 })
