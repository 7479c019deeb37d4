"""The buckets of one server: which there are, and the work on their memory between requests."""

from upr_server.buckets.catalog import BucketCatalog
from upr_server.buckets.upkeep import Upkeep

__all__ = ["BucketCatalog", "Upkeep"]
