"""Keeps the events of keys in LMDB: one machine, one file."""
