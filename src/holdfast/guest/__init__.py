"""RUNS UNTRUSTED: the inside of a kernel. Nothing the host decides may rest on what happens here."""
