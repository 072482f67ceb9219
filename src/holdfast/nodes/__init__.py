"""Machines that start kernels. There is one so far: this one (`local`)."""
