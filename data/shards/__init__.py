"""Samples in tar files, read by index: SHARD.tar/MEMBER is a path like any other."""
