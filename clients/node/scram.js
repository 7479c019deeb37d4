'use strict'
// The client's side of SCRAM-SHA-256 (RFC 5802, RFC 7677), for a connection in the clear.

const { createHash, createHmac, pbkdf2Sync, randomBytes, timingSafeEqual } = require('node:crypto')

const MECHANISM = 'SCRAM-SHA-256'
const ITERATIONS = [4096, 200000] // fewer are weak; more would hold this process

const hmac = (key, text) => createHmac('sha256', key).update(text).digest()

/** The three steps of one log-in: send `first`, then what `respond` gives for the challenge; `check` throws unless the server knows the user. */
function scram (user, password, nonce = randomBytes(18).toString('base64')) {
  const bare = `n=${user.normalize('NFKC').replaceAll('=', '=3D').replaceAll(',', '=2C')},r=${nonce}`
  let signature = null
  return {
    first: Buffer.from(`n,,${bare}`),
    respond (challenge) {
      const [text, both, salt, iterations] = /^r=([^,]+),s=([^,]+),i=([1-9]\d{0,9})$/.exec(challenge.toString()) ?? []
      if (!text || signature || !both.startsWith(nonce) || both === nonce) throw new Error('the server does not answer this log-in')
      if (iterations < ITERATIONS[0] || iterations > ITERATIONS[1]) throw new Error(`the server wants ${iterations} iterations`)
      const salted = pbkdf2Sync(password.normalize('NFKC'), Buffer.from(salt, 'base64'), Number(iterations), 32, 'sha256')
      const all = `${bare},${text},c=biws,r=${both}`
      const key = hmac(salted, 'Client Key')
      const mask = hmac(createHash('sha256').update(key).digest(), all)
      signature = hmac(hmac(salted, 'Server Key'), all)
      return Buffer.from(`c=biws,r=${both},p=${Buffer.from(key.map((byte, index) => byte ^ mask[index])).toString('base64')}`)
    },
    check (outcome) {
      const proof = Buffer.from(/^v=(.+)$/.exec(outcome.toString())?.[1] ?? '', 'base64')
      if (proof.length !== 32 || !signature || !timingSafeEqual(proof, signature)) throw new Error('the server does not know the user')
    }
  }
}

module.exports = { MECHANISM, scram }
