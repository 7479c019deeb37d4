"""The indexer: secondary indexes, each as fresh as a query asks. See docs/indexer.md."""
