'use strict'
// The simplest copy that a Consumer can keep.

const { OPERATIONS } = require('./wire.js')

/** A copy in memory, which goes back to nothing when it has to roll back. */
class MemoryCopy {
  constructor () { this.partitions = new Map() }

  apply (partition, rows) {
    const items = this.partitions.get(partition) ?? new Map()
    this.partitions.set(partition, items)
    for (const { operation, key, value } of rows) {
      if (operation === OPERATIONS.SET) items.set(key.toString('latin1'), Buffer.from(value))
      else items.delete(key.toString('latin1'))
    }
  }

  rollBack (partition) { this.partitions.delete(partition); return 0n }

  get items () { return new Map([...this.partitions.values()].flatMap((items) => [...items])) }
}

module.exports = { MemoryCopy }
