"""The recipes as commands: `python -m upr_protocol.spark NAME`, or `spark-submit FILE`.

Each module has `argument_parser`, for what the command line may say, and `work`, which does it.
"""
