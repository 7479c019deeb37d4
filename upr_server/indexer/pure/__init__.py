"""From design documents and documents to index entries, without I/O, clock or random numbers."""
