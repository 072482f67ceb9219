"""Bytes by digest. A local directory here; an object store behind the same methods."""
