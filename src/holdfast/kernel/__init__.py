"""One kernel: the wire between host and kernel, the host's end of it, and the zygote that forks it."""
