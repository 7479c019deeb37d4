"""Rolling a consumer back by no more than it must.

The consumer remembers on disk which keys it received lately (`received_keys`,
`received_keys_file`). After a failover the planner works out which of them hold changes that the
server does not have, and has only those read again (`planner`).
"""
