"""UPR's protocol: the values, the wire, the sessions, and the clients that speak it."""
