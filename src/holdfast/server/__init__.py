"""Faces that serve: each decodes a request, calls one verb, and encodes what came of it."""
