"""Three nodes of an indexer in one loop, over simulated links and in virtual time: see
docs/simulation.md."""
