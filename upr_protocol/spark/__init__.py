"""UPR in Spark: the data source `upr`, which reads, streams and writes (extra `upr[spark]`)."""
