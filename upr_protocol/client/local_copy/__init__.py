"""A copy of a bucket in a local SQLite database, kept up to date by following the bucket.

Items and resume state change in one transaction, so the process may be killed at any moment
(`file`, `follower`). Other processes read the copy meanwhile (`database`).
"""
