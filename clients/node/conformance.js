'use strict'
// The client of `upr-server conformance --client "node conformance.js"`: does the task on standard input.

const { Connection } = require('./connection.js')
const { Consumer, nothingYet } = require('./consumer.js')
const { MemoryCopy } = require('./copy.js')
const { Publisher } = require('./publisher.js')
const { OPERATIONS, counterDelta } = require('./wire.js')

const keyText = (key) => Buffer.from(key, 'latin1').toString() // `MemoryCopy` has a character for each byte
const orNull = (number) => number === undefined ? null : String(number)

function positionFrom ({ log, ...numbers }) {
  const entries = log.map(([history, seq]) => ({ history_id: BigInt(history), seq: BigInt(seq) }))
  return { ...Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, BigInt(value)])), log: { entries } }
}

function positionTo ({ log, ...numbers }) {
  const entries = log.entries.map((entry) => [String(entry.history_id), String(entry.seq)])
  return { ...Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, String(value)])), log: entries }
}

async function consume ({ bucket, partitions, end_seqs: ends, positions, window_bytes: windowBytes, idle_interval_s: idleIntervalS, ...address }) {
  const copy = new MemoryCopy()
  const rollbacks = []
  const rollBack = copy.rollBack.bind(copy)
  copy.rollBack = (partition, ceiling) => { rollbacks.push([partition, String(ceiling)]); return rollBack(partition, ceiling) }
  const byNumber = (object, read) => new Map(Object.entries(object).map(([partition, value]) => [Number(partition), read(value)]))
  const consumer = new Consumer({ ...address, copy, windowBytes, idleIntervalS, endSeqs: byNumber(ends, BigInt), positions: byNumber(positions, positionFrom) })
  for (;;) {
    try {
      await consumer.run(bucket, partitions)
      break
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 50))
    }
  }
  const items = Object.fromEntries([...copy.items].map(([key, value]) => [keyText(key), String(value)]))
  const last = Object.fromEntries(partitions.map((partition) => [partition, positionTo(consumer.positions.get(partition) ?? nothingYet())]))
  return { items, positions: last, rollbacks }
}

async function publish ({ bucket, partition_count: partitionCount, operations, ...address }) {
  const publisher = new Publisher({ ...address, bucket, partitionCount })
  const results = operations.map(({ operation, key, value }) => {
    const delta = operation === 'INCREMENT' ? counterDelta(value, value) : value
    return publisher.apply({ operation: OPERATIONS[operation], key, value: delta })
  })
  await publisher.flush()
  await publisher.close()
  return {
    results: await Promise.all(results.map((result) => result.then(
      ({ seq, cas, counter }) => ({ status: 0, seq: String(seq), cas: String(cas), counter: orNull(counter) }),
      ({ status }) => ({ status, seq: null, cas: null, counter: null })
    )))
  }
}

async function get ({ bucket, partition, keys, ...address }) {
  const connection = await Connection.connect(address)
  await connection.open(bucket, [partition])
  const [items, refused] = [{}, {}]
  for (let rest = keys.map((key) => Buffer.from(key)); rest.length;) {
    const reply = await connection.request('Get', { partition, history_id: 0n, keys: rest })
    for (const { operation, key, value, flags } of reply.chunk.rows) {
      if (operation === OPERATIONS.SET) items[String(key)] = String(value)
      else if (flags) refused[String(key)] = flags
    }
    rest = rest.slice(reply.next_index)
  }
  await connection.close()
  return { items, refused }
}

async function main () {
  let input = ''
  process.stdin.setEncoding('utf8')
  for await (const piece of process.stdin) input += piece
  const { task, ...rest } = JSON.parse(input)
  process.stdout.write(JSON.stringify(await { consume, publish, get }[task](rest)) + '\n')
}

main().catch((error) => { console.error(error); process.exitCode = 1 })
